"""What several scripts share: a kernel by its name, a config in one line, refusals, JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fmha.config import AttentionConfig
    from gqa_lowlatency.config import DecodeConfig
    from moe.config import GroupedConfig

REFUSED = 2  # exit code, as argparse's


def main_of(kernels: dict[str, str], text: str, argv: Sequence[str] | None) -> int:
    """main() of the module that the first of `argv` names, of the first one without a name; text:
    the help where no kernel is named."""
    words = [*(sys.argv[1:] if argv is None else argv)]
    name, first = next(iter(kernels)), "".join(words[:1])
    if first in ("-h", "--help"):
        script = Path(sys.argv[0]).name
        print(f"usage: {script} [{'|'.join(kernels)}] FLAGS; `{script} NAME -h` lists them\n")
        print(text, end="")
        return 0
    if first in kernels:
        name = words.pop(0)
    return main_under(name, kernels[name], words)


def main_under(name: str, module: str, argv: Sequence[str]) -> int:
    """main() of `module`, whose usage then begins as in "bench.py fmha"."""
    before = sys.argv[0]
    sys.argv[0] = f"{before} {name}"
    try:
        return importlib.import_module(module).main(argv)
    finally:
        sys.argv[0] = before


def describe(config: AttentionConfig | DecodeConfig | GroupedConfig) -> str:
    """The config in one line: head dim and dtype, or the format, and what else differs from the
    default."""
    if hasattr(config, "fmt"):
        shown, words = ("fmt",), [config.fmt]
    else:
        shown, words = ("head_dim", "dtype"), [f"head_dim {config.head_dim}", config.dtype]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in shown or value == field.default:
            continue
        words.append(field.name if value is True else f"{field.name} {value}")
    return ", ".join(words)


def refuse(reason: object) -> int:
    """Say why nothing runs, in one line on stderr; returns the exit code."""
    print(f"refused: {reason}", file=sys.stderr)
    return REFUSED


def write_json(path: Path, document: object) -> None:
    """Write `document`, and the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write a JSON list, a line per row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def save_rows(path: Path, rows: list[dict]) -> None:
    """JSON, a line per row; an array of them in a .json."""
    if path.suffix == ".json":
        write_rows(path, rows)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[dict]:
    """What `save_rows` wrote."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [*map(json.loads, text.splitlines())]
