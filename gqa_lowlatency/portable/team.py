"""Warps that divide the columns of the head for the same keys (device code).

Above head dim 256 a team has two warps. Each streams its slice of the columns of K and V through
its own ring, so a ring needs no barrier. Q K^T of a key is the sum over both slices. So each warp
leaves its sums in shared memory, meets the other one, and adds what that one left. Both add the
same two numbers, so both have the same scores, weights, maxima and row sums, and each multiplies
its slice of V by them.

What a warp leaves has two stages. It writes stage 0 again two steps later. By then it has met the
other warp once more, which had read stage 0 before it arrived.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from gqa_lowlatency.portable.plan import SCORE_STAGES, PortablePlan
from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import load, store

VECTOR_BYTES = 16  # what a lane leaves of 16 keys and 8 columns


@dataclass(frozen=True)
class Memory:
    """Shared addresses of a warp's buffers."""

    ring: Int32
    queries: Int32  # fragments of its slice of Q, shared by the warps with this slice
    scores: Int32  # what the warps of its team leave: [stage][slice]


@cute.jit
def team_of(plan: PortablePlan) -> Int32:
    """Return the number of this warp's team."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return warp if cutlass.const_expr(plan.slices == 1) else warp // plan.slices


@cute.jit
def slice_of(plan: PortablePlan) -> Int32:
    """Return the number of this warp's slice of the head."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return Int32(0) if cutlass.const_expr(plan.slices == 1) else warp % plan.slices


@cute.jit
def memory_of(plan: PortablePlan, smem: Int32, begins: cutlass.Constexpr) -> Memory:
    """Return the buffers of this warp. begins: offset of each buffer of the plan."""
    thread, _, _ = cute.arch.thread_idx()
    ring = smem + (thread // 32) * plan.ring_bytes
    queries, scores = smem + begins["queries"], smem + begins["scores"]
    if cutlass.const_expr(plan.slices > 1):
        queries += slice_of(plan) * (plan.query_bytes // plan.slices)
        scores += team_of(plan) * (plan.score_bytes * plan.slices)
    return Memory(ring, queries, scores)


@cute.jit
def add_slices(plan: PortablePlan, memory: Memory, step: Int32, scores: cute.Tensor) -> None:
    """Add the other slice's sums to `scores` (4, columns / 8, blocks) of a step of the share."""
    tiles, own = plan.config.columns // 8, slice_of(plan)
    stage = memory.scores + step % SCORE_STAGES * (plan.score_bytes // SCORE_STAGES * plan.slices)
    for block in cutlass.range_constexpr(plan.blocks):
        for tile in cutlass.range_constexpr(tiles):
            values = tuple(scores[k, tile, block] for k in range(4))
            store(_place(plan, stage, own, block * tiles + tile), Float32, values)
    meet(plan.barriers, "team", team_of(plan))
    for block in cutlass.range_constexpr(plan.blocks):
        for tile in cutlass.range_constexpr(tiles):
            others = load(_place(plan, stage, 1 - own, block * tiles + tile), Float32, 4)
            for k in cutlass.range_constexpr(4):
                scores[k, tile, block] += others[k]


@cute.jit
def exchanged(plan: PortablePlan, memory: Memory, words: cute.Tensor) -> cute.Tensor:
    """Return the words (columns / 8,) of this lane in the other warp of the team.

    Called once, before the first step: it uses the stage that step 0 does not use.
    """
    tiles, own = plan.config.columns // 8, slice_of(plan)
    stage = memory.scores + (SCORE_STAGES - 1) * (plan.score_bytes // SCORE_STAGES * plan.slices)
    for tile in cutlass.range_constexpr(tiles):
        store(_place(plan, stage, own, tile), Uint32, (words[tile],))
    meet(plan.barriers, "team", team_of(plan))
    found = cute.make_rmem_tensor(tiles, Uint32)
    for tile in cutlass.range_constexpr(tiles):
        found[tile] = load(_place(plan, stage, 1 - own, tile), Uint32)
    return found


@cute.jit
def _place(plan: PortablePlan, stage: Int32, part: Int32, vector: cutlass.Constexpr) -> Int32:
    """Return the address of this lane's vector in what a slice leaves."""
    line = stage + part * (plan.score_bytes // SCORE_STAGES)
    return line + (vector * 32 + cute.arch.lane_idx()) * VECTOR_BYTES
