"""The plan of a decode case as text: who works on which keys, and what a CTA of it holds where.

The flags are those of run_gqa.py. Nothing is compiled, and without a GPU of --arch nothing says how
many clusters it would run at once, which may make them narrower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from workbench.flags.decode import add_case_arguments


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_case_arguments(parser, default="sm_100a", help="default: sm_100a")
    options = parser.parse_args(argv)
    from workbench.explain.gqa import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
