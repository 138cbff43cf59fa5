"""The two roles that fill the ring: with weights, and with rows of x and of h (device code).

Both go through the rounds of all chunks of both products. Weights of whole 64 rows are one bulk
copy a round. Of fewer rows, which smaller granules have, and of tokens, every lane copies 16 bytes
at a time: small bulk copies take as long as large ones.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from kernelkit.device.warp_mma import CHUNK_BYTES
from kernelkit.device.words import request_if
from kernelkit.plan.hw import L2_LINE_BYTES, WARP_THREADS
from moe.mixed.few.args import Scope
from moe.mixed.few.barriers import following, h_ready, rows_full, stage_free, weights_full
from moe.mixed.few.config import GROUPS, ITEM_ROWS
from moe.mixed.few.items import ROWS_SHIFT, chunk_behind, groups_of, next_chunk, share_of
from moe.mixed.few.plan import FewPlan
from moe.mixed.fragments import DEPTH, ELEMENT_BYTES
from moe.mixed.shared.load import copy_bytes

ROW_LANES = WARP_THREADS // ITEM_ROWS  # lanes that copy one of several rows
UNIT_CHUNKS = DEPTH * 2 // CHUNK_BYTES  # of a row in a unit of K


@dataclass(frozen=True)
class Part:
    """A lane's part of the rows of an item: every 16 bytes of one row that it copies."""

    row: Int64  # address of the row
    number: Int32  # of the row in the item
    chunk: Int32  # index of the lane's first 16 bytes
    is_there: Boolean  # whether there is such a row
    alone: Boolean  # whether it is the only one


