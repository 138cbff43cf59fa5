"""Code shared by several commands: a config in one line, refusals, files of rows, end of a run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from ptxemu.report import Report

T = TypeVar("T")
REFUSED = 2  # exit code, as argparse's
# Optional package -> the extra of pyproject.toml that has it.
EXTRA_OF = {
    **dict.fromkeys(("PIL", "gguf", "jinja2", "matplotlib", "rich", "safetensors"), "scripts"),
    "pytest": "dev",
    "transformers": "transformers",
}


def changed(config: Any) -> dict[str, Any]:
    """Fields of a config that are not as by default."""
    values = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
    return {field.name: value for field, value in values if value != field.default}


def describe(config: Any) -> str:
    """The config in one line: its format, or head dim and dtype, and what else differs from the
    default."""
    named = [name for name in ("fmt", "head_dim", "dtype") if hasattr(config, name)]
    words = ["head_dim " * (name == "head_dim") + str(getattr(config, name)) for name in named]
    for name, value in changed(config).items():
        if dataclasses.is_dataclass(value):
            words.append(describe(value))
        elif name not in named:
            words.append(name if value is True else f"{name} {value}")
    return ", ".join(words)


def refuse(reason: object) -> int:
    """Say why nothing runs, in one line on stderr; returns the exit code."""
    print(f"refused: {reason}", file=sys.stderr)
    return REFUSED


def lacking(error: BaseException | None) -> str:
    """Return which package an ImportError lacks and the extra that has it, '' for any other."""
    while error is not None and not getattr(error, "name", None):
        error = error.__cause__
    package = str(getattr(error, "name", "")).partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or package not in EXTRA_OF:
        return ""
    return f"{package} is not installed: pip install '.[{EXTRA_OF[package]}]' in the checkout"


def environment() -> dict[str, str]:
    """Environment of a process that is to import this checkout, whatever else is installed."""
    root = Path(__file__).resolve().parents[2]
    path = str(root), str(root / "scripts"), os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def progress_bar(console: Console) -> Progress:
    """A bar of how many of how many are done, and the time. It vanishes at the end, and is absent
    where the console is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    how = {"console": console, "transient": True, "disable": not console.is_terminal}
    return Progress(*columns, TimeElapsedColumn(), **how)


def tracked(items: Sequence[T], words: str) -> Iterator[T]:
    """Yield the items, with a progress bar on stderr if rich is installed."""
    try:
        from rich.console import Console
    except ImportError:
        yield from items
        return
    with progress_bar(Console(stderr=True)) as bar:
        yield from bar.track(items, description=words)


def finish(
    options: argparse.Namespace, report: Report, document: dict[str, Any], *, ok: bool
) -> int:
    """The end of a run: the figures as JSON, with the machine and what the checker found; returns
    the exit code."""
    if options.json:
        from lab.measure.timing import setting
        from ptxemu.check import text

        checks = {"checks": text.document(report, counts=False)} if report.launches else {}
        write_json(options.json, {"setting": setting(), **document, **checks})
    return 0 if ok and not report.errors else 1


def write_json(path: Path, document: object) -> None:
    """Write `document`, and the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def save_rows(path: Path, rows: list[dict]) -> None:
    """JSON, a line per row; an array of them in a .json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    text = "[\n" + ",\n".join(lines) + "\n]" if path.suffix == ".json" else "\n".join(lines)
    path.write_text(text + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[dict]:
    """Return what `save_rows` wrote."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [*map(json.loads, text.splitlines())]
