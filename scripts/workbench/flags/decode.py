"""The command-line flags that spell a decode case, in groups; `_gqa_cases.case_of` makes it."""

from __future__ import annotations

import argparse

from gqa_lowlatency.config import HEAD_DIMS, IO_DTYPES, KV_DTYPES, OUT_DTYPES, TUNABLE
from gqa_lowlatency.plan import MACHINES


def lengths(text: str) -> tuple[int, ...]:
    """Argument type: '8192' for all entries or '100,7,0'."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of key counts") from error
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: lengths are at least 0")
    return found


def add_case_arguments(parser: argparse.ArgumentParser, **of_arch: str) -> None:
    """All flags of a case; of_arch: default and help of --arch."""
    group = parser.add_argument_group("problem")
    group.add_argument("--BS", type=int, default=1, metavar="N", help="batch entries; 1")
    group.add_argument(
        "--kvL", type=lengths, default=(1024,), metavar="N,...", help="keys, of all or each; 1024"
    )
    for flag, value, words in (
        ("--kvH", 2, "KV heads"), ("--qH", 16, "query heads"), ("--qL", 1, "query tokens"),
    ):  # fmt: skip
        group.add_argument(flag, type=int, default=value, metavar="N", help=f"{words}; {value}")
    group.add_argument("--D", dest="head_dim", type=int, default=128, help=f"one of {HEAD_DIMS}")
    group.add_argument("--dtype", choices=IO_DTYPES, default="bf16", help="of q, k and v; bf16")
    group.add_argument("--kv-dtype", choices=KV_DTYPES, default="", help="of k and v alone")
    group.add_argument("--scales", action="store_true", help="of e4m3 k and v, one per KV head")
    group.add_argument("--out-dtype", choices=OUT_DTYPES, default="", help="of O")
    group.add_argument("--page-size", type=int, default=0, metavar="ROWS", help="0: no pages")
    group.add_argument("--full", action="store_true", help="tokens see those behind them")
    group.add_argument("--window", type=int, metavar="N", help="keys seen before the own one")
    group.add_argument("--sink-tokens", type=int, default=0, metavar="N", help="beside the window")
    group.add_argument("--softcap", type=float, default=0.0, metavar="C", help="c tanh(s / c)")
    group.add_argument("--sinks", action="store_true", help="a learned logit per query head")
    _add_kernel_arguments(parser.add_argument_group("kernel"), of_arch)


def _add_kernel_arguments(group: argparse._ArgumentGroup, of_arch: dict[str, str]) -> None:
    for name in TUNABLE:
        words = "of the config; chosen by sizes"
        group.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=words)
    group.add_argument(
        "--parts", type=int, default=0, metavar="N", help="clusters of a KV head; chosen by sizes"
    )
    group.add_argument("--batch-invariant", action="store_true", help="bits ignore the batch")
    group.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    group.add_argument(
        "--kv-ready-before-pdl", action="store_true", help="only q waits for the kernel in front"
    )
    group.add_argument("--arch", choices=MACHINES, **of_arch)
