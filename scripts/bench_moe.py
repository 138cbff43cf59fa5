"""The steps around the grouped products of a MoE layer, beside torch and a copy of as many bytes.

    python scripts/bench.py moe [--tokens 1 64 4k 32k] [--steps quantise route]
    python scripts/bench.py moe --show results/moe_h100.json [--markdown]     of an earlier run

Times are medians of CUDA graph replays, per call, which may be several launches. Calls rotate over
buffers of more than twice the L2 cache, as far as MAX_SETS of them go: smaller problems are marked
warm, and what they take is a launch. The peers of a problem, and a copy that reads and writes as
many bytes as the problem has, take turns; results are compared with the reference before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.flags.bench import MOE_HIDDEN, MOE_STEPS, length

TOKENS = (1, 64, 4096, 32768)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tokens = "also as 4k; default: 1 64 4k 32k"
    parser.add_argument(
        "--tokens", type=length, nargs="+", default=TOKENS, metavar="N", help=tokens
    )
    known = f"of {', '.join(MOE_STEPS)}"
    steps = {"choices": MOE_STEPS, "nargs": "+", "default": MOE_STEPS, "metavar": "S"}
    parser.add_argument("--steps", help=known, **steps)
    some = "problems whose name has one of these words"
    parser.add_argument("--names", nargs="+", default=(), metavar="WORD", help=some)
    size = f"size; default: {MOE_HIDDEN}"
    parser.add_argument("--hidden", type=int, default=MOE_HIDDEN, help=size)
    shown = "tables (and --plot) of an earlier run's file, nothing is measured"
    parser.add_argument("--show", type=Path, metavar="FILE", help=shown)
    parser.add_argument("--markdown", action="store_true", help="with --show: one table for a page")
    every = "every figure, a line per row; an array if the name ends in .json"
    parser.add_argument("--json", type=Path, metavar="FILE", help=every)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bandwidth, with matplotlib")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.bench.moe import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
