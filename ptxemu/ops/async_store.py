"""st.async and red.async: elements that come to the shared memory of a CTA of the cluster and
complete on an mbarrier there. PTX ISA, the sections of these names.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu.codegen.lower import Lower, fields
from ptxemu.codegen.registry import Match, op, runtime
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import Work
from ptxemu.machine.listener import Place
from ptxemu.machine.mbarrier import MBarrier
from ptxemu.machine.tma_tile import combine
from ptxemu.machine.warp import Warp
from ptxemu.numerics.lanes import PerLane
from ptxemu.ops.async_copy import REDUCTIONS, Reduction, reduction
from ptxemu.ops.load_store import elements
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.syntax.tree import TYPE_BITS, Instr


@op(
    "st.async",
    types="b32 u32 s32 f32 b64 u64 s64 f64",
    flags="weak shared::cluster mbarrier::complete_tx::bytes v2 v4",
)
def emit_store(c: Lower, i: Instr, f: Match) -> None:
    _emit(c, i, f, None)


@op(
    "red.async",
    types="u32 s32 b32 u64 s64",
    flags=f"relaxed cluster shared::cluster mbarrier::complete_tx::bytes {REDUCTIONS}",
)
def emit_reduction(c: Lower, i: Instr, f: Match) -> None:
    _emit(c, i, f, reduction(f))


def _emit(c: Lower, i: Instr, f: Match, how: Reduction) -> None:
    width = TYPE_BITS[f.type]
    values = c.srcs(elements(c, i, f, i.operands[1]), f"u{width}")
    c.effect(
        f"store_async(w, {how}, {{0}}, {{1}}, {width // 8}, ({fields(values, 2)},))",
        c.address(i.operands[0], 32),
        barrier_address(c, i.operands[2]),
        *values,
    )


@runtime
def store_async(
    w: Warp,
    how: Reduction,
    target: PerLane,
    barrier: PerLane,
    size: int,
    values: tuple[Any, ...],
) -> None:
    """One store per active lane; the barrier is in the CTA that is stored to."""
    nbytes = size * len(values)
    columns = w.each_lane(*values)
    for where, signal, row in zip(
        w.lane_values(target), w.lane_values(barrier), columns, strict=True
    ):
        cta, offset = w.cluster.locate(where)
        if offset % nbytes:
            name = "st.async" if how is None else "red.async"
            raise HardwareRefusal(f"{name} of {nbytes} bytes to {where:#x}; misaligned")
        cta.check(offset, nbytes)
        data = np.array(row, f"u{size}").view(np.uint8)
        _issue(w, how, (cta, offset), data, find(w, signal))


def _issue(w: Warp, how: Reduction, place: Place, data: np.ndarray, signal: MBarrier) -> None:
    cta, offset = place
    nbytes, name = data.size, "st.async" if how is None else "red.async"

    def run(work: Work) -> None:
        for each in w.listeners:
            each.land(work, [place], nbytes, [signal], atomic=how is not None)
        held = cta.smem[offset : offset + nbytes]
        cta.smem[offset : offset + nbytes] = data if how is None else combine(*how, held, data)
        cta.mark_generic(slice(offset, offset + nbytes))
        signal.complete(nbytes)

    w.machine.bytes[name] += nbytes
    label = f"{name} {nbytes} B"
    w.machine.issue(w, Work("st.async", label, run, size=nbytes, stream="st.async"))
