"""What the manager of the KV cache costs the host, beside vLLM's BlockPool; no GPU is needed.

    python scripts/bench.py kvcache-host [--vllm CHECKOUT] [--json results/kvcache_host.json]
    python scripts/bench.py kvcache-host --show results/kvcache_host.json

Pools: `batch` blocks are taken and given back, over and over, from a pool of --blocks; `kept`: each
is registered by a new content before it goes back, so that all of them can be found and taking one
forgets it. Manager: a decode step of so
many requests, the admission of a prompt that is there, one that is not, the walk over all books.
Numbers are medians over --repeats rounds. vLLM's pool runs the loop of its own
benchmark_block_pool.py where it is installed, or from a checkout with its imports replaced.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

BATCHES = (1, 10, 100, 1000, 10000)
REQUESTS = (1, 32, 256)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=100_000, help="of the pools")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N")
    parser.add_argument("--requests", type=int, nargs="*", default=REQUESTS, metavar="N")
    parser.add_argument("--repeats", type=int, default=2000, help="rounds, fewer of long ones")
    parser.add_argument("--vllm", type=Path, metavar="CHECKOUT", help="vLLM's sources")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    parser.add_argument("--show", type=Path, metavar="FILE", help="tables of an earlier run")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.bench.allocator import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
