"""Softmax role: four warps, a query row a thread (device code).

For each tile: read S of the own keys, find the row's
maximum over the keys of both CTAs, weigh, and once O is at rest rescale it, store P and send it to
the peer. A maximum is replaced only when it has grown by more than LAG_LOG2, since O must then be
rescaled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32

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
from mla.attention.shared.collect import key_scale
from mla.attention.sm100.args import Lane, Scope, Sums
from mla.attention.sm100.exchange import P_FREE, joint, send_weights, wait_for
from mla.attention.sm100.finish import finish
from mla.attention.sm100.load import PANEL_ITEMS, PIECE_ITEMS, STAGE_ITEMS
from mla.attention.sm100.plan import (
    COLUMNS,
    HALF,
    KEYS,
    OWN_GROUPS,
    OWN_KEYS,
    OWN_STAGES,
    OWN_TILES,
    PANEL,
    PIECE_KEYS,
    PIECES,
    Plan100,
)
from mla.attention.sm100.walk import lane_of

LAG_LOG2 = 8.0
EVERY_BIT = 0xFFFFFFFF
CHUNK = 32  # columns of tensor memory that a thread has in registers at a time
UNIT = 16  # bytes of a store to shared memory


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
        for number in cutlass.range(count, unroll=1):
            top, total = self.weigh(scope, lane, number, top, total)
        if count > 0:
            total += joint(scope, lane.row, total, count)
            scope.pipes.o.wait(consumer_state_at(1, count - 1))
            # Before this CTA may leave: the peer has told that its weights are used.
            wait_for(scope.buffers.exchanged + P_FREE, (count - 1) % 2)
            tmem.order_after_wait()
        finish(plan, scope, lane, Sums(top, total))

    @cute.jit
    def weigh(
        self, scope: Scope, lane: Lane, number: Int32, top: Float32, total: Float32
    ) -> tuple[Float32, Float32]:
        """Process a tile from S to a published P; return the new (maximum, sum)."""
        pipes = scope.pipes
        scores = cute.make_rmem_tensor(OWN_KEYS, Float32)
        self.read_scores(scope, lane, number, scores)
        found = top_score(scores, -Float32.inf)
        found = cute.arch.fmax(found, joint(scope, lane.row, found, number))
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
            wait_for(scope.buffers.exchanged + P_FREE, (number - 1) % 2)
            tmem.order_after_wait()
            self.rescale(scope, lane, factor)
        if cutlass.const_expr(self.plan.by_tma):
            self.clear_values(scope, lane, number)
        self.store_weights(scope, lane, words)
        tmem.order_before_signal()
        pipes.p.signal(Int32(0))
        send_weights(scope)
        return higher, row_total(scores, total * factor)

    @cute.jit
    def read_scores(self, scope: Scope, lane: Lane, number: Int32, scores: cute.Tensor) -> None:
        """Load the row of S in log2 units; keys that the row does not see get -inf."""
        plan, work = self.plan, scope.work
        scope.pipes.s.wait(consumer_state_at(1, number))
        tmem.order_after_wait()
        for column in cutlass.range_constexpr(0, OWN_KEYS, CHUNK):
            tile = tmem.tile_at(scope.buffers.tmem, plan.tmem["S"].begin + column, CHUNK)
            tmem.load_row(tile, tmem.columns_of(scores, column, CHUNK), lane.row)
        tmem.wait_loads()
        tmem.order_before_signal()
        scope.pipes.s.release(Int32(0))
        # Not only through the tensor core: this makes the bits of valid keys visible.
        scope.pipes.own.wait(consumer_state_at(OWN_STAGES, number * OWN_GROUPS))
        scale = scope.given.scale_log2 * key_scale(plan.config, scope.given)
        for key in cutlass.range_constexpr(0, OWN_KEYS, 2):
            scores[key], scores[key + 1] = multiply((scores[key], scores[key + 1]), scale)
        bits = load(scope.buffers.valid + number % OWN_TILES * 8, Uint32, 2)
        if bits[0] & bits[1] != Uint32(EVERY_BIT):
            for key in cutlass.range_constexpr(OWN_KEYS):
                there = bits[key // 32] & Uint32(1 << (key % 32)) != 0
                scores[key] = scores[key] if there else -Float32.inf
        begin, newer = (work.begin + number) * KEYS, Int32(0)
        if cutlass.const_expr(plan.config.causal and plan.config.tokens > 1):
            newer = plan.config.tokens - 1 - work.token
        if cutlass.const_expr(plan.by_tma or plan.config.causal):
            if begin + KEYS > work.keys - newer:
                keep_columns(scores, lane.end - begin - work.half * OWN_KEYS)

    @cute.jit
    def rescale(self, scope: Scope, lane: Lane, factor: Float32) -> None:
        """Multiply the row of O, which is at rest; skipped by a warp that need not."""
        if cute.arch.vote_any_sync(factor != 1.0):
            for column in cutlass.range_constexpr(0, COLUMNS, CHUNK):
                tile = tmem.tile_at(scope.buffers.tmem, column, CHUNK)
                part = cute.make_rmem_tensor(CHUNK, Float32)
                tmem.load_row(tile, part, lane.row)
                tmem.wait_loads()
                part.store(part.load() * factor)
                tmem.store_row(part, tile, lane.row)
            tmem.wait_stores()

    @cute.jit
    def store_weights(self, scope: Scope, lane: Lane, words: cute.Tensor) -> None:
        """Store the row of P, a line of 128 bytes, swizzled for the tensor core."""
        line = scope.buffers.p.toint() + lane.row * (OWN_KEYS * 2)
        for unit in cutlass.range_constexpr(OWN_KEYS * 2 // UNIT):
            four = tuple(words[4 * unit + k] for k in range(4))
            store(line + (unit ^ lane.row % 8) * UNIT, Uint32, four)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def clear_values(self, scope: Scope, lane: Lane, number: Int32) -> None:
        """Zero rows of V past the last key: their weight is 0, but 0 * NaN is NaN.

        Threads 0 to 63 have a row of the own keys, the others one of the peer's.
        """
        work, buffers = scope.work, scope.buffers
        begin = (work.begin + number) * KEYS
        if begin + KEYS > work.keys:
            peer = lane.row // OWN_KEYS
            row, half = lane.row % OWN_KEYS, work.half ^ peer
            for piece in cutlass.range_constexpr(PIECES):
                state = consumer_state_at(PIECES, number * PIECES + piece)
                scope.pipes.peer.wait(state)
            start = buffers.own + (number % OWN_TILES * STAGE_ITEMS + row * PANEL)
            line = Int32(PANEL_ITEMS)  # between those of a key in neighbouring panels
            if peer == 1:
                inside = row // PIECE_KEYS * PIECE_ITEMS + row % PIECE_KEYS * PANEL
                start, line = buffers.peer + inside, Int32(PIECE_ITEMS // HALF)
            if begin + half * OWN_KEYS + row >= work.keys:
                zeros = cute.make_rmem_tensor(PANEL, BFloat16)
                zeros.fill(0.0)
                for panel in cutlass.range_constexpr(HALF):
                    # A line of zeros needs no swizzle: it stays within the line.
                    place = (start + panel * line).align(16)
                    cute.autovec_copy(zeros, cute.make_tensor(place, cute.make_layout(PANEL)))
            cute.arch.fence_proxy("async.shared", space="cta")
