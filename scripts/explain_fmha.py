"""The plan of an attention case as text: roles, edges, and the maps of shared and tensor memory.

The flags are those of run_fmha.py. Nothing is compiled: the plan is data. The figures of
fmha/README.md are copies of this output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from workbench.flags.attention import PLAIN_SHAPE, add_case_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_case_arguments(parser, PLAIN_SHAPE)
    options = parser.parse_args(argv)
    from workbench.explain.fmha import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
