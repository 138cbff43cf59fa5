"""Time the first call of each operator in a fresh process: compiled, from the cache, ahead of time.

    python scripts/bench_first_call.py [--device cuda] [--repeat 3] [--json out.json]

Seconds beyond `import torch`, the making of a CUDA context and of the inputs; `ours` is what of
them finds or compiles the kernels, the rest is importing this package and running, in the emulator
mostly parsing PTX. On a GPU the call is captured in a CUDA graph and replayed behind it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

OPERATORS = ("attention", "decode", "merge", "moe", "append")
NATIVE_ON_HOPPER = ("decode", "merge", "append")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--operators", nargs="+", choices=OPERATORS, help="default: all that run")
    parser.add_argument("--repeat", type=int, default=3, help="processes that find the kernels")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args(argv)
    from workbench.bench.first_call import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
