"""The flags of a KV cache: bytes with a unit, token counts, models, a run and a plan."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcache.layouts.layout import Layout
from kvcache.layouts.models import BLOCK_TOKENS
from kvcache.layouts.presets import CONFIGS, Options, from_config, preset
from lab.tools import groups
from lab.tools.groups import add, switch

if TYPE_CHECKING:
    from kvcache.planner.capacity import Mix

PLAIN = "gqa"  # the model that is none
LENGTHS, WORKSPACE_ROWS = "128,1k,8k,64k,1M", 32768
BATCHED_TOKENS = 8192  # of a step, the default that vLLM's issue #54703 ran with

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def memory(text: str) -> int:
    """Argument type: bytes, '141GB' (decimal) or '80GiB' (binary)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    if not found or found[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a number with a unit, such as 141GB or 80GiB"
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def mix(text: str) -> Mix:
    """Argument type: '8k', or '8k:3,64k:1' for three short requests to a long one."""
    from kvcache.planner.capacity import Mix  # brings numpy

    lengths, weights = [], []
    for part in text.split(","):
        length, colon, weight = part.partition(":")
        lengths.append(groups.positive_count(length))
        if colon and (not weight.isdigit() or not int(weight)):
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected a weight from 1 on after the colon"
            )
        weights.append(int(weight) if colon else 1)
    return Mix(tuple(lengths), tuple(weights))


def token_list(text: str) -> tuple[int, ...]:
    """Argument type: '1k,8k,64k'."""
    return tuple(sorted({groups.positive_count(part) for part in text.split(",")}))


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
    raise argparse.ArgumentTypeError(
        f"{text!r}: expected a number from 0 on, or a share below 100%"
    )


def layouts(models: Sequence[str], records: Sequence[str], **options: object) -> list[Layout]:
    """Layouts of every model with every record; a model is a preset's name or where its config.json
    is."""
    return [layout(model, record, **options) for model in models for record in records or ("",)]


def layout(model: str, record: str, **options: object) -> Layout:
    """ValueError for a model or an option that there is not."""
    if model in CONFIGS:
        return preset(model, record=record, **options)
    if not Path(model).exists():
        raise ValueError(f"{model!r} is neither a file nor one of {', '.join(CONFIGS)}")
    return from_config(model, Options(record, **options))


def label(of: Layout) -> str:
    """Name, and the bytes of the entries of its streams."""
    records = dict.fromkeys(stream.record for stream in of.streams)
    return f"{of.name} {'+'.join(str(record.bytes) for record in records)}"


