"""What the KV cache moves, beside torch and a copy of as many bytes.

    python scripts/bench.py kvcache [--rows 1 128 2k 8k 32k] [--steps append gather]
    python scripts/bench.py kvcache --show results/kvcache_h100.json [--markdown]  an earlier run's

Times are medians of CUDA graph replays, per call. Calls rotate over buffers of more than twice the
L2 cache, as far as MAX_SETS of them go: smaller problems are marked warm, and what they take is a
launch. The peers of a problem, and a copy that reads and writes as many bytes as the problem has,
take turns; bytes are compared with the reference before. Host: over the bus, beside a memcpy per
slot. Copies of slots move as many bytes as so many rows of bf16.

Published elsewhere: dequantise and gather of 584-byte entries in CuTe DSL on a GB200 (8 TB/s), 2.3
to 2.5 TB/s with 8192 rows, 4.1 to 4.4 with 32,000 (vLLM #42236, #55061).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.flags.bench import KVCACHE_STEPS, length

ROWS = (1, 128, 2048, 8192, 32768)


def parse_arguments(
    text: str, steps: Sequence[str], rows: Sequence[int], argv: Sequence[str] | None
) -> argparse.Namespace:
    """What a benchmark of rows can be asked; text: its help, rows: the default."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    numbers = f"also as 8k; default: {' '.join(map(str, rows))}"
    parser.add_argument("--rows", type=length, nargs="+", default=rows, metavar="N", help=numbers)
    known = f"of {', '.join(steps)}"
    parser.add_argument("--steps", choices=steps, nargs="+", default=steps, metavar="S", help=known)
    some = "problems whose name has one of these words"
    parser.add_argument("--names", nargs="+", default=(), metavar="WORD", help=some)
    shown = "tables of an earlier run's file, nothing is measured"
    parser.add_argument("--show", type=Path, metavar="FILE", help=shown)
    parser.add_argument("--markdown", action="store_true", help="with --show: one table for a page")
    every = "every figure, a line per row; an array if the name ends in .json"
    parser.add_argument("--json", type=Path, metavar="FILE", help=every)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(__doc__, KVCACHE_STEPS, ROWS, argv)
    from workbench.bench.kvcache import perform
    from workbench.cases.kvcache import problems_of

    return perform(options, problems_of)


if __name__ == "__main__":
    sys.exit(main())
