"""clusterlaunchcontrol: PTX ISA "clusterlaunchcontrol.try_cancel", ".query_cancel".

A running cluster takes over the work of one that has not been launched: the launch queue gives up
its next cluster, whose first CTA id is the answer. The manual calls the response opaque, but
kernels of cuDNN take it apart themselves. It is as the machine code of the queries has it: x in the
first word, y and z in halves of the second, whether there is such a cluster in bit 0 of the third.
"""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.codegen.values import Value
from ptxemu.machine.async_ops import Work
from ptxemu.machine.state import OFFSET_MASK, Warp
from ptxemu.numerics import PerLane
from ptxemu.ops.mbarrier import barrier_address
from ptxemu.syntax.tree import Instr

RESPONSE_BYTES = 16


@op(
    "clusterlaunchcontrol.try_cancel.async",
    types="b128",
    flags="shared::cta mbarrier::complete_tx::bytes multicast::cluster::all",
    section="clusterlaunchcontrol.try_cancel",
)
def try_cancel(c: Lower, i: Instr, f: Match) -> None:
    everywhere = "multicast::cluster::all" in f.flags
    c.effect(
        f"cancel_cluster(w, {{0}}, {{1}}, {everywhere})",
        c.address(i.operands[0], 32),
        barrier_address(c, i.operands[1]),
    )


@op(
    "clusterlaunchcontrol.query_cancel.is_canceled",
    types=("pred", "b128"),
    section="clusterlaunchcontrol.query_cancel",
)
def is_cancelled(c: Lower, i: Instr, f: Match) -> Value:
    high = c.convert(c.halves(i.operands[1])[1], "u64")
    return c.pure("pred", "(({0} & 1) != 0)", "({0} & 1) != 0", high)


# Where an axis begins in the first 64 bits, and its bits.
_AXES = {
    "get_first_ctaid::x": (0, 0xFFFFFFFF),
    "get_first_ctaid::y": (32, 0xFFFF),
    "get_first_ctaid::z": (48, 0xFFFF),
}


@op("clusterlaunchcontrol.query_cancel", types=("b32", "b128"), flags=" ".join(_AXES))
def first_ctaid(c: Lower, i: Instr, f: Match) -> Value:
    return _word(c, c.halves(i.operands[1]), f.pick(*_AXES))


def _word(c: Lower, halves: tuple[Value, Value], axis: str) -> Value:
    shift, mask = _AXES[axis]
    text = f"({{0}} >> {shift} & {mask:#x})"
    return c.convert(c.pure("u64", text, text, c.convert(halves[0], "u64")), "u32")


@op(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4",
    types=("b32", "b128"),
    section="clusterlaunchcontrol.query_cancel",
)
def first_ctaid_vector(c: Lower, i: Instr, f: Match) -> None:
    halves = c.halves(i.operands[1])
    for target, axis in zip(c.each(i.operands[0])[:3], _AXES, strict=True):
        c.dst(target, _word(c, halves, axis))


@runtime
def cancel_cluster(w: Warp, target: PerLane, barrier: PerLane, everywhere: bool) -> None:
    for where, signal in w.each_lane(target, barrier):
        _issue(w, where & OFFSET_MASK, signal & OFFSET_MASK, everywhere)


def _issue(w: Warp, offset: int, signal: int, everywhere: bool) -> None:
    ctas = w.cluster.ctas if everywhere else [w.cta]
    barriers = [cta.mbarrier(signal) for cta in ctas]
    for cta in ctas:
        cta.check(offset, RESPONSE_BYTES)

    def run(work: Work) -> None:
        for each in w.listeners:
            each.land(work, [(cta, offset) for cta in ctas], RESPONSE_BYTES, barriers)
        first = w.machine.cancel_cluster(w.cluster)
        x, y, z = first or (0, 0, 0)
        response = np.array([x, y | z << 16, first is not None, 0], np.uint32)
        for cta, found in zip(ctas, barriers, strict=True):
            cta.views[4][offset // 4 : offset // 4 + 4] = response
            cta.mark_async(slice(offset, offset + RESPONSE_BYTES))
            found.complete(RESPONSE_BYTES, by="launch control")

    w.machine.issue(w, Work("launch control", "try_cancel", run))
