"""Nominal time: a clock per warp and per asynchronous unit, recorded as spans of a `Trace`.

A warp-instruction costs one cycle, a TMA transfer a latency and its bytes over a rate, an MMA its
operations over the tensor core's rate; a wait ends when what it waits for completed. The schedule
itself is unchanged. The numbers show what overlaps and who waits, not how long hardware takes: the
rates are round figures for a B200 and nothing is calibrated.
"""

from __future__ import annotations

from ptxemu.check.trace import Trace

TMA_LATENCY = 800.0  # cycles from issue to first byte, order of magnitude of DRAM
TMA_BYTES_PER_CYCLE = 64.0  # per SM, operands mostly from L2
MMA_FLOPS_PER_CYCLE = 8192.0  # bf16, per SM, counting a multiply-add as two
_ENGINE = {"tma": "TMA", "tensor core": "tensor core", "cp.async": "cp.async"}


class Timeline:
    """The clocks of a launch. `now` is the time of whoever acts: a warp, or a unit finishing
    work.
    """

    def __init__(self) -> None:
        self.trace = Trace()
        self.now = 0.0
        self._engines: dict[tuple[int, str], float] = {}
        self._began: dict[object, float] = {}  # warp -> start of its running span

    def before(self, warp: object) -> None:
        """`warp` is about to execute a block."""
        self._began.setdefault(warp, warp.time)
        self.now = warp.time

    def after(self, warp: object, instructions: int) -> None:
        warp.time += instructions
        self.now = warp.time

    def catch_up(self, warp: object, when: float, what: str) -> None:
        """`warp` waited for something that completed at `when`."""
        if when > warp.time:
            self.close(warp)
            self._span(warp, f"wait {what}", warp.time, when, "wait")
            warp.time = when
        self.now = warp.time

    def close(self, warp: object) -> None:
        """End the running span of a warp."""
        began = self._began.pop(warp, None)
        if began is not None and warp.time > began:
            self._span(warp, "run", began, warp.time, "compute")

    def _span(self, warp: object, name: str, start: float, end: float, category: str) -> None:
        self.trace.span(_cta(warp), f"warp {warp.index}", name, start, end, category)

    def work(self, warp: object, unit: str, label: str, size: int) -> float:
        """Place asynchronous work on its engine; returns when it completes."""
        engine = (_cta(warp), _ENGINE.get(unit, unit))
        start = max(self.now, self._engines.get(engine, 0.0))
        if unit == "tensor core":
            busy, latency = size / MMA_FLOPS_PER_CYCLE, 0.0
        else:
            busy, latency = size / TMA_BYTES_PER_CYCLE, TMA_LATENCY
        self._engines[engine] = start + busy
        if busy:
            category = "mma" if unit == "tensor core" else "tma"
            self.trace.span(
                *engine,
                label,
                start,
                start + busy,
                category,
                issued_by=f"warp {warp.index}",
                done=start + busy + latency,
            )
        return start + busy + latency


def _cta(warp: object) -> int:
    return warp.cluster.index * len(warp.cluster.ctas) + warp.cta.rank
