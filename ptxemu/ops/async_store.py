"""st.async to shared memory of the cluster, counted by an mbarrier: PTX ISA "st.async"."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import Work
from ptxemu.machine.listener import Place
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.warp import Warp
from ptxemu.numerics.lanes import PerLane
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.syntax.tree import TYPE_BITS, Instr


@op(
    "st.async",
    types="b32 u32 s32 f32 b64 u64 s64 f64",
    flags="weak shared::cluster mbarrier::complete_tx::bytes v2 v4",
    section="st.async",
)
def emit_store(c: Lower, i: Instr, f: Match) -> None:
    width = TYPE_BITS[f.type]
    values = tuple(c.src(item, f"u{width}") for item in c.each(i.operands[1]))
    fields = ", ".join(f"{{{k + 2}}}" for k in range(len(values)))
    c.effect(
        f"store_async(w, {{0}}, {{1}}, {width // 8}, ({fields},))",
        c.address(i.operands[0], 32),
        barrier_address(c, i.operands[2]),
        *values,
    )


@runtime
def store_async(
    w: Warp, target: PerLane, barrier: PerLane, size: int, values: tuple[Any, ...]
) -> None:
    """One store per active lane; the barrier is in the CTA that is stored to."""
    nbytes = size * len(values)
    columns = w.each_lane(*values)
    for where, signal, row in zip(
        w.lane_values(target), w.lane_values(barrier), columns, strict=True
    ):
        cta, offset = w.cluster.locate(where)
        if offset % nbytes:
            raise HardwareRefusal(f"st.async of {nbytes} bytes to {where:#x}; misaligned")
        cta.check(offset, nbytes)
        _issue(w, (cta, offset), np.array(row, f"u{size}").view(np.uint8), find(w, signal))


def _issue(w: Warp, place: Place, data: np.ndarray, signal: MBarrier) -> None:
    cta, offset = place
    nbytes = data.size

    def run(work: Work) -> None:
        for each in w.listeners:
            each.land(work, [place], nbytes, [signal])
        cta.smem[offset : offset + nbytes] = data
        cta.mark_generic(slice(offset, offset + nbytes))
        signal.complete(nbytes)

    w.machine.bytes["st.async"] += nbytes
    label = f"st.async {nbytes} B"
    w.machine.issue(w, Work("st.async", label, run, size=nbytes, stream="st.async"))
