"""Load role: one warp fetches x, w and their scale factors by TMA, a stage of K at a time.

Each CTA of a pair fetches its half of the rows of both, and all scale factors of w. If weights are
older than the previous kernel, those of the first stages are fetched before it has ended. Lines of
K of x and w are swizzled; atoms of scale factors are copied unchanged.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float4E2M1FN, Int32, Uint8, Uint16
from cutlass.cute.nvgpu import cpasync

from kernelkit.device.boxes import (
    ROWS_FIRST,
    Box,
    BoxPosition,
    TmaTensor,
    copy_in,
    describe,
    reorder,
)
from kernelkit.device.pipelines import consumer_state, producer_state
from moe.config import WINDOW, WINDOW_STEP
from moe.formats import SCALE_ATOM_BYTES, SCALE_ROWS
from moe.sm100.args import Scope, Tile
from moe.sm100.plan import LINE, ROLES, TILE_STAGES, GroupedPlan
from moe.sm100.roles.scheduler import rank_in_tile, take_tile

ATOM_WORDS = SCALE_ATOM_BYTES // 2


@dataclass(frozen=True)
class PlainBox(Box):
    """Contiguous lines without a swizzle."""

    def layout(self) -> cute.Layout:
        """(rows, columns)."""
        return cute.make_layout((self.rows, self.columns), stride=(self.columns, 1))

    def at(self, buffer: cute.Pointer, index: Int32) -> cute.Tensor:
        """Box `index` of a buffer, (rows, columns)."""
        return cute.make_tensor(buffer + index * (self.rows * self.columns), self.layout())


def x_box(plan: GroupedPlan) -> Box:
    """A stage of x, in bytes."""
    return Box(plan.x_rows, LINE, Uint8)


def w_box(plan: GroupedPlan) -> Box:
    """A stage of w, in bytes."""
    return Box(plan.w_rows, LINE, Uint8)


def scale_box(plan: GroupedPlan) -> PlainBox:
    """Return the box of a group's atoms for 128 rows, in 16-bit words: a line has at most 256."""
    return PlainBox(plan.group * plan.atoms, ATOM_WORDS, Uint16)


@cute.jit
def describe_w(operation: object, tensor: cute.Tensor, plan: GroupedPlan) -> TmaTensor:
    """Describe w to TMA, as lines of bytes or as padded windows (`moe.config`)."""
    moved, box = reorder(tensor, ROWS_FIRST), w_box(plan)
    if cutlass.const_expr(not plan.pads_w):
        return describe(operation, moved, box)
    atom, coordinates = cpasync.make_tiled_tma_atom(
        operation,
        cute.recast_tensor(moved, Float4E2M1FN),
        box.layout(),
        (box.rows, box.columns),
        internal_type=Uint8,
    )
    return TmaTensor(atom, coordinates)


