"""What several scripts share: a kernel by its name, a config in one line, refusals, JSON."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

from fmha.config import AttentionConfig
from gqa_lowlatency.config import DecodeConfig
from moe.config import GroupedConfig

REFUSED = 2  # exit code, as argparse's


def main_of(kernels: dict[str, str], text: str) -> int:
    """Run main() of the module that sys.argv names, of the first without a name; text: the help
    where no kernel is named."""
    name, first = next(iter(kernels)), "".join(sys.argv[1:2])
    if first in ("-h", "--help"):
        script = Path(sys.argv[0]).name
        print(f"usage: {script} [{'|'.join(kernels)}] FLAGS; `{script} NAME -h` lists them\n")
        print(text, end="")
        return 0
    if first in kernels:
        name = sys.argv.pop(1)
    sys.argv[0] += f" {name}"
    return importlib.import_module(kernels[name]).main()


def describe(config: AttentionConfig | DecodeConfig | GroupedConfig) -> str:
    """The config in one line: head dim and dtype, or the format, and what else differs from the
    default."""
    if isinstance(config, GroupedConfig):
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
