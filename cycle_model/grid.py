"""Time of a launch from the times of its clusters: the place and the start of each CTA.

Each cluster that was not recorded is assumed to need as long as the recorded one before it.
Clusters that share an SM are simulated together. The next cluster in grid order starts on the first
free place, as with the hardware's scheduler. Persistent kernels, waves and longest-first orders all
follow from this rule. Clusters that others have taken over (clusterlaunchcontrol) do not count
here: their work is in the recording of the others.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cycle_model.binding.bound import BoundLaunch
from cycle_model.engine.simulate import Result, simulate
from cycle_model.engine.tables import Placed, Sharing, Tables
from cycle_model.parameters.parameter import Gpu
from cycle_model.traffic import Traffic
from ptxemu.machine.shape import ctas_of_sm

REGISTERS_OF_SM = 1 << 16
QUICK_CTAS = 8  # of an SM, which are sent to it quickly
_REGISTER_UNIT = 256  # in which a warp gets them
COLD, WARM = MEMORIES = ("cold", "warm")
ROUNDS, STEADY = 8, 0.002  # of a stream that repeats itself; a share of its time


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a launch.

    Attributes:
        cycles: Time of the launch, without the launch overhead.
        microseconds: Time by which it lengthens a stream of such launches.
        durations: Cycles of each simulated cluster.
        per_sm: See `LaunchModel`.
        places: See `LaunchModel`.
        clusters: Number of clusters.
        waves: Largest number of clusters that one place runs in sequence.
    """

    gpu: Gpu
    cycles: int
    microseconds: float
    durations: dict[int, int]
    per_sm: int
    places: int
    clusters: int
    waves: int


@dataclass(frozen=True)
class Lengths:
    """Cycles of a cluster: until its end, until it lets dependent grids begin, and of one in a wave
    behind the first, and in the last."""

    took: int
    triggered: int
    later: int
    last: int


@dataclass(frozen=True)
class Grid:
    """Times of a launch's clusters, in cycles from the caller's origin.

    Attributes:
        begin: Start of the first cluster.
        triggered: Time when the last cluster triggers dependent grids.
        ends: Ends of the clusters, by place.
    """

    begin: float
    triggered: float
    ends: list[float]

    @property
    def end(self) -> float:
        return max(self.ends)


