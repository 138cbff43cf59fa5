"""The flags that spell an attention case; `lab.problems.fmha.case_of` makes it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from fmha.config import (
    EXP2_PAIRS,
    FP8,
    HEAD_DIMS,
    INSTRUCTIONS,
    IO_DTYPES,
    OUT_DTYPES,
    PORTABLE_DIMS,
    PORTABLE_PAGE_SIZES,
    PORTABLE_SCHEDULES,
    SCHEDULES,
    AttentionConfig,
)
from kernelkit.plan.limits import MAX_POSITION
from lab.tools import groups
from lab.tools.groups import add, switch

PACKED = ("q", "k", "qk")
SHAPE = "B,Sq,Skv,Hq,Hkv"
# Sizes by command: what asks for a config alone, a picture, a rate.
PLAIN = {"batch": 1, "q_len": 128, "kv_len": 128, "q_heads": 1, "kv_heads": 1}
DEMO = {"batch": 2, "q_len": 200, "kv_len": 333, "q_heads": 4, "kv_heads": 2}


@dataclass(frozen=True)
class Option:
    """A tunable field of `AttentionConfig`, written once: its flag, a case's field, the word in a
    case's name, and the values that random problems take.

    about: help text of the flag.
    shown: the default, in words.
    word: format of the value in the name.
    place: position of the word; below 0 for before the dtype.
    drawn: random values for kernels of one architecture; empty for none.
    portable: random values for kernels that every GPU runs; empty for none.
    """

    name: str
    about: str
    shown: str
    word: str
    place: int
    drawn: tuple[Any, ...] = ()
    portable: tuple[Any, ...] = ()
    choices: tuple[str, ...] = ()

    @property
    def default(self) -> Any:
        """The default of the config."""
        return getattr(AttentionConfig, self.name)


# In the order in which values are drawn. Every name of `fmha.config.TUNABLE` is here.
OPTIONS = (
    Option(
        *("tile_m", "query rows per block, on Hopper", "by head dim", "rows{}", 2),
        (64, 128, 192),
        (16, 32, 64, 96),
    ),
    Option(
        *("tile_n", "keys per tile", "by window", "tile{}", 3),
        (48, 64, 80, 96, 112, 128, 144, 176),
        (16, 32, 48, 64, 96),
    ),
    Option(
        *("slices", "with mma.sync: warps that share columns of O", "by head dim", "slices{}", -1),
        portable=(1, 2, 4),
    ),
    Option(
        *("ctas", "CTAs that share fetched keys, on Hopper", "by sizes", "ctas{}", 4),
        (1, 2),
    ),
    *(
        Option(
            f"{ring}_stages",
            f"stages of the {ring.upper()} ring",
            "as many as fit and help",
            f"{ring}stages{{}}",
            place,
            (2, 3, 4),
        )
        for place, ring in enumerate("kv")
    ),
    Option(
        "schedule",
        "one query tile, or two; with mma.sync: what warps share of Q K^T",
        *("by sizes", "{}", -3),
        SCHEDULES,
        PORTABLE_SCHEDULES,
        tuple(dict.fromkeys((*SCHEDULES, *PORTABLE_SCHEDULES))),
    ),
    Option(
        "polynomial",
        f"how many of {EXP2_PAIRS} pairs of exponentials use a polynomial",
        *("by head dim", "poly{}", 5),
        (0, 3, 8, 16),
        (0, 4),
    ),
    Option(
        "rescale_log2",
        "log2 of how far the reference maximum may lag",
        *("15, raw fp16 8", "lag{:g}", 6),
        (0.0, 4.0, 8.0),
        (0.0, 4.0, 8.0),
    ),
    Option(
        *("instructions", "use the kernel that every GPU runs", "only if there is no other"),
        *("{}", -2),
        choices=INSTRUCTIONS,
    ),
)


def shape(text: str) -> tuple[int, ...]:
    """Argument type: 'B,Sq,Skv,Hq,Hkv'."""
    try:
        sizes = tuple(groups.count(part) for part in text.split(","))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {SHAPE}: {error}") from None
    if len(sizes) != 5:
        raise argparse.ArgumentTypeError(f"{text!r} is not {SHAPE}")
    return sizes


def head_dims(text: str) -> tuple[int, int]:
    """Argument type: 'D' or 'D,Dv'; 0 for a Dv that is D."""
    try:
        first, *rest = (groups.number(part) for part in text.split(","))
        (second,) = rest or [0]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not D or D,Dv") from error
    return first, 0 if second == first else second


def page_size(text: str) -> int:
    """Argument type: a page size, 0 for none."""
    if text not in map(str, (0, *PORTABLE_PAGE_SIZES)):
        raise argparse.ArgumentTypeError(
            f"{text}: must be one of {PORTABLE_PAGE_SIZES}, or 0 for none"
        )
    return int(text)


def position(text: str) -> int:
    """Argument type: a position among the keys."""
    value = int(text)
    if abs(value) >= MAX_POSITION:
        raise argparse.ArgumentTypeError(f"{text}: must be within +-{MAX_POSITION - 1}")
    return value


def even(text: str) -> int:
    """Argument type: an even number, which pairs of columns make."""
    value = groups.number(text)
    if value < 0 or value % 2:
        raise argparse.ArgumentTypeError(f"{text} is not an even number from 0 on")
    return value


def add_case(parser: argparse.ArgumentParser, sizes: dict[str, int] = PLAIN) -> None:
    """All flags of a case; sizes: the defaults."""
    group = parser.add_argument_group("problem")
    groups.add_sizes(group, **sizes)
    own = " | ".join(f"{d}" if d == dv else f"{d},{dv}" for d, dv in HEAD_DIMS)
    supported = f"{own}; with mma.sync multiples of {PORTABLE_DIMS.step} to {PORTABLE_DIMS[-1]}"
    dims = {"type": head_dims, "metavar": "D[,Dv]", "shown": "64"}
    add(group, "head-dim", f"columns of Q and K, and of V: {supported}", (64, 0), **dims)
    groups.add_dtypes(group, (*IO_DTYPES, FP8), OUT_DTYPES, "q, k and v")
    add(
        group,
        "kv-dtype",
        "dtype of k and v only, with q in bf16",
        "",
        shown="as --dtype",
        choices=(FP8,),
    )
    switch(group, "scales", "use scales for e4m3 inputs, one per head")
    group = parser.add_argument_group("what a row sees")
    groups.add_visibility(group, causal=False, recipes=True)
    last = "such that the last query is at the last key"
    add(group, "q-offset", "position of the first query", type=position, shown=last)
    groups.add_scores(parser.add_argument_group("scores"))
    _add_storage(parser.add_argument_group("where rows and keys are"))
    _add_kernel(parser.add_argument_group("kernel"))


def _add_storage(group: argparse._ArgumentGroup) -> None:
    of_each = {"type": groups.lengths, "metavar": "N[,N...]", "shown": "all"}
    add(group, "kv-lens", "valid keys: one number for all entries, or a list", (), **of_each)
    words = "pack the entries of q, k, or both (qk); lengths then differ"
    packed = {"dest": "packed", "choices": PACKED, "nargs": "?", "const": "qk"}
    add(group, "varlen", words, "", shown="none", **packed)
    sizes = ", ".join(map(str, PORTABLE_PAGE_SIZES))
    add(group, "page-size", f"rows per page of keys, of {sizes}; 0: no pages", 0, type=page_size)
    switch(group, "k-is-v", "use one tensor as K and V")
    switch(group, "raw", "return O as summed up, and divide it here")
    add(group, "rope-dim", "last columns of O that are rotated back", 0, type=even)


def _add_kernel(group: argparse._ArgumentGroup) -> None:
    words = "pack all query heads of a KV head in one tile; default: if that needs fewer tiles"
    wish = {"action": argparse.BooleanOptionalAction, "dest": "pack_heads"}
    group.add_argument("--pack", help=words, **wish)
    switch(group, "pdl", "use programmatic dependent launch")
    for option in OPTIONS:
        how: dict[str, Any] = {"choices": option.choices} if option.choices else {}
        if isinstance(option.default, float):
            how["type"] = float
        flag = option.name.replace("_", "-")
        add(group, flag, option.about, option.default, shown=option.shown, **how)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `run.py fmha`."""
    add_case(parser, DEMO)
    group = groups.add_run(parser, groups.ALL_ARCHS)
    many = {"type": shape, "action": "append", "metavar": SHAPE, "shown": "none"}
    add(group, "shape", "all five sizes at once instead of separate flags; repeatable", [], **many)
    groups.add_tolerance(group)
    switch(group, "unjudged", "skip the comparison, for profilers: a large reference takes long")
    switch(group, "line-info", "compile with source lines, for profilers")


def add_static(parser: argparse.ArgumentParser) -> None:
    """Flags of `explain.py fmha` and `dump.py fmha`."""
    add_case(parser)
    add(parser, "arch", "whose kernel", groups.ARCHS[0], choices=groups.ALL_ARCHS)
