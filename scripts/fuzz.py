"""Damaged files of every kind that this repository reads: each must be read or raise a named error.

    python scripts/fuzz.py gguf ptx --count 200 --seed 1

Exit code 1: a file raised another error, took too long, or needed too much memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import _checkout  # noqa: F401 - lab is found


def main(argv: Sequence[str] | None = None) -> int:
    """What the flags ask for; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help="only these kinds; a wrong name lists all"
    )
    parser.add_argument("--count", type=int, default=20_000, help="number of files of each kind")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts")
    given = parser.parse_args(argv)

    from lab.fuzz.kinds import KINDS
    from lab.fuzz.perform import judged

    unknown = [name for name in given.kinds if name not in KINDS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: kinds are {', '.join(KINDS)}")
    verdicts = []
    for name in given.kinds or KINDS:
        verdict = judged(KINDS[name], range(given.seed, given.seed + given.count))
        verdicts.append(verdict)
        print(verdict.line(), *verdict.failures, sep="\n  ", flush=True)
    if given.json:
        content = {
            "count": given.count,
            "seed": given.seed,
            "kinds": [each.document() for each in verdicts],
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if any(verdict.failures for verdict in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
