"""Names of a plan for what a timeline calls by address: barriers, shared buffers, TMEM ranges."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from kernelkit.compile.plan_names import warps_of
from kernelkit.plan import hw
from kernelkit.plan.warps import RolePlan
from ptxemu.trace import Span, Trace

SMEM_RESERVED = 1024  # the CTA's own data begins behind what the system keeps
BARRIER = re.compile(r"mbarrier (0x[0-9a-f]+) of cta\(.*\)")
LOAD = re.compile(r"load (\S+) at \(.*?\)(?: to (0x[0-9a-f]+))?")
STORE = re.compile(r"store \S+ at \(.*?\)")
MMA = re.compile(r"mma \S+ (\d+x\d+)x\d+(?: to column (\d+))?")


def named(trace: Trace, plan: Any, roles: RolePlan) -> Trace:
    """The same timeline with the plan's names; what it has no name for keeps its own."""
    names = PlanNames(plan, roles)
    return Trace([names.rename(span) for span in trace.spans], trace.time)


class PlanNames:
    """Looks up addresses of a CTA in its plan."""

    def __init__(self, plan: Any, roles: RolePlan) -> None:
        self.roles = {f"warp {warp}": name for warp, name in warps_of(roles).items()}
        self.barriers = _barriers(plan)
        self.buffers = _buffers(plan)
        self.columns = {item.begin: item.name for item in plan.tmem.ranges if not item.over}

    def rename(self, span: Span) -> Span:
        """The span under its short name; its long one stays among the arguments."""
        name = self.roles.get(span.agent, span.name) if span.name == "run" else span.name
        name = BARRIER.sub(lambda m: self.barriers.get(int(m[1], 16), m[1]), name)
        name = LOAD.sub(lambda m: self._buffer_of(int(m[2] or "0", 16)) or f"load {m[1]}", name)
        name = STORE.sub("store", name)
        name = MMA.sub(lambda m: self.columns.get(int(m[2] or -1), f"mma {m[1]}"), name)
        if name == span.name:
            return span
        return replace(span, name=name, args={**span.args, "what": span.name})

    def _buffer_of(self, address: int) -> str | None:
        return next((name for stage, name in self.buffers.items() if address in stage), None)


def _barriers(plan: Any) -> dict[int, str]:
    """Address -> 'k[2]' for a full barrier, 'k[2] free' for an empty one, in allocation order."""
    names = []
    for edge in plan.edges.edges:
        stages = [f"{edge.name}[{i}]" if edge.stages > 1 else edge.name for i in range(edge.stages)]
        names += stages + ([f"{stage} free" for stage in stages] if edge.release else [])
    begin = SMEM_RESERVED + plan.smem.offsets()["barriers"][0]
    return {begin + i * hw.MBARRIER_BYTES: name for i, name in enumerate(names)}


def _buffers(plan: Any) -> dict[range, str]:
    """Addresses -> 'K[2]' for every stage of the buffers that loads fill, such as sQ and sK."""
    names = {}
    for buffer in plan.smem.buffers:
        if buffer.over:
            continue
        begin, _ = plan.smem.offsets()[buffer.name]
        short = re.sub(r"^s(?=[A-Z])", "", buffer.name)
        for stage in range(buffer.stages):
            index = f"[{stage}]" if buffer.stages > 1 else ""
            first = SMEM_RESERVED + begin + stage * buffer.stage_bytes
            names[range(first, first + buffer.stage_bytes)] = short + index
    return names