class Weights:
    """Fills the ring with weights, as far ahead as there is room."""

    def __init__(self, plan: FewPlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, stage, parity = self.plan, Int32(0), Int32(1)
        for phase in cutlass.range_constexpr(2):
            share, units = share_of(plan, phase, scope), plan.config.units(phase)
            at, item, tall = share.first, share.item, share.tall
            while at < share.end:
                groups, first = groups_of(at, share.end), at & (GROUPS - 1)
                source = self.source_of(scope, phase, item, tall)
                for turn in cutlass.range(plan.rounds(phase), unroll=1):
                    cute.arch.mbarrier_wait(stage_free(plan, scope, stage), parity)
                    count = cutlass.min(plan.config.warps, units - turn * plan.config.warps)
                    place = source + turn * plan.w_bytes
                    self.fetch(scope, place, stage, first, groups, count)
                    stage, parity = following(stage, parity, plan.config.stages)
                at = next_chunk(at)
                item, tall = chunk_behind(phase, item, tall, scope.items, scope.sizes)

    @cute.jit
    def source_of(
        self, scope: Scope, phase: cutlass.Constexpr[int], item: Int32, tall: Int32
    ) -> Int64:
        """Return the address of 64 rows of an item's weights."""
        expert = scope.buffers.items[item] & (1 << ROWS_SHIFT) - 1
        weights = scope.tensors.w13 if phase == 0 else scope.tensors.w2
        size = self.plan.config.units(phase) * self.plan.unit_bytes
        return weights[expert, None].iterator.toint() + Int64(tall) * size

    @cute.jit
    def fetch(
        self, scope: Scope, source: Int64, stage: Int32, first: Int32, groups: Int32, count: Int32
    ) -> None:
        """Begin to copy `groups` groups of `count` units to a stage."""
        plan, barrier = self.plan, weights_full(self.plan, scope, stage)
        target = scope.buffers.ring.toint() + stage * plan.w_bytes
        if cutlass.const_expr(plan.config.granule == GROUPS):
            self.copy_whole(source, target, count, barrier)
        elif groups == GROUPS:
            self.copy_whole(source, target, count, barrier)
        else:
            source += first * plan.group_bytes
            behind = ELEMENT_BYTES - first * (plan.group_bytes - plan.scale_bytes)
            for number in cutlass.range_constexpr(plan.config.warps):
                own = groups if number < count else Int32(0)
                place = number * plan.unit_bytes
                self.copy_groups(source + place, target + place, behind, own)
            cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    @cute.jit
    def copy_whole(self, source: Int64, target: Int32, count: Int32, barrier: cute.Pointer) -> None:
        """Begin to copy `count` whole units. One thread makes all arrivals: those of cp.async may
        overtake the announcement of bytes."""
        plan, size = self.plan, count * self.plan.unit_bytes
        with cute.arch.elect_one():
            if cutlass.const_expr(plan.weight_arrivals > 1):
                # Before, cp.async may have filled the stage in the generic proxy.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.mbarrier_arrive(barrier, arrive_count=plan.weight_arrivals - 1)
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
            copy_bytes(source, target, size, barrier)

    @cute.jit
    def copy_groups(self, source: Int64, target: Int32, behind: Int32, groups: Int32) -> None:
        """Begin to copy some groups of a unit: their elements at `source`, and their scale factors
        so many bytes behind."""
        plan, own = self.plan, cute.arch.lane_idx() * CHUNK_BYTES
        for group in cutlass.range_constexpr(GROUPS - plan.config.granule):
            place = group * plan.group_bytes + own
            copy_chunk_if(group < groups, target + place, source + place)
        has_scales = own < groups * plan.scale_bytes
        copy_chunk_if(has_scales, target + ELEMENT_BYTES + own, source + behind + own)


class Rows:
    """Fills the ring with the rows of items: of x, and of h once all CTAs have stored it."""

    def __init__(self, plan: FewPlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        plan, stage, parity = self.plan, Int32(0), Int32(1)
        for phase in cutlass.range_constexpr(2):
            if cutlass.const_expr(phase == 1):
                cute.arch.mbarrier_wait(h_ready(plan, scope), 0)
            share = share_of(plan, phase, scope)
            at, item, tall = share.first, share.item, share.tall
            while at < share.end:
                part = self.part_of(scope, phase, item)
                for turn in cutlass.range(plan.rounds(phase), unroll=1):
                    cute.arch.mbarrier_wait(stage_free(plan, scope, stage), parity)
                    self.fetch(scope, phase, part, turn, stage)
                    stage, parity = following(stage, parity, plan.config.stages)
                at = next_chunk(at)
                item, tall = chunk_behind(phase, item, tall, scope.items, scope.sizes)

    @cute.jit
    def part_of(self, scope: Scope, phase: cutlass.Constexpr[int], item: Int32) -> Part:
        """Return a lane's part of the rows of an item. All lanes copy a single row; of several rows
        four lanes copy each."""
        lane, rows = cute.arch.lane_idx(), scope.buffers.items[item] >> ROWS_SHIFT
        alone, slot = rows == 1, Int32(0)
        number = Int32(0) if alone else lane // ROW_LANES
        chunk = lane if alone else lane % ROW_LANES
        if number < rows:
            slot = scope.buffers.slots[item * ITEM_ROWS + number]
        if cutlass.const_expr(phase == 0):
            row = scope.tensors.x[slot // self.plan.config.slots, None]
        else:
            row = scope.tensors.h[slot, None]
        return Part(row.iterator.toint(), number, chunk, number < rows, alone)

    @cute.jit
    def fetch(
        self, scope: Scope, phase: cutlass.Constexpr[int], part: Part, turn: Int32, stage: Int32
    ) -> None:
        """Begin to copy the rows of an item to a stage: as much of K as a round has."""
        plan = self.plan
        target = scope.buffers.rows.toint() + stage * plan.row_bytes
        target += part.number * plan.row_stride
        if part.alone:
            self.copy_chunks(phase, part, turn, target, WARP_THREADS)
        else:
            self.copy_chunks(phase, part, turn, target, ROW_LANES)
        cute.arch.cp_async_mbarrier_arrive_noinc(rows_full(plan, scope, stage))

    @cute.jit
    def copy_chunks(
        self,
        phase: cutlass.Constexpr[int],
        part: Part,
        turn: Int32,
        target: Int32,
        lanes: cutlass.Constexpr[int],
    ) -> None:
        """Begin to copy a row to `target`, with so many lanes."""
        chunks = self.plan.config.warps * UNIT_CHUNKS  # of a row in a round
        every = self.plan.config.k(phase) * 2 // CHUNK_BYTES
        left = every - turn * chunks - part.chunk
        source = part.row + (turn * chunks + part.chunk) * CHUNK_BYTES
        target += part.chunk * CHUNK_BYTES
        for step in cutlass.range_constexpr(0, chunks, lanes):
            exists = part.is_there
            if cutlass.const_expr(every % chunks):
                exists = exists & (step < left)
            if cutlass.const_expr(step + lanes > chunks):
                exists = exists & (step + part.chunk < chunks)
            copy_chunk_if(exists, target + step * CHUNK_BYTES, source + step * CHUNK_BYTES)


@cute.jit
def request_tokens(plan: cutlass.Constexpr[FewPlan], x: cute.Tensor) -> None:
    """Request tokens to L2 before the weights, whose requests would delay theirs. Every thread of
    the grid has a line."""
    cta, _, _ = cute.arch.block_idx()
    thread, _, _ = cute.arch.thread_idx()
    lines, number = -(-plan.config.k13 * 2 // L2_LINE_BYTES), cta * plan.roles.threads + thread
    tokens = cute.size(x, mode=[0])
    row = x[cutlass.min(number // lines, tokens - 1), None].iterator.toint()
    request_if(number < tokens * lines, row + number % lines * L2_LINE_BYTES)


@cute.jit
def copy_chunk_if(is_there: Boolean, target: Int32, source: Int64) -> None:
    """Start to copy 16 bytes of global memory to shared memory if they are there. A predicate
    instead of a branch."""
    cute.arch.inline_ptx(
        "{ .reg .pred there; setp.ne.s32 there, {$r0}, 0; "
        "@there cp.async.cg.shared.global [{$r1}], [{$r2}], 16; }",
        read_only_args=[Int32(is_there), target, source],
    )
