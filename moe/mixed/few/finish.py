"""Finish role: sums of classes to h, y and the layer's result (device code).

Warp m of the role has group m of every chunk. Lane 4 g + i has rows g and g + 8 of the group's 16
rows of weights, in the columns 2 i and 2 i + 1, which are rows of the item. The rows are gate and
up of a pair in the first product.

y is stored by slot, in fp32. The CTA that completes 64 columns of y, of all items, adds up every
token's slots in the order of its choices.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import load
from moe.mixed.few.args import Scope
from moe.mixed.few.barriers import h_ready, sums_free, sums_full
from moe.mixed.few.config import GROUP_ROWS, GROUPS, ITEM_ROWS
from moe.mixed.few.items import ROWS_SHIFT, groups_of, next_chunk, share_of
from moe.mixed.few.plan import BLOCK_COLUMNS, SUM_BYTES, FewPlan
from moe.shared.swiglu import gate_weight, weighted_up

VECTOR = 4  # columns of the result that a thread adds up at a time
ARRIVED, BLOCKS = range(2)  # first words of `counts`: of CTAs, of 64 columns each
MESSAGE = 1  # word of shared memory


@dataclass(frozen=True)
class Own:
    """A thread's factors and biases of its two rows of weights, and its two slots or -1."""

    factors: tuple[Float32, Float32]
    biases: tuple[Float32, Float32]
    slots: tuple[Int32, Int32]


