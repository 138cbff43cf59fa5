"""`python -m workbench.units`: what `bench.py units` does, without the other benchmarks."""

from __future__ import annotations

import argparse
import sys

from workbench.units.flags import add_units
from workbench.units.perform import perform

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m workbench.units")
    add_units(parser)
    sys.exit(perform(parser.parse_args()))
