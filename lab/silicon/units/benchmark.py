"""A benchmark: launches at one or two points, and the figure computed from their times.

A time is in cycles of an SM: from the first warp's clock before its loop to the last warp's behind
it, of the CTA that took longest. Two points differ in how much there is to do; the difference of
their times, over that of their operations, is free of the cost of loops, clocks and start-up.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lab.silicon.units.ptx import WARP, Kernel

CYCLES = "cycles"
PER_WARP = "cycles of a scheduler per warp instruction"
PER_SM = "cycles of the SM per warp instruction"
BYTES = "bytes per cycle and SM"
ALL_BYTES = "bytes per cycle of all SMs"
Take = Callable[[np.ndarray], float]


@dataclass(frozen=True)
class Point:
    """A kernel, the rounds of its loop, and for how many operations its time stands."""

    kernel: Kernel
    count: int
    operations: float


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    name: name of a parameter of the cycle model, if there is one.
    variant: what was measured.
    nbytes: bytes of an operation, if the figure is bytes per cycle.
    whole: whether the figure is of all CTAs together.
    take: how to compute cycles from the records of a launch, by default `span`.
    arch: the first GPUs that have what it measures; "" for all.
    """

    group: str
    name: str
    variant: dict[str, Any]
    unit: str
    points: tuple[Point, ...]
    nbytes: float = 0.0
    whole: bool = False
    take: str = "span"
    arch: str = ""
    more: dict[str, Any] = field(default_factory=dict)


def span(records: np.ndarray) -> float:
    """Cycles of the CTA that took longest. records: uint64 (CTA, warp, RECORD); a warp without a
    clock before, or behind, has 0 there."""
    begin, end = records[..., 0].astype(np.int64), records[..., 1].astype(np.int64)
    first = np.where(begin > 0, begin, np.iinfo(np.int64).max).min(axis=1)
    last = end.max(axis=1)
    measured = (last > 0) & (first < np.iinfo(np.int64).max)
    if not measured.any():
        raise ValueError("no warp has stored a time")
    return float((last - first)[measured].max())


def replacement(records: np.ndarray) -> float:
    """Cycles from the end of a CTA to the first instruction of the next on the same SM: median."""
    gaps = []
    begin, end = records[:, :, 0].min(axis=1), records[:, :, 1].max(axis=1)
    for sm in np.unique(records[:, 0, 4]):
        mine = np.flatnonzero(records[:, 0, 4] == sm)
        order = mine[np.argsort(begin[mine])]
        gaps += [int(begin[b]) - int(end[a]) for a, b in itertools.pairwise(order)]
    if not gaps:
        raise ValueError("no SM has had two CTAs")
    return float(np.median(gaps))


def gigahertz(records: np.ndarray) -> float | None:
    """The clock during a launch; None if that was too short for the timer of nanoseconds."""
    flat = records.reshape(-1, records.shape[-1]).astype(np.int64)
    flat = flat[(flat[:, 0] > 0) & (flat[:, 1] > flat[:, 0])]
    if not flat.size:
        return None
    longest = flat[np.argmax(flat[:, 3] - flat[:, 2])]
    nanoseconds = int(longest[3] - longest[2])
    return float((longest[1] - longest[0]) / nanoseconds) if nanoseconds > 100_000 else None


def clock(records: np.ndarray) -> float:
    """GHz, as a figure of its own."""
    found = gigahertz(records)
    if found is None:
        raise ValueError("the launch was too short for the timer of nanoseconds")
    return found


TAKES: dict[str, Take] = {"span": span, "replacement": replacement, "gigahertz": clock}


def figures(benchmark: Benchmark, times: Sequence[Sequence[float]], ctas: int) -> list[float]:
    """Return a figure per repetition.

    times: cycles by point and repetition.
    ctas: CTAs of the last point."""
    found = []
    operations = [point.operations for point in benchmark.points]
    for taken in zip(*times, strict=True):
        if len(taken) == 1:
            cycles = taken[0] / operations[0]
        else:
            cycles = (taken[1] - taken[0]) / (operations[1] - operations[0])
        if benchmark.nbytes:
            nbytes = benchmark.nbytes * (ctas if benchmark.whole else 1)
            cycles = nbytes / cycles if cycles > 0 else float("inf")
        found.append(cycles)
    return found


def unlike(kernel: Kernel, memory: np.ndarray) -> str | None:
    """Return what a buffer has in place of the answer, or None if it has the answer."""
    if kernel.answer is None:
        return None
    warps = memory.view(np.float32)[: kernel.block * kernel.grid].reshape(-1, WARP)
    found = warps[:, : kernel.answered]
    if (found == np.float32(kernel.answer)).all():
        return None
    other = found[found != np.float32(kernel.answer)][0]
    return f"{other:g} where {kernel.answer:g} should be"


def row(benchmark: Benchmark, values: Sequence[float], clock: float | None) -> dict[str, Any]:
    """Row of a file of figures."""
    made: dict[str, Any] = {
        "kind": "unit", "group": benchmark.group, "benchmark": benchmark.name,
        "variant": benchmark.variant, "value": round(float(np.median(values)), 4),
        "low": round(min(values), 4), "high": round(max(values), 4), "unit": benchmark.unit,
        "n": len(values),
    }  # fmt: skip
    if clock is not None:
        made["ghz"] = round(clock, 4)
    return made


def failed(benchmark: Benchmark, error: str) -> dict[str, Any]:
    """The row of a benchmark without a figure."""
    return {
        "kind": "unit", "group": benchmark.group, "benchmark": benchmark.name,
        "variant": benchmark.variant, "unit": benchmark.unit, "error": error,
    }  # fmt: skip
