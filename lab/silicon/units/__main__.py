"""`python -m lab.silicon.units`: what `bench.py units` does, without the other benchmarks."""

from __future__ import annotations

import argparse
import sys

from lab.silicon.units.flags import add_units
from lab.silicon.units.perform import perform

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m lab.silicon.units")
    add_units(parser)
    sys.exit(perform(parser.parse_args()))
