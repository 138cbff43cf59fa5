"""A picture of a timeline: a row per warp, TMA and tensor core of a CTA, coloured by activity.

Reads the trace-event JSON that scripts/emulate.py writes; emulate.py draws through `draw` as well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="trace-event JSON written by scripts/emulate.py")
    parser.add_argument("png", type=Path, help="picture to write")
    parser.add_argument("--cta", type=int, help="which CTA (default: the first with spans)")
    parser.add_argument("--title", default="", help="default: the name of the trace file")
    options = parser.parse_args(argv)
    from workbench.emulate.timeline import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
