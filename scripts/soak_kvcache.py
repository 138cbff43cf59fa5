"""The long run of kvcache's manager: random operations beside the naive model of its tests.

    python scripts/soak_kvcache.py                                # 1,000,000 operations
    python scripts/soak_kvcache.py --operations 50k --layout sparse --seed 7
    python scripts/soak_kvcache.py --replay out/soak_failure.json # what failed, once more

Every operation is followed by check(), a replay of the events and a comparison of all bytes that
the requests it touched still need; every --every of them by one of everything. Pools and policy
are those of the tests for one seed in four, and random for the others. A failure stops the run; its
operations are made as few as still fail, and stored. Exit code 0: nothing failed; 1: something did.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def number(text: str) -> int:
    """50k is 50,000, 2m two million."""
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument(
        "--operations", type=number, default=1_000_000, metavar="N", help="50k and 2m are numbers"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first cache; default: 0")
    parser.add_argument(
        "--layout", action="append", metavar="TEXT", help="cases whose name contains it"
    )
    parser.add_argument(
        "--every", type=int, default=8, metavar="N", help="compare everything so often; default: 8"
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; default: 2")
    parser.add_argument("--json", type=Path, metavar="PATH", help="store the figures")
    parser.add_argument("--replay", type=Path, metavar="PATH", help="run a stored failure again")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    from workbench.soak.perform import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
