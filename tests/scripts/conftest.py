"""Scripts are modules beside each other: they are importable here, and their main() runs in the
process of the tests, which has imported torch and the DSL already."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., CompletedProcess[str]]:
    """run("bench.py gqa", "--json", path): what `python scripts/bench.py gqa ...` would end with.

    The first word is a whole command line; behind it stand words that are taken as they are.
    """
    monkeypatch.setenv("COLUMNS", "200")

    def call(command: str, *more: object) -> CompletedProcess[str]:
        script, *words = [*shlex.split(command), *map(str, more)]
        monkeypatch.setattr(sys, "argv", [f"scripts/{script}", *words])
        try:
            code = importlib.import_module(script.removesuffix(".py")).main(words)
        except SystemExit as left:
            code = left.code or 0
        return CompletedProcess(script, code, *capsys.readouterr())

    return call


@pytest.fixture
def printed(run) -> Callable[..., str]:
    """What a command prints that ends well."""

    def call(command: str, *more: object) -> str:
        result = run(command, *more)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return call


@pytest.fixture
def written(printed, tmp_path: Path) -> Callable[..., tuple[str, Any]]:
    """The same of a command with --json, and what it writes there."""

    def call(command: str, *more: object) -> tuple[str, Any]:
        report = tmp_path / "report.json"
        text = printed(command, *more, "--json", report)
        return text, json.loads(report.read_text(encoding="utf-8"))

    return call
