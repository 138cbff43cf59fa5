"""Nominal time: a clock per warp and per asynchronous unit, recorded as spans of a `Trace`.

A warp-instruction costs one cycle, a TMA transfer a latency and its bytes over a rate, an MMA its
operations over the tensor core's rate. A wait ends when the awaited event occurs. The schedule is
unchanged. The numbers show overlap and waits, not the time on hardware: the rates are round figures
for a B200 and nothing is calibrated.
"""

from __future__ import annotations

from collections import defaultdict

from ptxemu.machine.async_ops import Work
from ptxemu.machine.listener import How, Listener
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.state import Cluster, Cta, NamedBarrier, Warp
from ptxemu.trace import Trace

TMA_LATENCY = 800.0  # cycles from issue to first byte, order of magnitude of DRAM
TMA_BYTES_PER_CYCLE = 64.0  # per SM, operands mostly from L2
MMA_FLOPS_PER_CYCLE = 8192.0  # bf16, per SM, counting a multiply-add as two
_ENGINE = {"tma": "TMA"}
_UNTIMED = "cp.async"


class Timeline(Listener):
    """Clocks of a launch. `now` is the time of the acting warp, or of a unit that finishes work."""

    every_block = True

    def __init__(self) -> None:
        self.trace = Trace()
        self.now = 0.0
        self._times: defaultdict[Warp, float] = defaultdict(float)
        self._began: dict[Warp, float] = {}  # start of its running span
        self._engines: dict[tuple[int, str], float] = {}
        self._done: dict[Work, float] = {}  # when outstanding work completes
        self._interrupted: list[float] = []  # the time of whoever acted before a step of work
        # Of the latest arrival; of an mbarrier by the parity of its phases, hence of completion.
        self._arrivals: defaultdict[NamedBarrier | Cluster, float] = defaultdict(float)
        self._signals: defaultdict[tuple[MBarrier, int], float] = defaultdict(float)

    # -- warps --------------------------------------------------------------------------------

    def block_began(self, w: Warp) -> None:
        self._began.setdefault(w, self._times[w])
        self.now = self._times[w]

    def block_ended(self, w: Warp, instructions: int) -> None:
        self._times[w] += instructions
        self.now = self._times[w]

    def warp_ended(self, w: Warp) -> None:
        self._close(w)

    def _catch_up(self, w: Warp, when: float, what: str) -> None:
        """`w` waited for something that completed at `when`."""
        if when > self._times[w]:
            self._close(w)
            self._span(w, f"wait {what}", self._times[w], when, "wait")
            self._times[w] = when
        self.now = self._times[w]

    def _close(self, w: Warp) -> None:
        """End the running span of a warp."""
        began = self._began.pop(w, None)
        if began is not None and self._times[w] > began:
            self._span(w, "run", began, self._times[w], "compute")

    def _span(self, w: Warp, name: str, start: float, end: float, category: str) -> None:
        self.trace.span(_number(w.cta), f"warp {w.index}", name, start, end, category)

    # -- barriers -----------------------------------------------------------------------------

    def barrier_arrival(self, w: Warp, barrier: NamedBarrier | Cluster) -> None:
        self._arrivals[barrier] = max(self._arrivals[barrier], self._times[w])

    def barrier_waited(self, w: Warp, barrier: NamedBarrier) -> None:
        self._catch_up(w, self._arrivals[barrier], f"barrier {barrier.ident}")

    def cluster_arrival(self, w: Warp, relaxed: bool) -> None:
        self.barrier_arrival(w, w.cluster)

    def cluster_waited(self, w: Warp) -> None:
        self._catch_up(w, self._arrivals[w.cluster], "cluster barrier")

    def mbarrier_signalled(self, barrier: MBarrier) -> None:
        key = barrier, barrier.phase & 1
        self._signals[key] = max(self._signals[key], self.now)

    def mbarrier_waited(self, w: Warp, cta: Cta, barrier: MBarrier, parity: int, how: How) -> None:
        if barrier.phase:
            self._catch_up(w, self._signals[barrier, parity & 1], f"mbarrier {barrier.where}")

    # -- asynchronous units -------------------------------------------------------------------

    def issued(self, w: Warp, work: Work) -> None:
        """Place work on its engine."""
        if work.unit == _UNTIMED:
            return
        engine = (_number(w.cta), _ENGINE.get(work.unit, work.unit))
        start = max(self.now, self._engines.get(engine, 0.0))
        if work.unit == "tensor core":
            busy, latency = work.size / MMA_FLOPS_PER_CYCLE, 0.0
        else:
            busy, latency = work.size / TMA_BYTES_PER_CYCLE, TMA_LATENCY
        self._engines[engine] = start + busy
        self._done[work] = start + busy + latency
        if busy:
            category = "mma" if work.unit == "tensor core" else "tma"
            self.trace.span(
                *engine,
                work.label,
                start,
                start + busy,
                category,
                issued_by=f"warp {w.index}",
                done=start + busy + latency,
            )

    def step_began(self, work: Work) -> None:
        """The last step happens at the nominal completion."""
        self._interrupted.append(self.now)
        if len(work.steps) == 1:
            self.now = self._done.pop(work, self.now)

    def step_ended(self, work: Work) -> None:
        self.now = self._interrupted.pop()


def _number(cta: Cta) -> int:
    return cta.cluster.index * len(cta.cluster.ctas) + cta.rank
