"""Is a wheel complete? It is installed where nothing is, and the examples of the pages run there.

    python -m build --no-isolation --outdir out/dist . && python scripts/smoke.py out/dist/*.whl

`make smoke` is these two commands. Held are: that the wheel has the files of the packages and no
other; that pip finds nothing amiss with what it declares; that each package is the installed one,
has the wheel's version and is typed; that the entry points of pytest, vLLM and SGLang load; that
the commands of the packages run; and every example in Python of README.md, of the packages' READMEs
and of docs/from_*.md, in an empty folder without the repository. What fails is named by page and
line, with its output. Exit code 1 where something fails. pip gets constraints.txt, and its index as
it is set up.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import _checkout  # noqa: F401 - lab is found
from lab.tools.command import Command


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", type=Path, help="the file, whose name ends in .whl")
    parser.add_argument("--jobs", type=int, default=2, help="examples at a time; default: 2")


main = partial(Command("lab.smoke.perform", _flags, __doc__).main, "smoke.py")

if __name__ == "__main__":
    sys.exit(main())
