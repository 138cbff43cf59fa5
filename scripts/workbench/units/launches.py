"""Groups 10 and 11: launches, the replacement of a CTA by the next, and the clock under load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.units.benchmark import CYCLES, Benchmark, Point
from workbench.units.issue import FMA, wgmma_kernel
from workbench.units.memory import stream
from workbench.units.ptx import Kernel, Role

if TYPE_CHECKING:
    from workbench.units.launch import Gpu

MICROSECONDS = "microseconds"
LAUNCHES = 1000
LARGE = 200 * 1024  # bytes of shared memory that leave no room for a second CTA
EMPTY = """\
.version 8.3
.target sm_90a
.address_size 64
.visible .entry bench()
{
griddepcontrol.launch_dependents;
griddepcontrol.wait;
ret;
}
"""


@dataclass(frozen=True)
class Timed:
    """Launches of an empty kernel, timed by events: microseconds of each.

    ctas: of the grid; 0: as many as there are SMs, negative: so many times as many. how: "stream",
    "graph", or "overlapped" (a graph whose launches need not wait for the one before).
    """

    group: str
    name: str
    variant: dict[str, Any]
    how: str
    ctas: int
    block: int = 128
    cluster: int = 1
    smem: int = 0
    unit: str = MICROSECONDS

    def measure(self, gpu: Gpu, repeats: int) -> dict[str, Any]:
        """Its row."""
        module, kernel = gpu.load(EMPTY, self.smem, self.cluster)
        grid = self.ctas if self.ctas > 0 else gpu.sms * max(-self.ctas, 1)
        grid = grid // self.cluster * self.cluster

        def work() -> None:
            for _ in range(LAUNCHES):
                gpu.launch(kernel, grid, self.block, [], smem=self.smem, cluster=self.cluster,
                           overlapped=self.how == "overlapped")  # fmt: skip

        replay = work if self.how == "stream" else gpu.graph(work)
        gpu.seconds(replay)
        values = [gpu.seconds(replay) / LAUNCHES * 1e6 for _ in range(repeats)]
        gpu.unload(module)
        return {
            "kind": "unit", "group": self.group, "benchmark": self.name, "variant": self.variant,
            "value": round(float(np.median(values)), 4), "low": round(min(values), 4),
            "high": round(max(values), 4), "unit": self.unit, "n": len(values), "grid": grid,
        }  # fmt: skip


def launches() -> Iterator[Timed]:
    """Back to back, of so many CTAs; of several CTAs for each SM, one at a time."""
    for how in ("stream", "graph", "overlapped"):
        for ctas in (1, 132, 1320):
            yield Timed("launch", "launch", {"how": how, "ctas": ctas, "block": 128}, how, ctas)
    for cluster in (2, 4):
        variant = {"how": "graph", "ctas": 132, "block": 128, "cluster": cluster}
        yield Timed("launch", "launch", variant, "graph", 132, cluster=cluster)
    for block in (128, 384):
        for waves in (1, 2, 4, 8):
            variant = {"how": "graph", "ctas_per_sm": waves, "block": block, "smem": LARGE}
            yield Timed("launch", "launch_waves", variant, "graph", -waves, block, smem=LARGE)


def replacements() -> Iterator[Benchmark]:
    """From a CTA's last clock to the first one of the CTA behind it, on the same SM."""
    for block in (128, 384):
        for smem in (1024, LARGE):
            for cluster in (1, 2):
                role = Role("bar.warp.sync -1;\n" * 64)
                made = Kernel((role,), block=block, grid=8 if smem == LARGE else 4, smem=smem,
                              cluster=cluster, per_sm=True)  # fmt: skip
                if smem != LARGE:  # several fit: the figure would say nothing
                    continue
                variant = {"block": block, "smem": smem, "cluster": cluster}
                points = (Point(made, 64, 1),)
                yield Benchmark("launch", "cta_start", variant, CYCLES, points, take="replacement")


LOADS = {
    "fma of one warp": (lambda: Kernel((Role(FMA * 64, before="mov.b32 %r100, %r_y;",
                                             sink=("%r100",)),)), 40000),
    "fma of all SMs": (lambda: Kernel((Role(FMA * 64, before="mov.b32 %r100, %r_y;",
                                            sink=("%r100",)),), block=512, per_sm=True), 20000),
    "wgmma of zeros, all SMs": (lambda: _everywhere(
        wgmma_kernel(256, registers=False, steps=8, groups=2)), 4000),
    "loads from L2, all SMs": (lambda: stream("ld.global.v4", 32, 4, cold=False, per_sm=True),
                               10000),
    "loads from HBM, all SMs": (lambda: stream("ld.global.v4", 32, 4, cold=True, per_sm=True),
                                10000),
}  # fmt: skip


def _everywhere(kernel: Kernel) -> Kernel:
    return Kernel(kernel.roles, kernel.setup, kernel.block, smem=kernel.smem, per_sm=True)


def clocks() -> Iterator[Benchmark]:
    """Cycles of the SM per nanosecond of the global timer, over some milliseconds."""
    for name, (make, count) in LOADS.items():
        points = (Point(make(), count, 1),)
        yield Benchmark("clock", "clock", {"load": name}, "GHz", points, take="gigahertz")


def benchmarks() -> Iterator[Benchmark | Timed]:
    yield from launches()
    yield from replacements()
    yield from clocks()
