"""A sum over the CTAs of a cluster (device code): each sends its part to all others by st.async, so
that nobody waits for anything but the parts; a barrier of the cluster would wait for every store.

Boxes are used in turns: who sends to one again has seen parts of all who read it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from mla.compressor.config import BOXES


@dataclass(frozen=True)
class Exchange:
    """parts: fp32 [BOXES, CTAs]. arrived: an mbarrier of each box."""

    parts: cute.Tensor
    arrived: cute.Tensor


@cute.jit
def open_exchange(ctas: cutlass.Constexpr[int]) -> Exchange:
    """By all threads of all CTAs; before anything is sent they wait for the cluster's barrier."""
    smem, (thread, _, _) = SmemAllocator(), cute.arch.thread_idx()
    arrived = smem.allocate_tensor(Int64, cute.make_layout(BOXES), byte_alignment=8)
    layout = cute.make_ordered_layout((BOXES, ctas), order=(1, 0))
    parts = smem.allocate_tensor(Float32, layout, byte_alignment=8)
    if thread == 0:
        for box in cutlass.range_constexpr(BOXES):
            cute.arch.mbarrier_init(arrived.iterator + box, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    return Exchange(parts, arrived)


@cute.jit
def exchanged(exchange: Exchange, mine: Float32, part: Int32, turn: Int32) -> Float32:
    """The sum in the order of CTAs, of which this is number `part`; by all threads, with the same
    `mine`. turn: how many sums came before this one."""
    ctas, box = cute.size(exchange.parts, mode=[1]), turn % BOXES
    thread, _, _ = cute.arch.thread_idx()
    arrived = exchange.arrived.iterator.toint() + box * 8
    if thread == 0:
        cute.arch.inline_ptx(
            "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
            read_only_args=[arrived, Int32(4 * ctas)],
        )
    if thread < ctas:
        cute.arch.inline_ptx(
            "{ .reg .b32 to, box; "
            "mapa.shared::cluster.u32 to, {$r0}, {$r3}; mapa.shared::cluster.u32 box, {$r1}, {$r3};"
            " st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [to], {$r2}, [box]; }",
            read_only_args=[
                exchange.parts.iterator.toint() + (box * ctas + part) * 4, arrived, mine, thread
            ],
        )  # fmt: skip
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[arrived, turn // BOXES % 2],
    )
    total = Float32(0.0)
    for rank in cutlass.range_constexpr(ctas):
        total = total + exchange.parts[box, rank]
    return total
