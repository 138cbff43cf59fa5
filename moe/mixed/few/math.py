"""Math role: each warp converts a unit of weights in a round and multiplies it (device code).

Warp w has the units w, w + warps, ... of K of every chunk. So its sums are the same wherever the
chunk is computed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device.shared_words import load
from kernelkit.device.shared_words import store as store_words
from kernelkit.device.warp_mma import CHUNK_BYTES, load_fragment, multiply, pick
from moe.mixed.few.args import Scope
from moe.mixed.few.barriers import (
    following,
    rows_full,
    stage_free,
    sums_free,
    sums_full,
    weights_full,
)
from moe.mixed.few.config import GROUPS, ITEM_ROWS
from moe.mixed.few.items import ROWS_SHIFT, chunk_behind, groups_of, next_chunk, share_of
from moe.mixed.few.plan import SUM_BYTES, FewPlan
from moe.mixed.fragments import DEPTH, ELEMENT_BYTES, WORDS
from moe.mixed.shared.dequantise import dequantise, factors_of

SPREAD = 0x4140  # prmt selector: the first two bytes, each in the lower byte of a half


class Math:
    """Warps that multiply."""

    def __init__(self, plan: FewPlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, scope: Scope, warp: Int32) -> None:
        """Whole life of a warp."""
        plan, stage, parity, chunk = self.plan, Int32(0), Int32(0), Int32(0)
        sums = cute.make_rmem_tensor(cute.make_layout((GROUPS, 4), stride=(4, 1)), Float32)
        for phase in cutlass.range_constexpr(2):
            share, units = share_of(plan, phase, scope), plan.config.units(phase)
            at, item, tall = share.first, share.item, share.tall
            while at < share.end:
                groups, place = groups_of(at, share.end), self.place_of(scope, warp, item)
                sums.fill(0.0)
                ring = self.multiply(
                    scope, phase, warp, groups, GROUPS, place, sums, (stage, parity)
                )
                stage, parity = ring
                if warp < units:
                    self.leave(scope, warp, groups, chunk, sums)
                else:
                    self.leave(scope, warp, Int32(0), chunk, sums)
                chunk += 1
                at = next_chunk(at)
                item, tall = chunk_behind(phase, item, tall, scope.items, scope.sizes)

    @cute.jit
    def multiply(
        self,
        scope: Scope,
        phase: cutlass.Constexpr[int],
        warp: Int32,
        groups: Int32,
        most: cutlass.Constexpr[int],
        place: Int32,
        sums: cute.Tensor,
        ring: tuple[Int32, Int32],
    ) -> tuple[Int32, Int32]:
        """Multiply the warp's units of a chunk of at most `most` groups; return (stage, parity).

        Each number of groups has a loop of its own: the compiler would turn branches within a loop
        into predicates, and execute all groups.
        """
        least = self.plan.config.granule
        if cutlass.const_expr(most == least):
            return self.multiply_groups(scope, phase, warp, most, place, sums, ring)
        if groups == most:
            ring = self.multiply_groups(scope, phase, warp, most, place, sums, ring)
        else:
            ring = self.multiply(scope, phase, warp, groups, most - least, place, sums, ring)
        return ring

    @cute.jit
    def multiply_groups(
        self,
        scope: Scope,
        phase: cutlass.Constexpr[int],
        warp: Int32,
        groups: cutlass.Constexpr[int],
        place: Int32,
        sums: cute.Tensor,
        ring: tuple[Int32, Int32],
    ) -> tuple[Int32, Int32]:
        """Multiply the warp's units of a chunk of so many groups; return (stage, parity)."""
        plan = self.plan
        stage, parity = ring
        warps, units = plan.config.warps, plan.config.units(phase)
        for turn in cutlass.range(plan.rounds(phase), unroll=1):
            cute.arch.mbarrier_wait(weights_full(plan, scope, stage), parity)
            cute.arch.mbarrier_wait(rows_full(plan, scope, stage), parity)
            unit = turn * warps + warp
            if cutlass.const_expr(units % warps == 0):
                self.multiply_unit(scope, warp, unit, phase, stage, groups, place, sums)
            elif unit < units:
                self.multiply_unit(scope, warp, unit, phase, stage, groups, place, sums)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(stage_free(plan, scope, stage))
            stage, parity = following(stage, parity, plan.config.stages)
        return stage, parity

    @cute.jit
    def place_of(self, scope: Scope, warp: Int32, item: Int32) -> Int32:
        """Return the shared address of a lane's row of an item in the first stage, at the warp's
        unit. Without such a row it is the first one: nobody stores these sums."""
        lane = cute.arch.lane_idx()
        number = lane % ITEM_ROWS
        if number >= scope.buffers.items[item] >> ROWS_SHIFT:
            number = Int32(0)
        place = scope.buffers.rows.toint() + number * self.plan.row_stride
        return place + warp * (2 * DEPTH) + lane // ITEM_ROWS * CHUNK_BYTES

    @cute.jit
    def load_rows(
        self, phase: cutlass.Constexpr[int], place: Int32, unit: Int32
    ) -> tuple[Uint32, ...]:
        """Load the B operands of the four products of a unit: two words each."""
        first = load_fragment(place, False)
        k = self.plan.config.k(phase)
        if cutlass.const_expr(k % DEPTH == 0):
            return *first, *load_fragment(place + DEPTH, False)
        second = (Uint32(0), Uint32(0), Uint32(0), Uint32(0))
        if unit * DEPTH + DEPTH // 2 < k:  # else the last unit has one block of 32 elements
            second = load_fragment(place + DEPTH, False)
        return *first, *second

    @cute.jit
    def multiply_unit(
        self,
        scope: Scope,
        warp: Int32,
        unit: Int32,
        phase: cutlass.Constexpr[int],
        stage: Int32,
        groups: cutlass.Constexpr[int],
        place: Int32,
        sums: cute.Tensor,
    ) -> None:
        """Multiply a unit of a stage."""
        plan = self.plan
        rows = self.load_rows(phase, place + stage * plan.row_bytes, unit)
        start = stage * plan.w_bytes + warp * plan.unit_bytes
        start += scope.buffers.ring.toint()
        for group in cutlass.range_constexpr(groups):
            self.multiply_group(start, group, rows, sums)

    @cute.jit
    def multiply_group(
        self,
        start: Int32,
        group: cutlass.Constexpr[int],
        rows: tuple[Uint32, ...],
        sums: cute.Tensor,
    ) -> None:
        """Multiply sixteen rows of weights of a unit, which are at the shared address `start`."""
        plan, lane = self.plan, cute.arch.lane_idx()
        words = load(start + group * plan.group_bytes + lane * (4 * WORDS), Uint32, WORDS)
        pair = plan.scale_bytes // 8  # scale factors of two rows
        scales = start + (ELEMENT_BYTES + group * plan.scale_bytes) + lane // 4 * pair
        weights = cute.make_rmem_tensor(4 * WORDS, Uint32)
        dequantise(words, self.factors(scales), weights)
        for step in cutlass.range_constexpr(WORDS):
            own = tuple(weights[4 * step + k] for k in range(4))
            multiply(sums[group, None], own, (rows[2 * step], rows[2 * step + 1]), "bf16")

    @cute.jit
    def factors(self, address: Int32) -> tuple[tuple[Uint32, ...], ...]:
        """Return `factors_of` the scale factors at a shared address. Those of ue8m0 take half of
        the instructions: HMUL2 reads one half of a register twice."""
        config = self.plan.config
        if cutlass.const_expr(config.format.scale != "ue8m0"):
            return factors_of(config, address)
        word, rows = load(address, Uint32), []
        for row in cutlass.range_constexpr(2):
            selector = SPREAD + 0x0202 * row
            first, second = halves_twice(pick(word, Uint32(0), Int32(selector)) << Uint32(7))
            rows.append((first, first, second, second))
        return tuple(rows)

    @cute.jit
    def leave(
        self, scope: Scope, warp: Int32, groups: Int32, chunk: Int32, sums: cute.Tensor
    ) -> None:
        """Leave the warp's sums in shared memory."""
        cute.arch.mbarrier_wait(sums_free(self.plan, scope), chunk & 1 ^ 1)
        place = scope.buffers.sums.toint() + warp * (GROUPS * SUM_BYTES)
        place += cute.arch.lane_idx() * CHUNK_BYTES
        for group in cutlass.range_constexpr(GROUPS):
            if group < groups:
                values = tuple(sums[group, k] for k in range(4))
                store_words(place + group * SUM_BYTES, Float32, values)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(sums_full(self.plan, scope))


@cute.jit
def halves_twice(word: Uint32) -> tuple[Uint32, Uint32]:
    """Return both halves of a word, each of them twice in a word."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; mov.b32 {$w0}, {a, a}; mov.b32 {$w1}, {b, b}; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )
