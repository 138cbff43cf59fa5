"""Benchmarks by name: `python scripts/bench.py fmha`; behind the name stand its own options.

Every benchmark prints what can be said on this machine: static figures everywhere, times where its
kernel can run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from workbench.common import main_under

# name -> module beside this file that has its main()
BENCHMARKS = {
    "fmha": "bench_fmha",
    "gqa": "bench_gqa",
    "merge": "bench_merge",
    "moe": "bench_moe",
    "kvcache": "bench_kvcache",
    "dsv4": "bench_dsv4",
    "kvcache-host": "bench_allocator",
    "kvcache-tier": "bench_host_tier",
    "emulator": "bench_emulator",
    "first-call": "bench_first_call",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=BENCHMARKS, help="`bench.py NAME --help` lists its options")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of this benchmark")
    arguments = parser.parse_args(argv)
    return main_under(arguments.name, BENCHMARKS[arguments.name], arguments.options)


if __name__ == "__main__":
    sys.exit(main())
