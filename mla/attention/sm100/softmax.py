"""Softmax role: four warps, half a query row a thread (device code).

For each tile: read half a row of S, find the row's maximum, weigh, and once O is at rest rescale it
and store P. A maximum is replaced only when it has grown by more than LAG_LOG2, since O must then
be rescaled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device import tmem
from kernelkit.device.online_softmax import (
    add,
    exp2,
    finite,
    keep_columns,
    multiply,
    row_total,
    top_score,
)
from kernelkit.device.pipelines import consumer_state_at
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import pack
from mla.attention.shared.collect import key_scale, position_of, sink_of
from mla.attention.shared.intake import LINE_BYTES, PANEL_BYTES
from mla.attention.sm100.args import Lane, Scope, Sums
from mla.attention.sm100.finish import finish
from mla.attention.sm100.plan import KEYS, OWN_KEYS, S_STAGES, Plan100
from mla.attention.sm100.rows import of_other_half
from mla.attention.sm100.walk import lane_of

LAG_LOG2 = 8.0
EVERY_BIT = 0xFFFFFFFF
CHUNK = 32  # columns of tensor memory that a thread has in registers at a time
UNIT = 16  # bytes of a store to shared memory
END = 2  # slots of `of_other_half` for the end


class Softmax:
    """Role that computes P, and finishes O."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = plan.roles["softmax"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warps."""
        plan, count = self.plan, scope.work.count
        lane = lane_of(plan, scope.work)
        top, total = -Float32.inf, Float32(0.0)
        # Loads that would be late at the end.
        sink = sink_of(plan.config, scope.given, lane.head)
        position = position_of(plan.config, scope.given, scope.work.entry)
        for number in cutlass.range(count, unroll=1):
            top, total = self.weigh(scope, lane, number, top, total)
        if count > 0:
            total += of_other_half(plan, scope, lane, total, END)
            scope.pipes.o.wait(consumer_state_at(1, count - 1))
            tmem.order_after_wait()
        finish(plan, scope, lane, Sums(top, total, sink, position))

    @cute.jit
    def weigh(
        self, scope: Scope, lane: Lane, number: Int32, top: Float32, total: Float32
    ) -> tuple[Float32, Float32]:
        """Process a tile from S to a published P; return the new (maximum, sum)."""
        plan, pipes = self.plan, scope.pipes
        scores = cute.make_rmem_tensor(OWN_KEYS, Float32)
        self.read_scores(scope, lane, number, scores)
        found = top_score(scores, -Float32.inf)
        found = cute.arch.fmax(found, of_other_half(plan, scope, lane, found, number % 2))
        higher = found if found > top + LAG_LOG2 else top
        factor = cute.math.exp2(top - finite(higher), fastmath=True)
        factor = Float32(1.0) if top == higher else factor
        base, words = finite(higher), cute.make_rmem_tensor(OWN_KEYS // 2, Uint32)
        for word in cutlass.range_constexpr(OWN_KEYS // 2):
            first = 2 * word
            low, high = exp2(add((scores[first], scores[first + 1]), -base))
            scores[first], scores[first + 1] = low, high
            words[word] = pack(low, high, "bf16")
        if number > 0:
            pipes.o.wait(consumer_state_at(1, number - 1))
            tmem.order_after_wait()
            self.rescale(scope, lane, factor)
        self.store_weights(scope, lane, words)
        tmem.order_before_signal()
        pipes.p.signal(Int32(0))
        return higher, row_total(scores, total * factor)

    @cute.jit
    def read_scores(self, scope: Scope, lane: Lane, number: Int32, scores: cute.Tensor) -> None:
        """Load half a row of S in log2 units; keys that the row does not see get -inf."""
        plan, pipes, work = self.plan, scope.pipes, scope.work
        state = consumer_state_at(S_STAGES, number)
        pipes.s.wait(state)
        tmem.order_after_wait()
        begin = plan.tmem["S0"].begin + state.index * OWN_KEYS
        for column in cutlass.range_constexpr(0, OWN_KEYS, CHUNK):
            tile = tmem.tile_at(scope.buffers.tmem, begin + column, CHUNK)
            tmem.load_row(tile, tmem.columns_of(scores, column, CHUNK), lane.lane)
        tmem.wait_loads()
        tmem.order_before_signal()
        pipes.s.release(state.index)
        scale = scope.given.scale_log2 * key_scale(plan.config, scope.given)
        for key in cutlass.range_constexpr(0, OWN_KEYS, 2):
            scores[key], scores[key + 1] = multiply((scores[key], scores[key + 1]), scale)
        pipes.marks.wait(state)
        marks = scope.buffers.marks + state.index * (KEYS // 8) + lane.half * (OWN_KEYS // 8)
        bits = load(marks, Uint32, 2)
        cute.arch.sync_warp()
        pipes.marks.release(state.index)
        if bits[0] & bits[1] != Uint32(EVERY_BIT):
            for key in cutlass.range_constexpr(OWN_KEYS):
                there = bits[key // 32] & Uint32(1 << (key % 32)) != 0
                scores[key] = scores[key] if there else -Float32.inf
        first, newer = (work.begin + number) * KEYS, Int32(0)
        if cutlass.const_expr(plan.config.causal and plan.config.tokens > 1):
            newer = plan.config.tokens - 1 - work.token
        if cutlass.const_expr(plan.by_tma or plan.config.causal):
            if first + KEYS > work.keys - newer:
                keep_columns(scores, lane.end - first - lane.half * OWN_KEYS)

    @cute.jit
    def rescale(self, scope: Scope, lane: Lane, factor: Float32) -> None:
        """Multiply half a row of O, which is at rest; skipped by a warp that need not."""
        if cute.arch.vote_any_sync(factor != 1.0):
            for column in cutlass.range_constexpr(0, self.plan.tmem["O"].columns, CHUNK):
                tile = tmem.tile_at(scope.buffers.tmem, column, CHUNK)
                part = cute.make_rmem_tensor(CHUNK, Float32)
                tmem.load_row(tile, part, lane.lane)
                tmem.wait_loads()
                part.store(part.load() * factor)
                tmem.store_row(part, tile, lane.lane)
            tmem.wait_stores()

    @cute.jit
    def store_weights(self, scope: Scope, lane: Lane, words: cute.Tensor) -> None:
        """Store half a row of P, a line of 128 bytes, swizzled for the tensor core."""
        line = scope.buffers.p.toint() + lane.half * PANEL_BYTES + lane.row * LINE_BYTES
        for unit in cutlass.range_constexpr(LINE_BYTES // UNIT):
            four = tuple(words[4 * unit + k] for k in range(4))
            store(line + (unit ^ lane.row % 8) * UNIT, Uint32, four)
        cute.arch.fence_proxy("async.shared", space="cta")
