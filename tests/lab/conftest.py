"""Fixtures of the tests of scripts, beyond `run` and `printed` (tests/conftest.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def written(printed, tmp_path: Path) -> Callable[..., tuple[str, Any]]:
    """Like `printed`, for a command with --json; returns the text and the file's content."""

    def call(command: str, *more: object) -> tuple[str, Any]:
        report = tmp_path / "report.json"
        text = printed(command, *more, "--json", report)
        return text, json.loads(report.read_text(encoding="utf-8"))

    return call
