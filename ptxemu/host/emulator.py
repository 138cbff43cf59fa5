"""The launcher that emulates: each launch request run on its module, with one report for all."""

from __future__ import annotations

from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from ptxemu.host.allocations import LiveTensors
from ptxemu.host.launch_config import LaunchRequest
from ptxemu.machine.memory import Range
from ptxemu.options import Options
from ptxemu.report import LaunchReport, Report
from ptxemu.watch import adapted

_live: ContextVar[LiveTensors | None] = ContextVar("live_tensors", default=None)


class Emulator:
    """A launcher for `cutedsl.run` and `intercepted`; `report` grows by each launch."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.report = Report()

    def __call__(self, request: LaunchRequest) -> LaunchReport:
        """Run one launch to its end; raises what `Module.launch` raises."""
        allocated: list[Range] | None = None
        freed: list[Range] = []
        if adapted(self.options).check:
            live = _live.get() or LiveTensors()
            _live.set(live)
            allocated, freed = live.look()
        launched = _module(request.ptx).launch(
            request.entry,
            grid=request.grid,
            block=request.block,
            cluster=request.cluster,
            smem_bytes=request.smem_bytes,
            params=list(request.params),
            options=self.options,
            dependent=request.attributes.pdl,
            allocated=allocated,
            freed=freed,
        )
        self.report.launches.append(launched)
        return launched


@lru_cache(maxsize=32)
def _module(ptx: str) -> Any:
    """A loaded module is kept: generating its code costs more than many a launch."""
    from ptxemu.module import load  # with numpy and every instruction

    return load(ptx)
