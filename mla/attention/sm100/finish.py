"""End of a CTA: rows of O and LSE, from tensor memory or through the mailbox (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from kernelkit.device import tmem
from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import pack
from mla.attention.formats import LATENT
from mla.attention.shared.collect import angles, collect, end_of, factors_of
from mla.attention.shared.mailbox import Mailbox, send, senders_of
from mla.attention.shared.work import Work
from mla.attention.sm100.args import Buffers, Lane, Scope, Sums
from mla.attention.sm100.plan import COLUMNS, Plan100

CHUNK = 32  # columns in registers at a time
WORDS = 4  # of a store to shared memory


@cute.jit
def finish(plan: Plan100, scope: Scope, lane: Lane, sums: Sums) -> None:
    """Finish the row of the thread, or the rows that the CTA owns."""
    if cutlass.const_expr(plan.reduces):
        post(plan, scope, lane, sums)
        collect(
            plan, end_of(plan, scope.given, scope.work, mailbox_of(plan, scope.work, scope.buffers))
        )
    else:
        store_row(plan, scope, lane, sums)
    if cutlass.const_expr(plan.config.cluster == 1):
        cute.arch.cluster_arrive_relaxed()  # as `collect` does where there is a cluster


@cute.jit
def mailbox_of(plan: Plan100, work: Work, buffers: Buffers) -> Mailbox:
    """Return the mailbox of this CTA."""
    senders = senders_of(plan.mail, work.active, work.part)
    return Mailbox(buffers.mail, buffers.sent, buffers.mail_full, work.rank, work.sharer, senders)


@cute.jit
def post(plan: Plan100, scope: Scope, lane: Lane, sums: Sums) -> None:
    """Send this CTA's part of every row to its owner, once all CTAs have read their keys.

    The last product of this CTA is done here, so that the rows to send may replace its keys.
    """
    if cutlass.const_expr(plan.config.cluster > 1):
        # A release by every warp would wait for memory. One warp's, behind a barrier of all,
        # stands for all.
        meet(plan.barriers, "rows")
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            cute.arch.fence_acq_rel_cluster()
        cute.arch.cluster_arrive_relaxed()
    lay_out(plan, scope, lane, sums)
    meet(plan.barriers, "rows")
    if cutlass.const_expr(plan.config.cluster > 1):
        cute.arch.cluster_wait()
        send(plan.mail, mailbox_of(plan, scope.work, scope.buffers))


@cute.jit
def lay_out(plan: Plan100, scope: Scope, lane: Lane, sums: Sums) -> None:
    """Store half a row and its statistics to the rows to send."""
    address = scope.buffers.sent + lane.row * plan.mail.row_bytes
    values = cute.make_rmem_tensor(CHUNK, Float32)
    if lane.row < plan.tiles.rows:
        if lane.half == 0:
            store(address + 2 * LATENT, Float32, (sums.top, sums.total))
    for column in cutlass.range_constexpr(0, COLUMNS, CHUNK):
        read_chunk(scope, lane, column, values)
        place = address + 2 * (lane.half * COLUMNS + column)
        for first in cutlass.range_constexpr(0, CHUNK, 2 * WORDS):
            pairs = (first + 2 * word for word in range(WORDS))
            words = tuple(pack(values[pair], values[pair + 1], "bf16") for pair in pairs)
            store(place + first * 2, Uint32, words)
    if cutlass.const_expr(plan.config.cluster > 1):  # else nothing is copied
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def store_row(plan: Plan100, scope: Scope, lane: Lane, sums: Sums) -> None:
    """Store half a row; the thread of its first half stores the LSE."""
    given, work, rope = scope.given, scope.work, plan.config.rope
    factor = Float32(0.0)
    if lane.real:
        factor, lse = factors_of(plan.config, given, sums.sink, sums.top, sums.total)
        if lane.half == 0:
            given.lse[work.entry, lane.token, lane.head] = lse
    values = cute.make_rmem_tensor(CHUNK, Float32)
    words = cute.make_rmem_tensor(CHUNK // 2, Uint32)
    for column in cutlass.range_constexpr(0, COLUMNS, CHUNK):
        read_chunk(scope, lane, column, values)
        for k in cutlass.range_constexpr(CHUNK):
            values[k] = values[k] * factor
        if cutlass.const_expr(rope > 0 and column >= COLUMNS - rope):
            if lane.half == 1 and lane.real:
                rotate_back(scope, sums.position, values, column - (COLUMNS - rope))
        for word in cutlass.range_constexpr(CHUNK // 2):
            words[word] = pack(values[2 * word], values[2 * word + 1], "bf16")
        if lane.real:
            row = given.o[work.entry, lane.token, lane.head, None].iterator
            start = cute.recast_ptr(row, dtype=Uint32) + (lane.half * COLUMNS + column) // 2
            target = cute.make_tensor(start.align(16), cute.make_layout(CHUNK // 2))
            cute.autovec_copy(words, target)


@cute.jit
def read_chunk(scope: Scope, lane: Lane, column: cutlass.Constexpr, values: cute.Tensor) -> None:
    """Load columns of the lane; zeros where no tile was added."""
    values.fill(0.0)
    if scope.work.count > 0:
        tile = tmem.tile_at(scope.buffers.tmem, column, CHUNK)
        tmem.load_row(tile, values, lane.lane)
        tmem.wait_loads()


@cute.jit
def rotate_back(
    scope: Scope, position: Int64, values: cute.Tensor, first: cutlass.Constexpr
) -> None:
    """Rotate pairs of neighbours by minus the angle of the position. first: column of RoPE."""
    for pair in cutlass.range_constexpr(CHUNK // 2):
        cos, sin = angles(scope.given, position, first // 2 + pair)
        x, y = values[2 * pair], values[2 * pair + 1]
        values[2 * pair] = x * cos + y * sin
        values[2 * pair + 1] = y * cos - x * sin
