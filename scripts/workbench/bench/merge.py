"""What bench_merge.py does: the merge timed beside a copy of as many bytes."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence

import torch

from kernelkit.merge import merge
from workbench.common import write_json

ROWS = (1, 128, 2048, 8192, 32768)
HEAD_DIMS = (64, 128, 512)
PARTS = (2, 4, 8)
HEADS = 32
MAX_SETS = 256
MIN_LAUNCHES = 16  # per graph
REPLAYS = 30

Part = tuple[torch.Tensor, torch.Tensor]


def bench(
    rows: Sequence[int] = ROWS,
    head_dims: Sequence[int] = HEAD_DIMS,
    parts: Sequence[int] = PARTS,
    *,
    stacked: bool = False,
) -> list[dict]:
    """One dictionary per combination; times in microseconds per launch, rates in TB/s.

    share is time of the copy / time of the merge: 1 is what memory allows.
    """
    combinations = itertools.product(rows, head_dims, parts)
    return [measure(*combination, stacked=stacked) for combination in combinations]


def measure(rows: int, head_dim: int, parts: int, *, stacked: bool) -> dict:
    """A row of `bench`: merged correctly first, then timed."""
    heads = min(rows, HEADS)
    shape = (parts, 1, rows // heads, heads, head_dim)
    nbytes = (parts + 1) * rows * head_dim * torch.bfloat16.itemsize
    wanted = 2 * torch.cuda.get_device_properties(0).L2_cache_size // nbytes + 2
    sets = [make_parts(shape) for _ in range(min(wanted, MAX_SETS))]
    check(sets[0])
    merges = [lambda stack=stack: merge(as_argument(stack, stacked)) for stack in sets]
    half = nbytes // 2
    pool = [torch.empty(2, half, dtype=torch.uint8, device="cuda") for _ in sets]
    copies = [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pool]
    merge_us, copy_us = time_us(merges), time_us(copies)
    return {
        "rows": rows,
        "head_dim": head_dim,
        "parts": parts,
        "form": "stack" if stacked else "list",
        "merge_us": merge_us,
        "copy_us": copy_us,
        "merge_tbs": nbytes / merge_us * 1e-6,
        "copy_tbs": nbytes / copy_us * 1e-6,
        "share": copy_us / merge_us,
        "cold": wanted <= MAX_SETS,
    }


def make_parts(shape: tuple[int, ...]) -> Part:
    """A stack (O [N, B, S, H, D], LSE [N, B, H, S]) of normal numbers."""
    parts, batch, positions, heads, _ = shape
    o = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    return o, torch.randn(parts, batch, heads, positions, device="cuda")


def as_argument(stack: Part, stacked: bool) -> Part | list[Part]:
    """What `merge` takes: the stack as it is, or its parts as a list."""
    return stack if stacked else list(zip(*stack, strict=True))


def check(stack: Part) -> None:
    """No number without a right result: against a softmax over the parts in fp32."""
    o, lse = stack
    weights = lse.softmax(dim=0).transpose(-1, -2)[..., None]
    for argument in (as_argument(stack, stacked) for stacked in (False, True)):
        merged, merged_lse = merge(argument)
        torch.testing.assert_close(merged.float(), (weights * o).sum(dim=0), rtol=0.01, atol=0.01)
        torch.testing.assert_close(merged_lse, lse.logsumexp(dim=0))


def time_us(launches: Sequence[Callable[[], object]]) -> float:
    """Median time of one launch in a graph that runs each of them equally often."""
    repeats = -(-MIN_LAUNCHES // len(launches))
    graph = torch.cuda.CUDAGraph()
    launches[0]()
    with torch.cuda.graph(graph):
        # Results that live on lie apart: one buffer for all would stay in the cache.
        results = [launch() for launch in [*launches] * repeats]
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(results))
    return statistics.median(times)


def table(rows: Sequence[dict]) -> str:
    """The rows of `bench` as text."""
    lines = ["  rows    D   N  form    merge us   copy us   TB/s   copy  share"]
    lines += [
        f"{r['rows']:6d} {r['head_dim']:4d} {r['parts']:3d}  {r['form']:5s} {r['merge_us']:10.2f} "
        f"{r['copy_us']:9.2f} {r['merge_tbs']:6.2f} {r['copy_tbs']:6.2f} {r['share']:6.2f}"
        f"{'' if r['cold'] else '  warm'}"
        for r in rows
    ]
    return "\n".join(lines)


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    if not torch.cuda.is_available():
        sys.exit("bench_merge.py needs a CUDA GPU of compute capability 9.0 or 10.x")
    rows = bench(stacked=options.stacked)
    print(torch.cuda.get_device_name())
    print(table(rows))
    if options.json:
        write_json(options.json, rows)
    return 0
