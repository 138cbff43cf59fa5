"""All figures of results/ as one HTML page with pictures; `--docs` redraws the pictures of docs/.

    python scripts/report.py --out out/report
    python scripts/report.py --list
    python scripts/report.py --only decode moe
    python scripts/report.py --docs

The page needs its PNGs next to it and no JavaScript. Each section names its files, the GPU, the
date, and the command that made them; modelled numbers are marked and have a range. The same results
give the same bytes with the same matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

import _checkout  # noqa: F401 - lab is found
from lab.tools import groups
from lab.tools.command import Command


def add_flags(parser: argparse.ArgumentParser) -> None:
    groups.add_out(parser, "out/report", "a folder for the page and its PNGs")
    words = "sections to write, by name; default: all"
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=words)
    groups.switch(parser, "list", "list the sections and their pictures in docs/; draw nothing")
    groups.switch(parser, "docs", "write only the pictures of docs/, and no page")


COMMAND = Command("lab.report.perform", add_flags, __doc__)
main = partial(COMMAND.main, "report.py")

if __name__ == "__main__":
    sys.exit(main())
