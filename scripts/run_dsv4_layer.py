"""Runs one layer of DeepSeek-V4 over the cache, step by step, beside a model that recomputes all.

Prompts arrive in chunks while earlier requests decode; every step compresses, indexes, selects,
attends and runs the experts by the repository's kernels. A plain torch model keeps all tokens and
computes everything anew in every step; every component is held against it, within a limit that is
derived (scripts/workbench/dsv4/judge.py says how). Weights are random, the width is reduced,
head_dim 512, the windows and the records are the model's. A GPU of compute capability 10.x runs
the kernels themselves, everywhere else the emulator does. Exit code 1 when something is out of its
limit or the checker finds an error, 2 when a run is refused.

    python scripts/run_dsv4_layer.py --kind csa --prefix 200 --steps 300
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcache.layouts.models import V4_RECORDS
from ptxemu.host.command_line import add_check_arguments
from workbench.dsv4.shape import MUTATIONS, RATIOS, Shape
from workbench.flags.run import add_backend_arguments


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=__doc__.rstrip().splitlines()[-1].strip()
    )
    shape = Shape()
    group = parser.add_argument_group("layer")
    group.add_argument("--kind", choices=RATIOS, default=shape.kind, help="default: csa")
    for name, words in (
        ("hidden", "width of the residual stream"), ("heads", "of queries, 512 each"),
        ("index-heads", "of the indexer, 128 each"), ("select", "entries that a query attends to"),
        ("experts", "all of them"), ("choices", "experts of a token"),
        ("intermediate", "width of an expert"),
    ):  # fmt: skip
        default = getattr(shape, name.replace("-", "_"))
        group.add_argument(f"--{name}", type=int, default=default, help=f"{words}; {default}")
    group.add_argument("--record", choices=V4_RECORDS, default="fp8", help="of entries; fp8")
    group.add_argument("--online-hca", action="store_true", help="tails hold a running softmax")
    group = parser.add_argument_group("run")
    group.add_argument("--requests", type=int, default=1, help="that arrive one after another; 1")
    group.add_argument("--prefix", type=int, default=200, help="tokens of the first prompt; 200")
    group.add_argument("--chunk", type=int, default=96, help="tokens of a prompt in a step; 96")
    group.add_argument("--steps", type=int, default=8, help="of decoding, for each request; 8")
    group.add_argument(
        "--draft", type=int, default=0, help="tokens of a step, some of which are taken back; 0"
    )
    wrong = "a wrong model beside it, which has to be noticed (exit code 1)"
    group.add_argument("--mutate", choices=MUTATIONS, help=wrong)
    group.add_argument("--every", type=int, default=1, help="steps to a line of the table; 1")
    add_backend_arguments(group, seed="of weights, tokens and policies")
    group.add_argument("--arch", help="what the emulator runs: sm_100a")
    group.add_argument("--json", type=Path, metavar="FILE", help="every number of every step")
    group.add_argument("--plot", type=Path, metavar="FILE", help="errors over steps, a picture")
    add_check_arguments(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.run.dsv4 import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
