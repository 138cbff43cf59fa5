"""Test wheels: install them in an empty environment, and run the examples of the pages there.

    python -m build --no-isolation --outdir out/dist ./ptxemu
    python -m build --no-isolation --outdir out/dist .
    python scripts/smoke.py out/dist/*.whl

`make smoke` runs these commands. It checks that
  - each wheel has the files of its packages and no others;
  - pip finds nothing wrong with its metadata;
  - each package is the installed one, has the wheels' version and is typed;
  - the entry points of pytest, vLLM and SGLang load, and the commands of the packages run;
  - every Python example of README.md, of the packages' READMEs and of docs/from_*.md runs, in an
    empty folder without the repository.
A failure is named by page and line, with its output. Exit code 1: something failed. pip gets
constraints.txt, and uses the index that is configured.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import _checkout  # noqa: F401 - lab is found
from lab.tools.command import Command


def _flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheel", type=Path, nargs="+", help="the wheels, files that end in .whl")
    parser.add_argument("--jobs", type=int, default=2, help="examples at a time; default: 2")


main = partial(Command("lab.smoke.perform", _flags, __doc__).main, "smoke.py")

if __name__ == "__main__":
    sys.exit(main())
