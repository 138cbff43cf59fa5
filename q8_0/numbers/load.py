"""Producers of the product of numbers (device code).

load  x, 64 columns of all tokens of a tile: lines of 128 bytes, swizzled by TMA
      w, of 'soa' 128 columns of all rows, lines swizzled by TMA; of 'interleaved' 256 columns,
      272 bytes a row, by a bulk copy for each row
copy  what TMA cannot fetch: scales of 'soa', four of a row; blocks of 'interleaved' where rows
      do not begin at multiples of 16 bytes
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32
from cutlass.pipeline import PipelineState

from kernelkit.device import shared_words
from kernelkit.device.boxes import BoxPosition, copy_in, partition
from kernelkit.device.pipelines import PAIR_MASK, producer_state
from kernelkit.plan import hw
from q8_0.blocks import BLOCK, SCALE_BYTES
from q8_0.numbers.config import (
    STEP_BLOCKS,
    STEP_UNITS,
    TILE_ROWS,
    UNIT,
)
from q8_0.numbers.plan import NumbersPlan
from q8_0.numbers.scope import Item, Scope, half_if, item_of, store_half, w_box, x_box


class Load:
    """One warp that fetches tokens and weights."""

    def __init__(self, plan: NumbersPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, pipes = self.plan, scope.pipes
        tokens, weights = plan.stages
        x_state, w_state = producer_state(tokens), producer_state(weights)
        for number in cutlass.range(scope.cluster, scope.items, scope.clusters, unroll=1):
            item = item_of(plan, scope, number)
            for stage in cutlass.range(scope.share.stages, unroll=1):
                if cutlass.const_expr(plan.edges.has("w")):
                    pipes.w.acquire(w_state)
                    self.fetch_weights(scope, item, stage, w_state)
                    w_state.advance()
                most = plan.config.stage_steps
                steps = cutlass.min(scope.share.steps - stage * most, most)
                for unit in cutlass.range(steps * STEP_UNITS, unroll=1):
                    pipes.x.acquire(x_state)
                    self.fetch_tokens(scope, item, stage, unit, x_state)
                    x_state.advance()

    @cute.jit
    def fetch_tokens(
        self, scope: Scope, item: Item, stage: Int32, unit: Int32, state: PipelineState
    ) -> None:
        """Fetch the tokens of a unit of K, or in a pair one half of them for both CTAs."""
        plan, box = self.plan, x_box(self.plan)
        column = (scope.share.first + stage) * plan.config.stage_k + unit * UNIT
        barrier = scope.pipes.x.barrier(state.index)
        if cutlass.const_expr(plan.config.pair):
            row = item.token + scope.member * box.rows
            target = box.at(scope.x_buffer, state.index * 2 + scope.member)
            position = BoxPosition(row, column, 0, 0)
            to_shared, from_global = partition(scope.x, box, position, target)
            mask = Uint16(PAIR_MASK << 2 * scope.share.rank)
            cute.copy(scope.x.atom, from_global, to_shared, tma_bar_ptr=barrier, mcast_mask=mask)
        else:
            target = box.at(scope.x_buffer, state.index)
            copy_in(scope.x, box, BoxPosition(item.token, column, 0, 0), target, barrier)

    @cute.jit
    def fetch_weights(self, scope: Scope, item: Item, stage: Int32, state: PipelineState) -> None:
        """Fetch the rows of a stage of weights. Rows past the last one are zeros."""
        box, first = w_box(self.plan), scope.share.first + stage
        position = BoxPosition(item.row, first * box.columns, 0, 0)
        barrier = scope.pipes.w.barrier(state.index)
        copy_in(scope.w, box, position, box.at(scope.w_buffer, state.index), barrier)


# ---- What threads copy


class Copy:
    """Warps that copy scales or blocks of a stage through registers."""

    def __init__(self, plan: NumbersPlan) -> None:
        self.plan = plan
        self.role = plan.roles["copy"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, ring = self.plan, scope.pipes.copied
        state = producer_state(plan.stages[1])
        for number in cutlass.range(scope.cluster, scope.items, scope.clusters, unroll=1):
            item = item_of(plan, scope, number)
            for stage in cutlass.range(scope.share.stages, unroll=1):
                if cutlass.const_expr(plan.config.words):
                    ring.wait_free(state)
                    if cutlass.const_expr(plan.config.interleaved):
                        self.copy_words(scope, item, stage, state)
                    else:
                        self.copy_scales(scope, item, stage, state)
                    signal_copies(ring.barrier(state.index))
                elif cutlass.const_expr(plan.config.interleaved):
                    ring.wait_free(state)
                    self.copy_blocks(scope, item, stage, state)
                    ring.signal(state.index)
                else:
                    scales = self.load_scales(scope, item, stage)
                    ring.wait_free(state)
                    self.store_scales(scope, scales, state)
                    ring.signal(state.index)
                state.advance()

    def thread(self) -> Int32:
        """Number of the calling thread in the role."""
        return cute.arch.thread_idx()[0] - self.role.first_warp * hw.WARP_THREADS

    @cute.jit
    def source_of(self, scope: Scope, item: Item, row: Int32) -> Int64:
        """Return the address of a row, or of the last one past the end."""
        params = scope.params
        own = cutlass.min(item.row + row, Int32(params.rows) - 1)
        return params.source + Int64(own) * params.source_stride

    @cute.jit
    def copy_scales(self, scope: Scope, item: Item, stage: Int32, state: PipelineState) -> None:
        """Start to copy the scales of a stage, zeros after the end of K. The copies signal the
        stage when they are complete: this role does not wait for memory."""
        first = (scope.share.first + stage) * STEP_BLOCKS
        place = scope.scales + state.index * self.plan.scales_bytes
        for begin in cutlass.range_constexpr(0, TILE_ROWS, self.role.threads):
            row = begin + self.thread()
            source = self.source_of(scope, item, row) + Int64(first) * SCALE_BYTES
            target = place + row * self.plan.config.row_bytes
            for block in cutlass.range_constexpr(0, STEP_BLOCKS, 2):
                valid = Int32(4) if first + block < Int32(scope.params.blocks) else Int32(0)
                offset = block * SCALE_BYTES
                copy_word(scope, target + offset, source + offset, valid)

    @cute.jit
    def copy_words(self, scope: Scope, item: Item, stage: Int32, state: PipelineState) -> None:
        """Start to copy blocks of a stage four bytes at a time, as `copy_scales` does, a row by a
        warp."""
        place = scope.w_buffer.toint() + state.index * self.plan.w_bytes
        row_bytes = self.plan.config.row_bytes
        begin = (scope.share.first + stage) * row_bytes
        size = Int32(scope.params.blocks) * (BLOCK + SCALE_BYTES) - begin
        lane, warp = cute.arch.lane_idx(), self.thread() // hw.WARP_THREADS
        for turn in cutlass.range(TILE_ROWS // self.role.warps, unroll=1):
            row = warp + turn * self.role.warps
            source = self.source_of(scope, item, row) + Int64(begin)
            for first in cutlass.range_constexpr(0, row_bytes, 4 * hw.WARP_THREADS):
                byte = first + 4 * lane
                valid = cutlass.max(cutlass.min(size - byte, 4), 0)
                if byte < row_bytes:
                    target = place + row * row_bytes + byte
                    copy_word(scope, target, source + Int64(byte), valid)

    @cute.jit
    def load_scales(self, scope: Scope, item: Item, stage: Int32) -> list[Uint32]:
        """Load the scales of a stage of the thread's rows, zeros after the end of K."""
        found = []
        first = (scope.share.first + stage) * STEP_BLOCKS
        for begin in cutlass.range_constexpr(0, TILE_ROWS, self.role.threads):
            source = self.source_of(scope, item, begin + self.thread())
            source = source + Int64(first) * SCALE_BYTES
            for word in cutlass.range_constexpr(STEP_BLOCKS // 2):
                halves = []
                for half in cutlass.range_constexpr(2):
                    block = 2 * word + half
                    exists = first + block < Int32(scope.params.blocks)
                    halves.append(Uint32(half_if(exists, source + block * SCALE_BYTES)))
                found.append(halves[0] | halves[1] << 16)
        return found

    @cute.jit
    def store_scales(self, scope: Scope, scales: list[Uint32], state: PipelineState) -> None:
        """Store what `load_scales` loaded."""
        place = scope.scales + state.index * self.plan.scales_bytes
        words, size = STEP_BLOCKS // 2, self.plan.config.row_bytes
        for number in cutlass.range_constexpr(len(scales) // words):
            row = self.thread() + number * self.role.threads
            own = tuple(scales[number * words : (number + 1) * words])
            shared_words.store(place + row * size, Uint32, own)

    @cute.jit
    def copy_blocks(self, scope: Scope, item: Item, stage: Int32, state: PipelineState) -> None:
        """Copy blocks of a stage two bytes at a time, a row by a warp, zeros after the end of K."""
        place = scope.w_buffer.toint() + state.index * self.plan.w_bytes
        row_bytes = self.plan.config.row_bytes
        begin = Int64(scope.share.first + stage) * row_bytes
        size = Int64(scope.params.blocks) * (BLOCK + SCALE_BYTES) - begin
        lane, warp = cute.arch.lane_idx(), self.thread() // hw.WARP_THREADS
        for turn in cutlass.range(TILE_ROWS // self.role.warps, unroll=1):
            row = warp + turn * self.role.warps
            source = self.source_of(scope, item, row) + begin
            halves: list[Uint16] = []
            for first in cutlass.range_constexpr(0, row_bytes, 2 * hw.WARP_THREADS):
                byte = first + 2 * lane
                halves.append(half_if(Int64(byte) < size, source + Int64(byte)))
            for number, half in enumerate(halves):
                byte = number * 2 * hw.WARP_THREADS + 2 * lane
                if byte < row_bytes:
                    store_half(place + row * row_bytes + byte, half)


@cute.jit
def copy_word(scope: Scope, target: Int32, source: Int64, valid: Int32) -> None:
    """Start to copy four bytes to shared memory, zeros behind the first `valid` ones."""
    # An address that exists, also where nothing is copied.
    own = source if valid > 0 else Int64(scope.params.source)
    cute.arch.inline_ptx(
        "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};",
        read_only_args=[target, own, valid],
    )


@cute.jit
def signal_copies(barrier: cute.Pointer) -> None:
    """Arrive at an mbarrier once all copies that this thread has started are complete."""
    cute.arch.inline_ptx(
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];",
        read_only_args=[Int32(barrier.toint())],
    )