class Load:
    """Producer of the ring. Rows past the last one, and K past its end, arrive as zeros."""

    def __init__(self, plan: GroupedPlan) -> None:
        self.plan = plan
        self.role = ROLES["load"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        pipes, plan = scope.pipes, self.plan
        tiles, state = consumer_state(TILE_STAGES), producer_state(plan.stages)
        k_stages = -(-scope.sizes.k // plan.k_stage)
        going, waits, group = Int32(1), Int32(1), Int32(-1)
        while going > 0:
            tile = take_tile(scope, pipes.tile_load, tiles)
            tiles.advance()
            going = tile.valid
            if going > 0:
                begun = Int32(0)
                if cutlass.const_expr(plan.config.w_ready):
                    if waits > 0:
                        begun = self.begin(scope, tile, k_stages)
                        waits = Int32(0)
                for step in cutlass.range(k_stages, unroll=1):
                    group = group_of(plan, group, step)
                    if cutlass.const_expr(plan.config.w_ready):
                        if step >= begun:
                            pipes.ab.acquire_bytes(state, self.announced(step))
                            self.fetch_w(scope, tile, step, state.index, group)
                    else:
                        pipes.ab.acquire_bytes(state, self.announced(step))
                        self.fetch_w(scope, tile, step, state.index, group)
                    self.fetch_x(scope, tile, step, state.index, group)
                    state.advance()
        if cutlass.const_expr(plan.config.ctas == 2):
            for _ in cutlass.range(plan.stages, unroll=1):
                pipes.ab.wait_free(state)
                state.advance()

    @cute.jit
    def begin(self, scope: Scope, tile: Tile, k_stages: Int32) -> Int32:
        """Fetch w of the first stages, which are still unused, then wait for the previous kernel
        (PDL). Return the number of these stages."""
        count, group = cutlass.min(k_stages, self.plan.stages), Int32(-1)
        for step in cutlass.range(count, unroll=1):
            group = group_of(self.plan, group, step)
            scope.pipes.ab.signal_bytes(step, self.announced(step))
            self.fetch_w(scope, tile, step, step, group)
        cute.arch.griddepcontrol_wait()
        return count

    @cute.jit
    def announced(self, step: Int32) -> Int32:
        """Return the bytes to expect for a stage."""
        plan = self.plan
        scales = Int32(plan.group_bytes) if begins_group(plan, step) else Int32(0)
        return plan.moved_bytes + scales

    @cute.jit
    def fetch_x(self, scope: Scope, tile: Tile, step: Int32, stage: Int32, group: Int32) -> None:
        """Fetch rows of x of a stage, and the scale factors of a group of stages."""
        plan, operands, buffers = self.plan, scope.operands, scope.buffers
        barrier, rank = scope.pipes.ab.barrier(stage), rank_in_tile(plan)
        box = x_box(plan)
        place = BoxPosition(tile.first + rank * plan.x_rows, step * LINE, 0, 0)
        copy_in(operands.x, box, place, box.at(in_bytes(buffers.x), stage), barrier)
        if begins_group(plan, step):
            scales = scale_box(plan)
            first = BoxPosition(step * plan.atoms, 0, tile.block + rank, 0)
            copy_in(operands.x_scales, scales, first, scales.at(buffers.x_scales, group), barrier)

    @cute.jit
    def fetch_w(self, scope: Scope, tile: Tile, step: Int32, stage: Int32, group: Int32) -> None:
        """Fetch rows of w of a stage, and the scale factors of a group of stages."""
        plan, operands, buffers = self.plan, scope.operands, scope.buffers
        barrier, rank = scope.pipes.ab.barrier(stage), rank_in_tile(plan)
        n = tile.n * plan.config.tile_n
        box, column, window = w_box(plan), step * LINE, Int32(0)
        if cutlass.const_expr(plan.pads_w):  # the last window ends with the row
            column, steps = Int32(0), scope.sizes.k // WINDOW_STEP
            window = cutlass.min(step * (WINDOW // WINDOW_STEP), steps - WINDOW // WINDOW_STEP)
        place = BoxPosition(n + rank * plan.w_rows, column, window, tile.expert)
        copy_in(operands.w, box, place, box.at(in_bytes(buffers.w), stage), barrier)
        if begins_group(plan, step):
            scales = scale_box(plan)
            for block in cutlass.range_constexpr(plan.w_blocks):
                first = BoxPosition(step * plan.atoms, 0, n // SCALE_ROWS + block, tile.expert)
                target = scales.at(buffers.w_scales, group * plan.w_blocks + block)
                copy_in(operands.w_scales, scales, first, target, barrier)


def in_bytes(buffer: cute.Pointer) -> cute.Pointer:
    """Return `buffer` as bytes, the type that TMA uses."""
    return cute.recast_ptr(buffer, dtype=Uint8)


def begins_group(plan: GroupedPlan, step: Int32) -> Boolean:
    """Return whether this stage begins a group, for which scale factors are fetched."""
    return step % plan.group == 0


def group_of(plan: GroupedPlan, before: Int32, step: Int32) -> Int32:
    """Return the group of a stage in the ring of scale factors. before: the group of the previous
    stage, -1 at first."""
    return _place_of(before, begins_group(plan, step), plan.groups)


@cute.jit
def _place_of(before: Int32, begins: Boolean, places: cutlass.Constexpr[int]) -> Int32:
    further = before + 1 if before + 1 < places else Int32(0)
    return further if begins else before
