"""From clusters to a launch: which CTAs are where and when, and what that takes.

The clusters of a launch that were recorded stand for those that were not: each of the others takes
as long as the recorded one before it. Clusters that share an SM are simulated together. Whoever is
first on a free place is the next in the order of the grid, as the hardware's scheduler has it, so
that persistent kernels, waves and the longest first all come out of one rule. Clusters that others
have taken over (clusterlaunchcontrol) are none here: the recording of those others has their work.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cycle_model.binding.bound import BoundLaunch
from cycle_model.engine.simulate import Result, simulate
from cycle_model.engine.tables import Placed, Sharing, Tables
from cycle_model.parameters.parameter import Gpu
from cycle_model.traffic import Traffic
from ptxemu.machine.launch_queue import ctas_of_sm

REGISTERS_OF_SM = 1 << 16
QUICK_CTAS = 8  # of an SM, which are sent to it quickly
_REGISTER_UNIT = 256  # in which a warp gets them
COLD, WARM = MEMORIES = ("cold", "warm")


@dataclass(frozen=True)
class Prediction:
    """cycles: of the launch, without the time to launch it. durations: of the clusters that were
    simulated, cycles. waves: clusters that a place has one after the other, at most."""

    gpu: Gpu
    cycles: int
    durations: dict[int, int]
    per_sm: int
    places: int
    clusters: int
    waves: int

    @property
    def microseconds(self) -> float:
        """With the launch, of which some goes on beside the launch before it."""
        alone = self.gpu.value("launch") + self.cycles / self.gpu.value("clock") / 1e3
        return max(alone, self.gpu.value("launch_least"))


class LaunchModel:
    """Of one bound launch on one GPU. memory: 'cold', nothing of what it reads is in L2 before, or
    'warm', all of it is that fits."""

    def __init__(self, launch: BoundLaunch, gpu: Gpu, *, memory: str = COLD) -> None:
        if memory not in MEMORIES:
            raise ValueError(f"memory={memory!r}; must be one of {', '.join(MEMORIES)}")
        self.launch, self.gpu, self.memory = launch, gpu, memory

    @cached_property
    def clusters(self) -> int:
        """Of the grid, without those that others take over. ValueError where fewer did than there
        are places, and more of it each."""
        recording = self.launch.recording
        whole = int(np.prod(recording.grid)) // self.launch.ctas_of_cluster
        if not recording.places:
            return whole
        if recording.places < (needed := min(self.places, whole)):
            raise ValueError(
                f"{recording.entry}: {recording.places} clusters took over the work of the others, "
                f"and on {self.gpu.name} {needed} would; record with Options(resident={needed})"
            )
        return max(recording.places, len(self.launch.clusters))

    @cached_property
    def per_sm(self) -> int:
        """CTAs that fit on an SM."""
        recording = self.launch.recording
        warps = -(-int(np.prod(recording.block)) // 32)
        of_warp = -(-self.launch.function.registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        by_registers = REGISTERS_OF_SM // max(of_warp * warps, 1)
        return max(min(ctas_of_sm(recording.smem_bytes, warps), by_registers), 1)

    @cached_property
    def places(self) -> int:
        """Clusters that are there at a time."""
        return max(self.gpu.sms * self.per_sm // self.launch.ctas_of_cluster, 1)

    @cached_property
    def together(self) -> int:
        """CTAs that an SM has at a time, with so many clusters."""
        ctas = min(self.clusters, self.places) * self.launch.ctas_of_cluster
        return max(min(-(-ctas // self.gpu.sms), self.per_sm), 1)

    @cached_property
    def active_sms(self) -> int:
        """With at least one CTA."""
        return min(self.clusters * self.launch.ctas_of_cluster, self.gpu.sms)

    @cached_property
    def traffic(self) -> Traffic:
        """What it reads, and where that comes from."""
        return Traffic(self.launch, self.clusters, cold=self.memory == COLD, l2=self.gpu.l2_bytes)

    def simulated(self, cluster: int, *, log: bool = False, alone: bool = False) -> Result:
        """A recorded cluster, and others of the launch on the same SMs, or alone."""
        placed, ctas = [], self.launch.ctas_of_cluster
        known = self.launch.clusters
        first = known.index(cluster)
        for copy in range(1 if alone else self.together):
            number = known[(first + copy) % len(known)]
            far = self.traffic.of(number)
            for warp in self.launch.cluster(number):
                rank = warp.record.rank
                placed.append(Placed(warp, rank, copy * ctas + rank, copy, far))
        tables = Tables(self.launch.recording, self.launch.function, placed, self.gpu)
        sharing = Sharing(self.active_sms, writes_back=self.memory == COLD)
        return simulate(tables, sharing, log=log)

    def _later(self, number: int, together: Result) -> tuple[int, int]:
        """Cycles of a cluster of a wave behind the first, and of the last: those that share an SM
        no longer begin at the same time, so that some wait for memory while others work, and in the
        last wave there are fewer of them."""
        cycles = together.cycles_of(0)
        if self.together == 1 or self.clusters <= self.places:
            return cycles, cycles
        alone = self.simulated(number, alone=True).cycles
        left = (self.clusters - 1) % self.places + 1
        busy = together.busiest, together.busiest * left // self.places
        steady, last = (min(cycles, max(alone, each)) for each in busy)
        return steady, last

    def _sent(self, ctas: int) -> float:
        """Cycles until so many CTAs have been sent to their SMs: the first of each SM, the next few
        at a time, then one behind the other."""
        first = min(ctas, self.gpu.sms - 1)
        quick = min(ctas, self.gpu.sms * min(self.per_sm, QUICK_CTAS)) - first
        return (
            self.gpu.value("sm_interval") * math.sqrt(first)
            + self.gpu.value("cta_interval") * quick
            + self.gpu.value("cta_interval_later") * (ctas - first - quick)
        )

    def predict(self) -> Prediction:
        """Of the whole launch."""
        ctas = self.launch.ctas_of_cluster
        start = self.gpu.value("cluster_start" if ctas > 1 else "cta_start")
        results = {number: self.simulated(number) for number in self.launch.clusters}
        durations = {number: result.cycles_of(0) for number, result in results.items()}
        later = {number: self._later(number, result) for number, result in results.items()}
        known, last = sorted(durations), (self.clusters - 1) // self.places * self.places
        free = [-start] * min(self.places, self.clusters)  # the first start is the launch's
        for number in range(self.clusters):
            nearest = known[max(bisect_right(known, number) - 1, 0)]
            begin = max(free[0] + start, self._sent(number * ctas))
            took = durations[nearest]
            if number >= len(free):
                took = later[nearest][number >= last]
            heapq.heapreplace(free, begin + took)
        waves = -(-self.clusters // self.places)
        return Prediction(
            self.gpu, round(max(free)), durations, self.per_sm, self.places, self.clusters, waves
        )
