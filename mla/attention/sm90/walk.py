"""Units of a CTA, fillings of its buffers, and rows of a thread (device code).

A unit is the work of a cluster, see `../shared/work.py`. If n clusters stay, each takes every n-th
unit.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.pipeline import PipelineState

from kernelkit.plan import hw
from mla.attention.kernel_arguments import KernelArguments
from mla.attention.shared.work import Work, locate, row_of
from mla.attention.sm90.args import Lane, Past, Scope
from mla.attention.sm90.plan import BUFFERS, Plan90


@cute.jit
def work_of(plan: Plan90, given: KernelArguments, step: Int32) -> Work:
    """Return the work of this CTA in its unit number `step`."""
    place, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(plan.config.ways.resident > 0):
        stride, _, _ = cute.arch.grid_dim()
        place = place + step * stride
    return locate(plan, given, place)


@cute.jit
def steps_of(plan: Plan90, given: KernelArguments) -> Int32:
    """Return the number of units of this CTA."""
    place, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    every = plan.tiles.count * given.q.shape[0]  # CTAs, if each had one unit
    return (every - place + stride - 1) // stride


@cute.jit
def unit_of(plan: Plan90, scope: Scope, step: Int32, past: Past) -> Scope:
    """Return the scope of this CTA's unit number `step`."""
    return replace(scope, work=work_of(plan, scope.given, step), past=past)


@cute.jit
def after(past: Past, count: Int32) -> Past:
    """Return what is past after a unit of `count` tiles, which begins with buffer 0."""
    fills = (past.fills[0] + (count + 1) // 2, past.fills[1] + count // 2)
    return Past(fills, past.units + Int32(count > 0))


@cute.jit
def filling_of(scope: Scope, number: Int32) -> Int32:
    """Return which filling of its buffer a tile of the unit is, counted from 0."""
    before = scope.past.fills[0] if number % BUFFERS == 0 else scope.past.fills[1]
    return before + number // BUFFERS


@cute.jit
def full_state(scope: Scope, number: Int32) -> PipelineState:
    """Return the state of a consumer that waits for tile `number` of the unit."""
    return PipelineState(BUFFERS, number, number % BUFFERS, filling_of(scope, number) % 2)


@cute.jit
def free_state(scope: Scope, number: Int32) -> PipelineState:
    """Return the state of a producer that fills a buffer with tile `number` of the unit."""
    return PipelineState(BUFFERS, number, number % BUFFERS, filling_of(scope, number) % 2 ^ 1)


@cute.jit
def lane_of(plan: Plan90, work: Work, team: cutlass.Constexpr) -> Lane:
    """Return this thread's position in the row tile."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % hw.WARPGROUP_WARPS
    first = warp * 16 + lane // 4
    low, high = row_of(plan, work, first), row_of(plan, work, first + 8)
    return Lane(team, warp, first, lane % 4 * 2, (low.real, high.real), (low.end, high.end))