# -- groups ---------------------------------------------------------------------------------------


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py kvcache`."""
    group, text = parser.add_argument_group("cache"), {"type": str, "metavar": "NAME|PATH"}
    names = ", ".join((PLAIN, *CONFIGS))
    add(group, "model", f"{names}, or a config.json", PLAIN, **text)
    add(
        group,
        "record",
        "record format of the entries, see kvcache.preset",
        "",
        type=str,
        metavar="NAME",
    )
    add(group, "layers", "limit for the copies of every array", 2)
    add(group, "kv-heads", f"KV heads of {PLAIN}", 2, old=["heads"])
    add(group, "group", "query heads per KV head", 2)
    words = "columns of a head in a plain model"
    add(group, "head-dim", words, 0, old=["dim"], shown="the model's, else 64")
    add(group, "window", f"window in tokens for half of the layers of {PLAIN}; 0: none", 0)
    add(group, "block-tokens", "tokens per block", 0, shown=f"the model's, 16 of {PLAIN}")
    add(group, "draft", "tokens per step that can be rolled back", 0)
    switch(group, "canary", "check guard bytes after every slot, and checksums, after every step")
    group = groups.add_run(parser, seed="tokens and numbers")
    add(group, "steps", "decoding steps after the prompts", 2)
    add(group, "chunk", "tokens of a prompt per step", 0, shown="a block and a half")
    switch(group, "events", "print the events of the prefix cache")


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Flags of `plan.py`."""
    _add_model(parser.add_argument_group("model"))
    _add_memory(parser.add_argument_group("memory"))
    _add_requests(parser.add_argument_group("requests"))
    output = parser.add_argument_group("output")
    groups.add_json(output, "everything, exact,")
    groups.add_plot(output, "requests over context length, and how the pools share the memory")


def _add_model(group: argparse._ArgumentGroup) -> None:
    words = f"{', '.join(CONFIGS)}, or a config.json; repeatable"
    many = {"type": str, "action": "append"}
    add(group, "model", words, shown="deepseek-v4-pro", metavar="NAME|PATH", **many)
    words = (
        "record format, repeatable: V4 fp8 | fp8-index8 | bf16, V4.1 fp4 | fp8 | bf16, "
        "V3.2 fp8 | bf16, plain keys and values bf16 | fp8"
    )
    add(group, "record", words, [], shown="the first", metavar="NAME", **many)
    words = "tokens per block, a multiple of every ratio"
    add(group, "block-tokens", words, BLOCK_TOKENS, type=groups.count)
    add(group, "draft", "tokens per step that can be rolled back", 0, type=groups.count)
    add(group, "mtp", "draft layers with a cache", 0, type=groups.count)
    switch(group, "online-hca", "store a running softmax in the tails of HCA layers, not 128 rows")


def _add_memory(group: argparse._ArgumentGroup) -> None:
    size = {"type": memory, "metavar": "SIZE"}
    words = "memory of the GPU, such as 141GB or 80GiB"
    add(group, "memory", words, "141GB", shown="141GB (an H200)", **size)
    words = "part of the memory for weights, activations and everything else"
    add(group, "weights", words, 0, shown="0B", **size)
    words = (
        "copies of states: a number, or a share of the cache's memory; models without a state "
        "need none"
    )
    add(group, "checkpoints", words, (0, 0.0), type=reserve, metavar="N|P%", shown="0")
    words = "number of states; the rest is for blocks"
    add(group, "states", words, 0, type=groups.count, shown="what fits the most requests")
    words = "entries that are expanded to BF16 at a time if the record is quantised"
    add(group, "workspace", words, WORKSPACE_ROWS, type=groups.count, metavar="ROWS")


def _add_requests(group: argparse._ArgumentGroup) -> None:
    words = (
        "tokens per request, or several lengths with weights, such as 8k:3,64k:1; the memory is "
        "divided for these"
    )
    add(group, "context", words, "8k", type=mix, metavar="N|N:W,...")
    words = "most requests at a time; 0: as many as fit"
    add(group, "batch", words, 0, type=groups.count)
    words = "context lengths of the tables"
    add(group, "lengths", words, LENGTHS, type=token_list, metavar="N,...")
    words = "tokens per step in vLLM's admission"
    add(group, "batched-tokens", words, BATCHED_TOKENS, type=groups.count)


def operations(text: str) -> int:
    """Argument type: '50k' is 50,000, '2m' two million."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def add_soak(parser: argparse.ArgumentParser) -> None:
    """Flags of `soak.py kvcache`."""
    words = "number of operations; 50k is 50,000 and 2m two million; default: 1m"
    given = {"type": operations, "default": 1_000_000, "metavar": "N"}
    parser.add_argument("--operations", help=words, **given)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first cache; default: 0")
    words = "cases whose name contains it, repeatable; default: all"
    parser.add_argument("--layout", action="append", metavar="TEXT", help=words)
    counted = {"type": int, "metavar": "N"}
    words = "operations between full comparisons; default: 8"
    parser.add_argument("--every", default=8, help=words, **counted)
    words = "number of processes; default: 2"
    parser.add_argument("--jobs", type=groups.number, default=2, metavar="N", help=words)
    groups.add_json(parser, "the figures")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run a stored failure again")
