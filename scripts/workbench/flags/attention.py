"""The command-line flags that spell an attention case, in groups; `_cases.case_of` makes it."""

from __future__ import annotations

import argparse

from fmha.config import (
    HEAD_DIMS,
    IO_DTYPES,
    MAX_POSITION,
    OUT_DTYPES,
    P_PATHS,
    PAGE_SIZES,
    SCHEDULES,
    AttentionConfig,
)

PACKED = ("q", "k", "qk")
SHAPE = "B,Sq,Skv,Hq,Hkv"
PLAIN_SHAPE = "1,128,128,1,1"  # where only the config matters: it asks for no packed heads


def shape(text: str) -> tuple[int, int, int, int, int]:
    """Argument type: 'B,Sq,Skv,Hq,Hkv'."""
    try:
        batch, sq, skv, q_heads, kv_heads = (int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not {SHAPE}") from error
    sizes = batch, sq, skv, q_heads, kv_heads
    if min(sizes) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are at least 0")
    return sizes


def head_dims(text: str) -> tuple[int, int]:
    """Argument type: 'D' or 'D,Dv'; 0 for a Dv that is D."""
    try:
        first, *rest = (int(part) for part in text.split(","))
        (second,) = rest or [0]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not D or D,Dv") from error
    return first, 0 if second == first else second


def window(text: str) -> tuple[int | None, int | None]:
    """Argument type: 'L,R', nothing for unbounded: '128,' or ',64'."""
    try:
        left, right = (int(part) if part.strip() else None for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not L,R (nothing for unbounded: 128, or ,64)"
        ) from error
    return left, right


def lengths(text: str) -> tuple[int, ...]:
    """Argument type: '100' for all entries or '100,7,0'."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of key counts") from error


def page_size(text: str) -> int:
    """Argument type: a page size, 0 for none."""
    if text not in map(str, (0, *PAGE_SIZES)):
        raise argparse.ArgumentTypeError(f"{text}: one of {PAGE_SIZES}, 0 for none")
    return int(text)


def position(text: str) -> int:
    """Argument type: a position among the keys."""
    value = int(text)
    if abs(value) >= MAX_POSITION:
        raise argparse.ArgumentTypeError(f"{text}: within +-{MAX_POSITION - 1}")
    return value


def even(text: str) -> int:
    """Argument type: an even number, which pairs of columns make."""
    value = int(text)
    if value < 0 or value % 2:
        raise argparse.ArgumentTypeError(f"{text} is not an even number from 0 on")
    return value


def add_case_arguments(parser: argparse.ArgumentParser, default_shape: str = "") -> None:
    """All flags of a case. --shape is repeatable where it has no default."""
    group = parser.add_argument_group("problem")
    if default_shape:
        group.add_argument(
            "--shape",
            type=shape,
            default=shape(default_shape),
            metavar=SHAPE,
            help=f"default: {default_shape}",
        )
    else:
        group.add_argument("--shape", type=shape, action="append", metavar=SHAPE, help="repeatable")
    supported = " | ".join(f"{d}" if d == dv else f"{d},{dv}" for d, dv in HEAD_DIMS)
    group.add_argument(
        "--head-dim",
        type=head_dims,
        default=head_dims("64"),
        metavar="D[,Dv]",
        help=f"{supported}; default: 64",
    )
    group.add_argument("--dtype", choices=IO_DTYPES, default="bf16", help="default: bf16")
    _add_visibility(parser.add_argument_group("what a row sees"))
    _add_storage(parser.add_argument_group("scores, and where rows and keys are"))
    _add_results(parser.add_argument_group("results"))
    _add_kernel(parser.add_argument_group("kernel"))


def _add_visibility(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--causal", action="store_true", help="no key behind the own position")
    group.add_argument(
        "--window",
        type=window,
        default=(None, None),
        metavar="L,R",
        help="keys before and behind the own position; nothing for unbounded",
    )
    group.add_argument(
        "--sink-tokens", type=int, default=0, metavar="N", help="first keys, beside the window"
    )
    group.add_argument(
        "--q-offset",
        type=position,
        metavar="N",
        help="position of the first query; default: the last query stands at the last key",
    )


def _add_storage(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--softcap", type=float, default=0.0, metavar="C", help="c tanh(s / c)")
    group.add_argument("--sinks", action="store_true", help="a learned logit per query head")
    group.add_argument(
        "--kv-lens", type=lengths, default=(), metavar="N,...", help="of each entry, or one for all"
    )
    group.add_argument(
        "--varlen",
        dest="packed",
        choices=PACKED,
        nargs="?",
        const="qk",
        default="",
        help="pack the entries of q, of k, or both (qk); lengths then differ",
    )
    sizes = ", ".join(map(str, PAGE_SIZES))
    group.add_argument(
        "--page-size", type=page_size, default=0, metavar="ROWS", help=f"keys in pages: {sizes}"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--raw", action="store_true", help="O before its division, normalised here")
    group.add_argument("--out-dtype", choices=OUT_DTYPES, default="", help="of O")
    group.add_argument(
        "--rope-dim", type=even, default=0, metavar="N", help="last columns of O turned back"
    )


def _add_kernel(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--p-path", choices=P_PATHS, default="", help="where P waits for P V")
    group.add_argument(
        "--pack",
        dest="pack_heads",
        action=argparse.BooleanOptionalAction,
        help="all query heads of a key head in one tile; default: where that makes fewer tiles",
    )
    group.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    for ring in ("k", "v"):
        group.add_argument(
            f"--{ring}-stages",
            type=int,
            default=0,
            metavar="N",
            help=f"pieces in the {ring.upper()} ring; default: as many as are useful and fit",
        )
    group.add_argument("--schedule", choices=SCHEDULES, default="", help="one query tile, or two")
    lag = AttentionConfig().rescale_log2
    group.add_argument(
        "--rescale-log2",
        type=float,
        default=lag,
        metavar="N",
        help=f"how far the reference maximum may lag; default: {lag:g}",
    )
