"""What several scripts share: a config in one line, how they refuse, and the JSON they write."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from fmha.config import AttentionConfig

REFUSED = 2  # exit code, as argparse's


def describe(config: AttentionConfig) -> str:
    """The config in one line: head dim and dtype, and what else differs from the default."""
    words = [f"head_dim {config.head_dim}", config.dtype]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("head_dim", "dtype") or value == field.default:
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
