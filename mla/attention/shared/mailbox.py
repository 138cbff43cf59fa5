"""Reduction of a cluster through distributed shared memory (device code).

Rank r of R finishes n rows of O, from r n on. Every CTA with keys lays its O out by rows, and one
bulk copy brings each other owner its rows; the owner's mbarrier counts the bytes. Own rows stay
where they were laid out: compute-sanitizer takes a copy of the first CTA to itself for an error.
O is not normalised, and rounded to bf16, which halves the time of the copies;
`reference.rounded` rounds it, too.

    row: O in bf16, then fp32 maximum and one or two sums, 16 bytes, which keep rows in different
        banks
    sent [row]      mail [rank][owned row]

Both lie over the buffers of keys, so that nobody sends before all CTAs have read theirs.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelkit.device.online_softmax import finite
from kernelkit.device.shared_words import load_below
from kernelkit.device.words import bits_of, two_of_bf16
from kernelkit.plan import hw
from mla.attention.shared.mail import MailPlan

VECTOR = 8  # elements that a thread adds at a time
NOTHING = (-math.inf, 0.0, 0.0, 0.0)  # statistics of a CTA without keys


@dataclass(frozen=True)
class Mailbox:
    """Where the mail of a CTA is.

    senders: ranks with keys, the first ones.
    """

    mail: Int32  # address of received rows
    sent: Int32  # address of rows to send
    full: Int32  # address of an mbarrier
    rank: Int32
    piece: Int32  # number of the CTA among those between this rank and the next
    senders: Int32

    @property
    def sends(self) -> cutlass.Boolean:
        """Whether this CTA has keys."""
        return self.rank < self.senders

    @property
    def received(self) -> Int32:
        """CTAs that send this one rows."""
        return self.senders - Int32(self.sends)


@cute.jit
def senders_of(plan: MailPlan, active: Int32, part: Int32) -> Int32:
    """Return the ranks of a cluster that have keys. active: those of all clusters of a row tile."""
    return cutlass.min(cutlass.max(active - part * plan.cluster, 0), plan.cluster)


@cute.jit
def rows_of(plan: MailPlan, rank: Int32) -> Int32:
    """Return the number of rows that a rank owns; the last ones may own fewer, or none."""
    owned = plan.owned_rows
    return cutlass.min(cutlass.max(plan.rows - rank * owned, 0), owned)


@cute.jit
def mail_rows(plan: MailPlan, box: Mailbox) -> Int32:
    """Return the number of rows that others send this CTA."""
    return rows_of(plan, box.rank) * box.received


@cute.jit
def open_mailbox(full: Int32) -> None:
    """Initialise the mbarrier; one thread, before the barriers are announced to the cluster."""
    cute.arch.inline_ptx("mbarrier.init.shared.b64 [{$r0}], 1;", read_only_args=[full])


@cute.jit
def expect_mail(plan: MailPlan, box: Mailbox) -> None:
    """Announce the expected bytes to the mbarrier; one thread, once it is initialised."""
    rows = mail_rows(plan, box)
    if rows > 0:
        cute.arch.inline_ptx(
            "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
            read_only_args=[box.full, rows * plan.row_bytes],
        )


@cute.jit
def wait_for_mail(plan: MailPlan, box: Mailbox) -> None:
    """Wait for all announced bytes. Peers write them, so the acquire has cluster scope."""
    if mail_rows(plan, box) > 0:
        cute.arch.inline_ptx(
            "{ .reg .pred done; "
            "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0; "
            "@done bra DONE; bra WAIT; DONE: }",
            read_only_args=[box.full],
        )


# ---- sending


@cute.jit
def send(plan: MailPlan, box: Mailbox) -> None:
    """Send every other owner its rows; called by the finishing threads, the first of the CTA.

    A warp issues its copies one by one, so that warps share them. Every CTA begins with another
    owner, so that no owner gets the rows of all at a time.
    """
    thread, _, _ = cute.arch.thread_idx()
    warps = plan.threads // hw.WARP_THREADS
    turn = 1 + thread // hw.WARP_THREADS + thread % hw.WARP_THREADS * warps
    owner = (box.rank + turn) % plan.cluster
    if turn < plan.cluster and box.sends:
        nbytes = rows_of(plan, owner) * plan.row_bytes
        share = plan.owned_rows * plan.row_bytes
        if nbytes > 0:
            cute.arch.inline_ptx(
                "{ .reg .b32 to, box; mapa.shared::cluster.u32 to, {$r0}, {$r4}; "
                "mapa.shared::cluster.u32 box, {$r3}, {$r4}; "
                "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                "[to], [{$r1}], {$r2}, [box]; }",
                read_only_args=[
                    box.mail + box.rank * share,
                    box.sent + owner * share,
                    nbytes,
                    box.full,
                    owner * plan.stride + box.piece,
                ],
            )


# ---- receiving


@cute.jit
def place_of_row(plan: MailPlan, box: Mailbox, rank: cutlass.Constexpr, slot: Int32) -> Int32:
    """Return the address of an owned row of a sender: received, or laid out by this CTA."""
    begin = box.sent if box.rank == rank else box.mail
    return begin + (rank * plan.owned_rows + slot) * plan.row_bytes


@cute.jit
def received(
    plan: MailPlan, box: Mailbox, slot: Int32, vector: Int32
) -> tuple[cute.Tensor, Float32, Float32]:
    """Return (eight elements of O, not normalised; maximum; sum) of an owned row, over all senders
    in the order of ranks.
    """
    cluster, found, rows, nothing = plan.cluster, [], [], NOTHING[: 2 * plan.sums]
    places = [place_of_row(plan, box, rank, slot) for rank in range(cluster)]
    for rank in cutlass.range_constexpr(cluster):
        statistics = places[rank] + 2 * plan.columns
        found.append(load_below(statistics, rank, box.senders, nothing))
    for rank in cutlass.range_constexpr(cluster):
        rows.append(load_below(places[rank] + vector * 16, rank, box.senders, (0.0,) * 4))
    top = found[0][0]
    for rank in cutlass.range_constexpr(1, cluster):
        top = cute.arch.fmax(top, found[rank][0])
    base, total = finite(top), Float32(0.0)
    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    for rank in cutlass.range_constexpr(cluster):
        weight = cute.math.exp2(found[rank][0] - base, fastmath=True)
        own = found[rank][1]
        if cutlass.const_expr(plan.sums == 2):
            own = own + found[rank][2]
        total += weight * own
        for word in cutlass.range_constexpr(4):
            low, high = two_of_bf16(bits_of(rows[rank][word]))
            acc[2 * word] += weight * low
            acc[2 * word + 1] += weight * high
    return acc, top, total
