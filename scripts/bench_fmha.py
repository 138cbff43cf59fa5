"""The attention kernel beside torch's, timed where it can run, and its static figures everywhere.

Static figures are what ptxas made of a config: registers, spills, the SASS of the softmax loop by
kind, and where in the loop statistics and P are published. They need `pip install '.[sass]'`.
Times are medians of CUDA graph replays, with an L2 cache of other data (cold) and of its own
(warm); TFLOP/s count the products of visible pairs, four FLOP per pair and column.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fmha.config import HEAD_DIMS, IO_DTYPES, P_PATHS, SCHEDULES
from workbench.flags.attention import SHAPE, shape
from workbench.flags.bench import MASKS


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    dims = list(dict(HEAD_DIMS))
    many = {"action": "append", "help": "repeatable; default: %(metavar)s"}
    parser.add_argument("--head-dim", type=int, choices=dims, **many | {"metavar": "64, 128"})
    parser.add_argument("--p-path", choices=P_PATHS, **many | {"metavar": "both"})
    parser.add_argument("--mask", choices=MASKS, **many | {"metavar": "all"})
    parser.add_argument("--dtype", choices=IO_DTYPES, default="bf16", help="default: bf16")
    timed = "to be timed, repeatable; default: four of models"
    parser.add_argument("--shape", type=shape, action="append", metavar=SHAPE, help=timed)
    static_only = "of the static table; default: base"
    parser.add_argument("--schedule", choices=SCHEDULES, default="", help=static_only)
    parser.add_argument("--arch", default="sm_100a", help="of the static table; default: sm_100a")
    for part, what in (("static", "the static table"), ("timing", "times, where there is a GPU")):
        wish = {"action": argparse.BooleanOptionalAction, "default": True}
        parser.add_argument(f"--{part}", help=f"{what}; default: yes", **wish)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, with matplotlib")
    options = parser.parse_args(argv)
    options.head_dim = options.head_dim or [64, 128]
    options.p_path = options.p_path or list(P_PATHS)
    options.mask = options.mask or list(MASKS)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.bench.fmha import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
