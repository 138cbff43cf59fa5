"""st.async to shared memory of the cluster, counted by an mbarrier: PTX ISA "st.async"."""

from __future__ import annotations

import numpy as np

from ptxemu.codegen.lower import Lower
from ptxemu.errors import HardwareRefusal
from ptxemu.machine.async_ops import Work
from ptxemu.ops.mbarrier import barrier_address, find
from ptxemu.ops.registry import Match, op, runtime
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
def store_async(w: object, target: object, barrier: object, size: int, values: tuple) -> None:
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
        ticket = w.ticket("st.async")
        found, data = find(w, signal), np.array(row, f"u{size}").view(np.uint8)

        def run(
            cta: object = cta,
            offset: int = offset,
            data: np.ndarray = data,
            found: object = found,
            ticket: object = ticket,
        ) -> None:
            if ticket:
                w.check.landed(ticket, [(cta, offset)], data.size, [found])
            cta.smem[offset : offset + data.size] = data
            cta.mark_generic(slice(offset, offset + data.size))
            found.complete(data.size)

        w.machine.bytes["st.async"] += nbytes
        w.machine.issue(w, Work("st.async", f"st.async {nbytes} B", run, size=nbytes))
