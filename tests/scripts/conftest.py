"""Scripts are modules beside each other: they are importable here, and their main() runs in the
process of the tests, which has imported torch and the DSL already."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., CompletedProcess[str]]:
    """run("bench.py", "gqa", ...): what `python scripts/bench.py gqa ...` would end with."""

    def call(script: str, *arguments: object) -> CompletedProcess[str]:
        words = [*map(str, arguments)]
        monkeypatch.setattr(sys, "argv", [f"scripts/{script}", *words])
        monkeypatch.setenv("COLUMNS", "200")
        try:
            code = importlib.import_module(script.removesuffix(".py")).main(words)
        except SystemExit as left:
            code = left.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        return CompletedProcess(script, code, *capsys.readouterr())

    return call