class LaunchModel:
    """Model of one bound launch on one GPU.

    memory is 'cold' if L2 is empty before, or 'warm' if L2 holds what the launch reads, as far as
    it fits.
    """

    def __init__(self, launch: BoundLaunch, gpu: Gpu, *, memory: str = COLD) -> None:
        if memory not in MEMORIES:
            raise ValueError(f"memory={memory!r}; must be one of {', '.join(MEMORIES)}")
        self.launch, self.gpu, self.memory = launch, gpu, memory

    @cached_property
    def clusters(self) -> int:
        """Number of the grid's clusters, without those that others take over.

        Raises ValueError if fewer clusters took work over than there are places.
        """
        recording = self.launch.recording
        whole = int(np.prod(recording.grid)) // self.launch.ctas_of_cluster
        if not recording.places:
            return whole
        if recording.places < (needed := min(self.places, whole)):
            raise ValueError(
                f"{recording.entry}: in the recording {recording.places} clusters did all work, "
                f"but {needed} would on {self.gpu.name}. Record with Options(resident={needed})"
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
        """Number of SMs with at least one CTA."""
        return min(self.clusters * self.launch.ctas_of_cluster, self.gpu.sms)

    @cached_property
    def traffic(self) -> Traffic:
        """Reads of the launch and their sources."""
        return Traffic(self.launch, self.clusters, cold=self.memory == COLD, l2=self.gpu.l2_bytes)

    def simulated(
        self, cluster: int, *, log: bool = False, alone: bool = False, release: int = 0
    ) -> Result:
        """A recorded cluster, and others of the launch on the same SMs, or alone. release: when the
        grids in front are complete, cycles after its begin."""
        placed, ctas = [], self.launch.ctas_of_cluster
        known = self.launch.clusters
        first = known.index(cluster)
        near = self.gpu.value("sms_that_share") * self.together / ctas
        asks = self.traffic.alone(min(near, self.clusters))
        for copy in range(1 if alone else self.together):
            number = known[(first + copy) % len(known)]
            far = self.traffic.of(number)
            for warp in self.launch.cluster(number):
                rank = warp.record.rank
                placed.append(Placed(warp, rank, copy * ctas + rank, copy, far, asks))
        tables = Tables(
            self.launch.recording, self.launch.function, placed, self.gpu, self._least_asked
        )
        sharing = Sharing(self.active_sms, writes_back=self.memory == COLD,
                          grid_release=release)  # fmt: skip
        return simulate(tables, sharing, log=log)

    @cached_property
    def _least_asked(self) -> float:
        """Time of reads if all SMs read the same, relative to different reads."""
        rates = (
            self.gpu.value(name) / self.active_sms
            for name in ("l2_bytes_in_all", "l2_bytes_delivered")
        )
        different, same = (min(self.gpu.value("l2_bytes_per_cycle"), rate) for rate in rates)
        return min(different / same, 1)

    def _later(self, number: int, together: Result) -> tuple[int, int]:
        """Return the cycles of a cluster in a wave after the first, and in the last wave.

        Clusters that share an SM no longer begin at the same time, so some wait for memory while
        others work. In the last wave there are fewer of them.
        """
        cycles = together.cycles_of(0)
        if self.together == 1 or self.clusters <= self.places:
            return cycles, cycles
        alone = self.simulated(number, alone=True).cycles
        left = (self.clusters - 1) % self.places + 1
        busy = together.busiest, together.busiest * left // self.places
        steady, last = (min(cycles, max(alone, each)) for each in busy)
        return steady, last

    def _sent(self, ctas: int) -> float:
        """Return the cycles until `ctas` CTAs have been sent to their SMs.

        The first of each SM and the next few are sent at a time, the others one after another.
        """
        first = min(ctas, self.gpu.sms - 1)
        quick = min(ctas, self.gpu.sms * min(self.per_sm, QUICK_CTAS)) - first
        return (
            self.gpu.value("sm_interval") * math.sqrt(first)
            + self.gpu.value("cta_interval") * quick
            + self.gpu.value("cta_interval_later") * (ctas - first - quick)
        )

    def _lengths(self, cluster: int) -> Lengths:
        """Return the lengths of a recorded cluster."""
        dependent = self.launch.recording.dependent
        result = self.simulated(cluster, log=dependent)
        took = result.cycles_of(0)
        triggered = result.triggered(0) if dependent else took
        return Lengths(took, triggered, *self._later(cluster, result))

    def _held(self, cluster: int, release: int) -> tuple[int, int]:
        """Until its end, and until it lets dependent grids begin. release: see `simulated`."""
        result = self.simulated(cluster, log=True, release=release)
        return result.cycles_of(0), result.triggered(0)

    @cached_property
    def lengths(self) -> dict[int, Lengths]:
        """Lengths of the recorded clusters if no preceding grid has to be waited for."""
        return {each: self._lengths(each) for each in self.launch.clusters}

    @property
    def start(self) -> float:
        """Cycles between two clusters of one place."""
        return self.gpu.value("cluster_start" if self.launch.ctas_of_cluster > 1 else "cta_start")

    def placed(
        self, begin: float = 0, release: float = 0, free: Sequence[float] | None = None
    ) -> Grid:
        """Place all clusters.

        Args:
            begin: Earliest start of the first cluster.
            release: Time when the preceding grids are complete.
            free: Times from which places are free; None if all are free from the start.
        """
        start, ctas = self.start, self.launch.ctas_of_cluster
        wait = max(round(release - begin), 0) if self.launch.recording.dependent else 0
        held = {each: self._held(each, wait) for each in self.lengths} if wait else {}
        known, last = sorted(self.lengths), (self.clusters - 1) // self.places * self.places
        # the first start is the launch's
        heap = [-math.inf] * self.places if free is None else sorted(free)
        del heap[self.clusters :]
        first, triggered = len(heap), begin
        for number in range(self.clusters):
            nearest = known[max(bisect_right(known, number) - 1, 0)]
            at, lengths = (
                max(heap[0] + start, begin + self._sent(number * ctas)),
                self.lengths[nearest],
            )
            took = lengths.took
            if number >= first:
                took = lengths.last if number >= last else lengths.later
            end, told = at + took, at + lengths.triggered
            if held:  # those that begin later wait until the same moment
                took, triggers = held[nearest]
                end, told = max(end, begin + took), max(told, begin + triggers)
            triggered = max(triggered, told)
            heapq.heapreplace(heap, end)
        return Grid(begin, triggered, heap)

    def predict(self) -> Prediction:
        """Predict the whole launch after a launch like itself."""
        (found,) = in_stream([self])
        return found

    def prediction(self, grid: Grid, longer: float) -> Prediction:
        """Return the prediction for a placed grid that lengthens a stream by `longer` cycles."""
        return Prediction(
            self.gpu,
            round(grid.end - grid.begin),
            longer / self.gpu.value("clock") / 1e3,
            {number: lengths.took for number, lengths in self.lengths.items()},
            self.per_sm,
            self.places,
            self.clusters,
            -(-self.clusters // self.places),
        )


def in_stream(models: Sequence[LaunchModel]) -> list[Prediction]:
    """Predict launches that repeat in sequence on one GPU.

    A dependent launch begins as soon as all CTAs of the previous one have triggered it and there
    is room for it.
    """
    dependent = any(model.launch.recording.dependent for model in models)
    ended, whole = 0.0, math.inf
    front: tuple[LaunchModel, Grid] | None = None
    found: list[Prediction] = []
    for _ in range(ROUNDS if dependent else 1):
        found, before = [], ended
        for model in models:
            grid = _behind(model, front, ended)
            least = "dependent_least" if model.launch.recording.dependent else "launch_least"
            end = max(grid.end, ended + _cycles(model, least))
            found.append(model.prediction(grid, end - ended))
            front, ended = (model, grid), end
        whole, took = ended - before, whole
        if abs(whole - took) <= STEADY * whole:
            break
    return found


def _behind(model: LaunchModel, front: tuple[LaunchModel, Grid] | None, ended: float) -> Grid:
    """Place a launch after another one, which ended at cycle `ended`, or after none."""
    if front is None or not model.launch.recording.dependent:
        return model.placed(ended + _cycles(model, "launch"))
    other, grid = front
    begin = max(
        grid.triggered + _cycles(model, "dependent_start"),
        grid.begin + _cycles(model, "dependent_least"),
    )
    unused = [-math.inf] * (other.places - len(grid.ends))
    free = [*unused, *sorted(grid.ends)]
    places = [free[number * len(free) // model.places] for number in range(model.places)]
    return model.placed(begin, ended + _cycles(model, "dependent_release"), places)


def _cycles(model: LaunchModel, name: str) -> float:
    """Return the cycles of a parameter in microseconds."""
    return model.gpu.value(name) * model.gpu.value("clock") * 1e3