class Finish:
    """Warps that add up sums and finish them."""

    def __init__(self, plan: FewPlan) -> None:
        self.plan = plan
        self.role = plan.roles["finish"]

    @cute.jit
    def run(self, scope: Scope, group: Int32) -> None:
        """Whole life of the warps. group: number of the warp in the role."""
        chunk, sizes = Int32(0), scope.sizes
        for phase in cutlass.range_constexpr(2):
            share = share_of(self.plan, phase, scope)
            at, item, tall, done = share.first, share.item, share.tall, Int32(0)
            while at < share.end:
                groups = groups_of(at, share.end)
                self.take(scope, phase, group, at & (GROUPS - 1), groups, item, tall, chunk)
                chunk += 1
                at = next_chunk(at)
                if cutlass.const_expr(phase == 0):
                    tall += 1
                    if tall == sizes.tall13:
                        tall = Int32(0)
                        item += 1
                else:
                    done += groups
                    item += 1
                    if (item == scope.items) | (at >= share.end):
                        self.complete(scope, tall, done)
                        done = Int32(0)
                    if item == scope.items:
                        item = Int32(0)
                        tall += 1
            if cutlass.const_expr(phase == 0):
                self.meet_all(scope)
        if cutlass.const_expr(self.plan.config.partial):
            self.clear(scope)

    # ---- rows of a chunk

    @cute.jit
    def take(
        self,
        scope: Scope,
        phase: cutlass.Constexpr[int],
        group: Int32,
        first: Int32,
        groups: Int32,
        item: Int32,
        tall: Int32,
        chunk: Int32,
    ) -> None:
        """Add up the sums of a chunk and store its part of h or y."""
        lane, has = cute.arch.lane_idx(), group < groups
        row = (tall * GROUPS + first + group) * GROUP_ROWS + lane // 4
        own = self.own_of(scope, phase, item, row, has)
        cute.arch.mbarrier_wait(sums_full(self.plan, scope), chunk % 2)
        sums = cute.make_rmem_tensor(4, Float32)
        sums.fill(0.0)
        if has:
            self.add(scope, phase, group, sums)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(sums_free(self.plan, scope))
        if has:
            if cutlass.const_expr(phase == 0):
                self.store_h(scope, own, (row - lane // 4) // 2 + lane // 4, sums)
            else:
                self.store_y(scope, own, row, sums)

    @cute.jit
    def own_of(
        self, scope: Scope, phase: cutlass.Constexpr[int], item: Int32, row: Int32, has: Boolean
    ) -> Own:
        """Read a thread's factors, biases and slots."""
        config, tensors = self.plan.config, scope.tensors
        word, lane = scope.buffers.items[item], cute.arch.lane_idx()
        expert, rows = word & (1 << ROWS_SHIFT) - 1, word >> ROWS_SHIFT
        if cutlass.const_expr(phase == 0 and config.pair_factor):
            factors = tensors.factor13[expert, 0], tensors.factor13[expert, 1]
        else:
            factor = (tensors.factor13 if phase == 0 else tensors.factor2)[expert]
            factors = factor, factor
        table = tensors.bias13 if phase == 0 else tensors.bias2
        biases = []
        for half in cutlass.range_constexpr(2):
            bias = Float32(0.0)
            if cutlass.const_expr(table is not None):
                if has & (row + 8 * half < cute.size(table, mode=[1])):
                    bias = table[expert, row + 8 * half]
            biases.append(bias)
        slots = []
        for column in cutlass.range_constexpr(2):
            number, slot = lane % 4 * 2 + column, Int32(-1)
            if number < rows:
                slot = scope.buffers.slots[item * ITEM_ROWS + number]
            slots.append(slot)
        return Own(factors, tuple(biases), tuple(slots))

    @cute.jit
    def add(
        self, scope: Scope, phase: cutlass.Constexpr[int], group: Int32, sums: cute.Tensor
    ) -> None:
        """Add up the sums of all classes in their order."""
        classes = min(self.plan.config.warps, self.plan.config.units(phase))
        place = scope.buffers.sums.toint() + group * SUM_BYTES + cute.arch.lane_idx() * 16
        found = [load(place + k * GROUPS * SUM_BYTES, Float32, 4) for k in range(classes)]
        for number in cutlass.range_constexpr(classes):
            for k in cutlass.range_constexpr(4):
                sums[k] += found[number][k]

    @cute.jit
    def store_h(self, scope: Scope, own: Own, column: Int32, sums: cute.Tensor) -> None:
        """Store SwiGLU of a pair of rows of weights, of two rows of the item."""
        config, numbers = self.plan.config, scope.numbers
        for place in cutlass.range_constexpr(2):
            gate = sums[place] * own.factors[0] + own.biases[0]
            up = sums[2 + place] * own.factors[1] + own.biases[1]
            value = weighted_up(config, numbers, up, gate_weight(config, numbers, gate))
            if (own.slots[place] >= 0) & (column < scope.sizes.inner):
                scope.tensors.h[own.slots[place], column] = value.to(BFloat16)

    @cute.jit
    def store_y(self, scope: Scope, own: Own, row: Int32, sums: cute.Tensor) -> None:
        """Store two columns of y of two rows of the item."""
        y = scope.tensors.y
        for half in cutlass.range_constexpr(2):
            column = row + 8 * half
            for place in cutlass.range_constexpr(2):
                value = sums[2 * half + place] * own.factors[half] + own.biases[half]
                if (own.slots[place] >= 0) & (column < cute.size(y, mode=[1])):
                    y[own.slots[place], column] = value

    # ---- all CTAs

    @cute.jit
    def meet_all(self, scope: Scope) -> None:
        """Tell that this CTA's part of h is stored; wait for those of all CTAs, and tell the warps
        that multiply."""
        meet(self.plan.barriers, "finish")
        if self.is_first():
            counts = scope.tensors.counts.iterator + ARRIVED
            cute.arch.atomic_add(counts, Int32(1), sem="release", scope="gpu")
            ctas, _, _ = cute.arch.grid_dim()
            wait_for(counts.toint(), ctas)
            cute.arch.mbarrier_arrive(h_ready(self.plan, scope))

    @cute.jit
    def is_first(self) -> Boolean:
        """Whether this is the role's first thread."""
        thread, _, _ = cute.arch.thread_idx()
        return thread == self.plan.roles["math"].threads

    @cute.jit
    def complete(self, scope: Scope, block: Int32, done: Int32) -> None:
        """Count `done` groups of 64 columns of y. If these are the last ones of the layer, add up
        every token's slots."""
        thread, _, _ = cute.arch.thread_idx()
        tensors, words = scope.tensors, scope.buffers.words
        meet(self.plan.barriers, "finish")
        if self.is_first():
            count = tensors.counts.iterator + BLOCKS + block
            before = cute.arch.atomic_add(count, done, sem="acq_rel", scope="gpu")
            words[MESSAGE] = before + done
        meet(self.plan.barriers, "finish")
        if words[MESSAGE] == scope.items * GROUPS:
            own = thread - self.plan.roles["math"].threads
            vectors = BLOCK_COLUMNS // VECTOR
            column = block * BLOCK_COLUMNS + own % vectors * VECTOR
            tokens, hidden = tensors.out.shape
            if column < hidden:
                step = self.role.threads // vectors
                for token in cutlass.range(own // vectors, tokens, step, unroll=1):
                    self.sum_slots(scope, token, column)

    @cute.jit
    def sum_slots(self, scope: Scope, token: Int32, column: Int32) -> None:
        """Add up four columns of a token's rows of y, in the order of its choices."""
        config, tensors, sizes = self.plan.config, scope.tensors, scope.sizes
        rows, shares = [], []
        for choice in cutlass.range_constexpr(config.slots):
            slot = token * config.slots + choice
            row, share = cute.make_rmem_tensor(VECTOR, Float32), tensors.weights[slot]
            source = cute.local_tile(tensors.y[slot, None], (VECTOR,), (column // VECTOR,))
            if cutlass.const_expr(config.partial):
                row.fill(0.0)
                expert = tensors.ids[slot] - sizes.first_expert
                if (expert >= 0) & (expert < sizes.experts):
                    cute.autovec_copy(source, row)
                else:
                    share = Float32(0.0)
            else:
                cute.autovec_copy(source, row)
            rows.append(row)
            shares.append(share)
        total = cute.make_rmem_tensor(VECTOR, Float32)
        total.fill(0.0)
        for choice in cutlass.range_constexpr(config.slots):
            for k in cutlass.range_constexpr(VECTOR):
                # Explicit, so that every architecture rounds alike.
                total[k] = cute.math.fma(rows[choice][k], shares[choice], total[k])
        result = cute.make_rmem_tensor(VECTOR, BFloat16)
        result.store(total.load().to(BFloat16))
        target = cute.local_tile(tensors.out[token, None], (VECTOR,), (column // VECTOR,))
        cute.autovec_copy(result, target)

    @cute.jit
    def clear(self, scope: Scope) -> None:
        """Store zeros if no token has an expert here: there are no columns to complete."""
        if scope.items == 0:
            cta, _, _ = cute.arch.block_idx()
            ctas, _, _ = cute.arch.grid_dim()
            thread, _, _ = cute.arch.thread_idx()
            own = thread - self.plan.roles["math"].threads
            tokens, hidden = scope.tensors.out.shape
            first, step = cta * self.role.threads + own, ctas * self.role.threads
            for place in cutlass.range(first, tokens * hidden, step, unroll=1):
                scope.tensors.out[place // hidden, place % hidden] = BFloat16(0.0)


@cute.jit
def wait_for(address: Int64, wanted: Int32) -> None:
    """Wait until a counter in global memory has reached a value, with an acquire."""
    cute.arch.inline_ptx(
        "{ .reg .pred more; .reg .b32 count; "
        "AGAIN: ld.acquire.gpu.global.b32 count, [{$r0}]; setp.lt.s32 more, count, {$r1}; "
        "@more bra AGAIN; }",
        read_only_args=[address, wanted],
    )
