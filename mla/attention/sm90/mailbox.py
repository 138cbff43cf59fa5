"""Reduction of a cluster through distributed shared memory (device code).

Rank r of R finishes n rows of O, from r n on. Every CTA with keys lays its O out by rows, and one
bulk copy brings each owner its rows; the owner's mbarrier counts the bytes. O is not normalised,
and rounded to bf16, which halves the time of the copies; `reference.rounded` rounds it, too.

    row: 512 bf16 of O, then fp32 maximum and sum, and 8 bytes that keep rows in different banks
    sent [64 rows]      mail [rank][owned row]

Both lie over the buffers of keys, so that nobody sends before all CTAs have read theirs.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device.online_softmax import finite
from kernelkit.device.shared_words import load_below, store
from kernelkit.device.warp_mma import pack, store_fragment
from kernelkit.device.words import bits_of, float_of
from kernelkit.plan import hw
from mla.attention.formats import LATENT
from mla.attention.sm90.args import Lane, Scope
from mla.attention.sm90.plan import HALF, MAIL_ROW_BYTES, PANEL, Plan90

O_BYTES = 2 * LATENT  # of a row; its statistics follow
VECTOR = 8  # elements that a thread adds at a time
NOTHING = (-math.inf, 0.0)  # statistics of a CTA without keys


@cute.jit
def senders_of(plan: Plan90, scope: Scope) -> Int32:
    """Return the number of CTAs of this row tile and cluster that have keys: the first ones."""
    cluster = plan.config.cluster
    return cutlass.min(cutlass.max(scope.work.active - scope.work.part * cluster, 0), cluster)


@cute.jit
def rows_of(plan: Plan90, rank: Int32) -> Int32:
    """Return the number of rows that a rank owns; the last ones may own fewer, or none."""
    owned = plan.owned_rows
    return cutlass.min(cutlass.max(plan.tiles.rows - rank * owned, 0), owned)


@cute.jit
def open_mailbox(plan: Plan90, scope: Scope) -> None:
    """Initialise the mbarrier with the expected bytes; one thread, before the cluster's barrier."""
    address, work = scope.buffers.mail_full, scope.work
    cute.arch.inline_ptx("mbarrier.init.shared.b64 [{$r0}], 1;", read_only_args=[address])
    cute.arch.mbarrier_init_fence()
    rows, senders = rows_of(plan, work.rank), senders_of(plan, scope)
    if rows * senders > 0:
        cute.arch.inline_ptx(
            "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
            read_only_args=[address, rows * senders * MAIL_ROW_BYTES],
        )


@cute.jit
def wait_for_mail(scope: Scope) -> None:
    """Wait for all announced bytes. Peers write them, so the acquire has cluster scope."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[scope.buffers.mail_full],
    )


# ---- sending


@cute.jit
def lay_out(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    tops: tuple[Float32, Float32],
    sums: tuple[Float32, Float32],
) -> None:
    """Store the team's columns of O and the statistics to the rows to send."""
    words, sent = cute.make_rmem_tensor(cute.size(o) // 2, Uint32), scope.buffers.sent
    for word in cutlass.range_constexpr(cute.size(words)):
        words[word] = pack(o[2 * word], o[2 * word + 1], "bf16")
    if cutlass.const_expr(lane.team == 0):
        for half in cutlass.range_constexpr(2):
            if lane.column == 0:
                address = sent + (lane.row + 8 * half) * MAIL_ROW_BYTES + O_BYTES
                store(address, Float32, (tops[half], sums[half]))
    number = cute.arch.lane_idx()
    row = lane.warp * 16 + number % 16
    address = sent + row * MAIL_ROW_BYTES + lane.team * (HALF * PANEL * 2) + number // 16 * 16
    for block in cutlass.range_constexpr(0, HALF * PANEL // 8, 2):
        four = tuple(words[2 * block + word] for word in range(4))
        store_fragment(address + block * 16, four)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def send(plan: Plan90, scope: Scope) -> None:
    """Send every owner its rows.

    A warp issues its copies one by one, so that warps share them. Every CTA begins with another
    owner, so that no owner gets the rows of all at a time.
    """
    thread, _, _ = cute.arch.thread_idx()
    warps = plan.roles["math"].warps
    turn = thread // hw.WARP_THREADS + thread % hw.WARP_THREADS * warps
    cluster = plan.config.cluster
    owner = (scope.work.rank + turn) % cluster
    if turn < cluster and scope.work.count > 0:
        nbytes = rows_of(plan, owner) * MAIL_ROW_BYTES
        share = plan.owned_rows * MAIL_ROW_BYTES
        if nbytes > 0:
            cute.arch.inline_ptx(
                "{ .reg .b32 to, box; mapa.shared::cluster.u32 to, {$r0}, {$r4}; "
                "mapa.shared::cluster.u32 box, {$r3}, {$r4}; "
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                "[to], [{$r1}], {$r2}, [box]; }",
                read_only_args=[
                    scope.buffers.mail + scope.work.rank * share,
                    scope.buffers.sent + owner * share,
                    nbytes,
                    scope.buffers.mail_full,
                    owner * plan.config.sharers + scope.work.sharer,
                ],
            )


# ---- receiving


@cute.jit
def received(
    plan: Plan90, scope: Scope, slot: Int32, vector: Int32, senders: Int32
) -> tuple[cute.Tensor, Float32, Float32]:
    """Return (eight elements of O, not normalised; maximum; sum) of an owned row, over all senders
    in the order of ranks.
    """
    cluster, found, rows = plan.config.cluster, [], []
    begin = scope.buffers.sent if cutlass.const_expr(cluster == 1) else scope.buffers.mail
    for rank in cutlass.range_constexpr(cluster):
        address = begin + (rank * plan.owned_rows + slot) * MAIL_ROW_BYTES
        found.append(load_below(address + O_BYTES, rank, senders, NOTHING))
    for rank in cutlass.range_constexpr(cluster):
        address = begin + (rank * plan.owned_rows + slot) * MAIL_ROW_BYTES
        rows.append(load_below(address + vector * 16, rank, senders, (0.0,) * 4))
    top = found[0][0]
    for rank in cutlass.range_constexpr(1, cluster):
        top = cute.arch.fmax(top, found[rank][0])
    base, total = finite(top), Float32(0.0)
    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    for rank in cutlass.range_constexpr(cluster):
        weight = cute.math.exp2(found[rank][0] - base, fastmath=True)
        total += weight * found[rank][1]
        for word in cutlass.range_constexpr(4):
            bits = bits_of(rows[rank][word])
            acc[2 * word] += weight * float_of(bits << 16)
            acc[2 * word + 1] += weight * float_of(bits & Uint32(0xFFFF0000))
    return acc, top, total
