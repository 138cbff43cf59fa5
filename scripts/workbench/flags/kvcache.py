"""Command-line values of the KV cache scripts: bytes with a unit, token counts, models."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.layouts.layout import Layout
from kvcache.layouts.presets import CONFIGS, Options, from_config, preset

if TYPE_CHECKING:
    from kvcache.planner.capacity import Mix

PLAIN = "gqa"  # the model that is none
BATCHED_TOKENS = 8192  # of a step, the default that vLLM's issue #54703 ran with

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
THOUSANDS = {"": 1, "k": 2**10, "m": 2**20}


def memory(text: str) -> int:
    """Argument type: bytes, '141GB' (decimal) or '80GiB' (binary)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    if not found or found[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r}: a number with a unit, as in 141GB or 80GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def tokens(text: str) -> int:
    """Argument type: '8192', '8k' (8,192) or '1M' (1,048,576)."""
    found = re.fullmatch(r"(\d+)([km]?)", text.strip(), re.IGNORECASE)
    count = int(found[1]) * THOUSANDS[found[2].lower()] if found else 0
    if count < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: a number of tokens from 1 on, as in 8192 or 8k"
        )
    return count


def mix(text: str) -> Mix:
    """Argument type: '8k', or '8k:3,64k:1' for three short requests to a long one."""
    from kvcache.planner.capacity import Mix  # brings numpy

    lengths, weights = [], []
    for part in text.split(","):
        length, colon, weight = part.partition(":")
        lengths.append(tokens(length))
        if colon and (not weight.isdigit() or not int(weight)):
            raise argparse.ArgumentTypeError(f"{part!r}: a weight from 1 on behind the colon")
        weights.append(int(weight) if colon else 1)
    return Mix(tuple(lengths), tuple(weights))


def token_list(text: str) -> tuple[int, ...]:
    """Argument type: '1k,8k,64k'."""
    return tuple(sorted({tokens(part) for part in text.split(",")}))


def reserve(text: str) -> tuple[int, float]:
    """Argument type: checkpoints, as a number or as a share of the memory ('10%')."""
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100
            if 0 <= share < 1:
                return 0, share
        elif int(text) >= 0:
            return int(text), 0.0
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: a number from 0 on, or a share below 100%")


def count(text: str) -> int:
    """Argument type: an integer from 0 on."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: an integer from 0 on")
    return int(text)


def layouts(models: Sequence[str], records: Sequence[str], **options: object) -> list[Layout]:
    """Of every model with every record; a model is a preset's name or where its config.json is."""
    return [layout(model, record, **options) for model in models for record in records or ("",)]


def layout(model: str, record: str, **options: object) -> Layout:
    """ValueError for a model or an option that there is not."""
    if model in CONFIGS:
        return preset(model, record=record, **options)
    if not Path(model).exists():
        raise ValueError(f"{model!r}: neither a file nor one of {', '.join(CONFIGS)}")
    return from_config(model, Options(record, **options))


def label(of: Layout) -> str:
    """Name, and the bytes of the entries of its streams."""
    records = dict.fromkeys(stream.record for stream in of.streams)
    return f"{of.name} {'+'.join(str(record.bytes) for record in records)}"
