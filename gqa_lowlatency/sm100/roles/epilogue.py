"""Epilogue role: four warps, a key of the tile per thread: S -> P, O kept consistent with the
maxima, and at the end the reduction of the cluster.

Per tile: read S, scale and mask it, agree on the maxima of columns, exponentiate, write P to
shared memory, rescale O if a maximum moved, signal. The tensor core waits for that signal. The sums
come after it, each thread for its key.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass.pipeline import PipelineState

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.shared import mailbox
from gqa_lowlatency.shared.finish import Finishing, finish, senders_of
from gqa_lowlatency.shared.split import Share, branch_bits, row_begin, row_sees, tile_start
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import ROLES, TILE, Plan100
from gqa_lowlatency.sm100.roles.columns import VECTOR, acc_scales, bases, owned, update_row_max
from gqa_lowlatency.sm100.roles.correction import (
    clear_unseen_rows,
    deliver_o,
    deliver_statistics,
    rescale_o,
)
from gqa_lowlatency.sm100.roles.load import pack_e4m3, store_bits
from kernelkit.device import tmem, warp_mma
from kernelkit.device.barriers import meet
from kernelkit.device.boxes import swizzled
from kernelkit.device.online_softmax import softcap_scores
from kernelkit.device.pipelines import consumer_state, producer_state
from kernelkit.device.shared_words import load
from kernelkit.plan import hw


@cute.jit
def some_row_misses(config: DecodeConfig, share: Share, first: Int32, left: Int32) -> Boolean:
    """Return whether the tile that begins at key `first` holds a key that some row does not see."""
    end = share.n_keys
    if cutlass.const_expr(config.causal):
        end = share.n_keys - (config.q_tokens - 1)
    if cutlass.const_expr(config.tree):
        end = share.n_keys - config.q_tokens
    return _leaves(config, share, first, row_begin(config, share, Int32(0), left), end)


@cute.jit
def no_row_sees_some(config: DecodeConfig, share: Share, first: Int32) -> Boolean:
    """Return whether the tile holds a key that no row of Q sees, so that its memory may be
    anything.
    """
    return _leaves(config, share, first, share.lowest, share.n_keys)


@cute.jit
def _leaves(config: DecodeConfig, share: Share, first: Int32, begin: Int32, end: Int32) -> Boolean:
    """Return whether the tile holds a key outside [begin, end) that is no sink token.

    `begin` is ignored if the config has none.
    """
    leaves = first + TILE > end
    if cutlass.const_expr(config.has_begin):
        before = first < begin
        if cutlass.const_expr(config.sink_tokens):
            before = before & (first + TILE > share.sink_end)
        leaves = leaves | before
    return leaves


@cute.jit
def hide(config: DecodeConfig, scope: Scope, scores: cute.Tensor, key: Int32) -> None:
    """Set scores (N,) of `key` to -inf in the rows that do not see it."""
    first = Int32(0)
    if cutlass.const_expr(config.row_tiles > 1):
        first = scope.place.row_tile * config.columns
    for column in cutlass.range(config.columns, unroll_full=True):
        # Columns past the last row use the last token, so that they see no other keys.
        token = cutlass.min((first + column) // config.group, config.q_tokens - 1)
        sees = row_sees(config, scope.share, key, token, scope.scalars.left)
        if cutlass.const_expr(config.tree):
            sees = sees & Boolean(branch_bits(config, scope.share, token, key) & 1)
        scores[column] = scores[column] if sees else -Float32.inf


class Epilogue:
    """Softmax, correction and reduction."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = ROLES["epilogue"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Process all tiles and send the results to the owners' mailboxes."""
        plan, share = self.plan, scope.share
        scores = cute.make_rmem_tensor(plan.columns, Float32)
        row_sum = cute.make_rmem_tensor(plan.columns, Float32)
        row_max = cute.make_rmem_tensor(owned(plan.columns), Float32)
        row_sum.fill(0.0)
        row_max.fill(-Float32.inf)
        if cutlass.const_expr(plan.is_fp8):
            if share.count > 0:
                scope.pipes.q.wait(consumer_state(1))  # until the scales of its rows are stored
        s_state = consumer_state(1)
        o_state = producer_state(1)  # acquires O like a buffer that starts free
        for step in cutlass.range(share.count, unroll=1):
            self.do_tile(scope, scores, row_max, row_sum, s_state, o_state, step)
            s_state.advance()
            o_state.advance()
        if cutlass.const_expr(plan.config.cluster > 1):
            cute.arch.cluster_wait()  # the mailboxes are open
        if share.count > 0:
            deliver_statistics(plan, scope, row_max, row_sum, share.count % 2)
            scope.pipes.o.wait(o_state)
            deliver_o(plan, scope)
        meet(plan.barriers, "done")

    @cute.jit
    def finish(self, scope: Scope) -> None:
        """Finish the columns of an owner from its mailbox."""
        config, place, active = self.plan.config, scope.place, scope.share.active
        if cutlass.const_expr(config.pdl):
            cute.arch.griddepcontrol_wait()
        senders = senders_of(config, place, active)
        if place.rank < config.owner_ctas and (senders > 0 or place.part == 0):
            if cutlass.const_expr(config.cluster > 1):
                if senders > 0:
                    mailbox.wait_for_mail(config, scope.box)
            tensors, tables = scope.tensors, scope.tables
            how = Finishing(self.plan.barriers)
            finish(config, how, scope.box, place, active, tensors, tables)

    @cute.jit
    def do_tile(
        self,
        scope: Scope,
        scores: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        s_state: PipelineState,
        o_state: PipelineState,
        step: Int32,
    ) -> None:
        """Process a tile from S to a published P; the pipeline states are read only."""
        plan, pipes, share = self.plan, scope.pipes, scope.share
        first = tile_start(share, share.begin + step, TILE)
        pipes.s.wait(s_state)
        self.take_scores(scope, scores)
        pipes.taken.signal(0)
        self.to_log2_units(scope, scores)
        if some_row_misses(plan.config, share, first, scope.scalars.left):
            thread, _, _ = cute.arch.thread_idx()
            hide(plan.config, scope, scores, first + thread)
        moved = update_row_max(scope.buffers, scores, row_max, step % 2)
        self.exponentiate(scope, scores)
        pipes.o.wait(o_state)  # the previous product has read the only buffer of P
        self.store_p(scope, scores)
        if cutlass.const_expr(plan.ragged):
            if no_row_sees_some(plan.config, share, first):
                clear_unseen_rows(plan, scope, step, first)
        cute.arch.fence_proxy("async.shared", space="cta")
        if moved:
            if step > 0:
                rescale_o(plan, scope)
        tmem.order_before_signal()
        pipes.p.signal(0)
        if moved:
            self.rescale_sums(scope, row_sum)
        for column in cutlass.range(plan.columns, unroll_full=True):
            row_sum[column] += scores[column]

    @cute.jit
    def take_scores(self, scope: Scope, scores: cute.Tensor) -> None:
        """Load S of this thread's key into registers."""
        thread, _, _ = cute.arch.thread_idx()
        tmem.order_after_wait()
        begin = self.plan.tmem["S"].begin
        tmem.load_row(tmem.tile_at(scope.buffers.tmem, begin, self.plan.columns), scores, thread)
        tmem.wait_loads()
        tmem.order_before_signal()

    @cute.jit
    def to_log2_units(self, scope: Scope, scores: cute.Tensor) -> None:
        """Convert products to log2 units for exp2, through the softcap if there is one."""
        config, scalars = self.plan.config, scope.scalars
        scale, shift = scalars.scale_log2, Float32(0.0)
        if cutlass.const_expr(self.plan.is_fp8):
            self.scale_rows(scope, scores)
        if cutlass.const_expr(config.softcap):
            softcap_scores(scores, 1.0 if self.plan.is_fp8 else scalars.softcap_log2)
            shift = scale * 0.5  # the c that `softcap_scores` omits
        if cutlass.const_expr(config.softcap or not self.plan.is_fp8):
            for pair in cutlass.range_constexpr(0, self.plan.columns, 2):
                scores[pair], scores[pair + 1] = cute.arch.fma_packed_f32x2(
                    (scores[pair], scores[pair + 1]), (scale, scale), (shift, shift)
                )

    @cute.jit
    def scale_rows(self, scope: Scope, scores: cute.Tensor) -> None:
        """Multiply products of quantised rows by the factors of `quantise_row`."""
        for first in cutlass.range_constexpr(0, self.plan.columns, VECTOR):
            factors = load(scope.buffers.row_scales + first * 4, Float32, VECTOR)
            for k in cutlass.range_constexpr(VECTOR):
                scores[first + k] *= factors[k]

    @cute.jit
    def exponentiate(self, scope: Scope, scores: cute.Tensor) -> None:
        """Turn scores into weights.

        The bias is added to the difference from the maximum, which is exact; added to a maximum of
        1e8 it would be lost to rounding.
        """
        columns, bias_log2 = self.plan.columns, self.plan.bias_log2
        for first in cutlass.range_constexpr(0, columns, VECTOR):
            base = bases(scope.buffers, columns, first, VECTOR)
            for k in cutlass.range_constexpr(VECTOR):
                power = scores[first + k] - base[k]
                if cutlass.const_expr(bias_log2):
                    power += bias_log2
                scores[first + k] = cute.math.exp2(power, fastmath=True)

    @cute.jit
    def rescale_sums(self, scope: Scope, row_sum: cute.Tensor) -> None:
        """Rescale older sums to the new maxima."""
        columns = self.plan.columns
        for first in cutlass.range_constexpr(0, columns, VECTOR):
            factors = acc_scales(scope.buffers, columns, first, VECTOR)
            for k in cutlass.range_constexpr(VECTOR):
                row_sum[first + k] *= factors[k]

    @cute.jit
    def store_p(self, scope: Scope, weights: cute.Tensor) -> None:
        """Store this key's rounded weights: a line of shared memory per column, in
        panels of keys.
        """
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        line, bits = hw.SMEM_LINE_BYTES, 8 * plan.kv_bytes
        keys = line // plan.kv_bytes
        panel = thread // keys * (plan.columns * line) + thread % keys * plan.kv_bytes
        per_word = 32 // bits
        for first in cutlass.range_constexpr(0, plan.columns, per_word):
            part = tuple(weights[first + k] for k in range(per_word))
            if cutlass.const_expr(plan.is_fp8):
                word = pack_e4m3(*part)
            else:
                word = warp_mma.pack(*part, plan.config.dtype)
            for k in cutlass.range_constexpr(per_word):
                offset = swizzled(panel + (first + k) * line, line)
                store_bits(scope.buffers.p.toint() + offset, word >> (bits * k), bits)
