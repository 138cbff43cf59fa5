"""Decode attention beside torch and FlashInfer: latency on the GPU at hand, static figures without.

    python scripts/bench.py gqa [--BS 1 8 64] [--kvL 1k 8k 64k] [--peers decode "torch cudnn"]
    python scripts/bench.py gqa --host                    what an eager call costs the host
    python scripts/bench.py gqa --show results/gqa_h100.json [--markdown]     of an earlier run

Latency is the median of CUDA graph replays, per launch. Cold: launches rotate over buffers of more
than twice the L2 cache. Warm: all launches read the same buffers. Every peer is timed in the same
run on the same tensors, after its result has been compared with an fp32 reference. The floor is
the bytes of a launch at the bandwidth of a large read (torch.amax), which is measured first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gqa_lowlatency.config import KV_DTYPES, TUNABLE
from workbench.flags.bench import length

# of _gqa_peers.PEERS, which imports torch
PEERS = (
    *("decode", "decode pdl", "decode pdl kv-ready", "torch cudnn", "torch flash", "flex"),
    *("flashinfer xqa", "flashinfer trtllm-gen", "flashinfer fa2"),
)
BATCHES = (1, 8, 64)
KV_LENS = (1024, 8192, 65536)


def tuning(text: str) -> dict[str, int]:
    """Argument type: 'cluster=8,warps=16'."""
    known, fields = (*TUNABLE, "parts"), {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in known or not number.isdecimal():
            raise argparse.ArgumentTypeError(f"{part!r}: a number for one of {', '.join(known)}")
        fields[name] = int(number)
    return fields


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--BS", type=int, default=BATCHES, help="batch; default: 1 8 64", **many)
    lens = "keys, also as 8k; default: 1k 8k 64k"
    parser.add_argument("--kvL", type=length, default=KV_LENS, help=lens, **many)
    parser.add_argument("--kvH", type=int, default=8, help="KV heads; default: 8")
    parser.add_argument("--qH", type=int, default=64, help="query heads; default: 64")
    parser.add_argument("--dH", type=int, default=128, help="head dim; default: 128")
    parser.add_argument("--dtype", choices=KV_DTYPES, default="bf16", help="e4m3: of K and V")
    known = ", ".join(PEERS)
    parser.add_argument("--peers", nargs="+", choices=PEERS, metavar="NAME", help=f"of {known}")
    tuned = "time decode tuned like this, too: cluster=8,warps=16,stages=2,parts=1"
    parser.add_argument("--tune", nargs="+", type=tuning, default=(), metavar="X=N", help=tuned)
    parser.add_argument("--host", action="store_true", help="the host's cost of eager calls alone")
    shown = "tables (and --plot) of an earlier run's file, nothing is measured"
    parser.add_argument("--show", type=Path, metavar="FILE", help=shown)
    parser.add_argument("--markdown", action="store_true", help="with --show: one table for a page")
    every = "every figure, a line per row; an array if the name ends in .json"
    parser.add_argument("--json", type=Path, metavar="FILE", help=every)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw latency, with matplotlib")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    from workbench.bench.gqa import perform

    return perform(options)


if __name__ == "__main__":
    sys.exit(main())
