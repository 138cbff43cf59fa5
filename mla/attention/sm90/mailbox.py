"""Reduction of a cluster through distributed shared memory (device code).

Rank r of R finishes n rows of O, from r n on. Every CTA with keys writes what it has of these rows
to its slot of the owner's mailbox by st.async; the owner's mbarrier counts the bytes. O is not
normalised. Each half of a row, 256 columns, is scaled by a power of two so that its largest element
is below 2^15, and rounded to fp16: an error of 2^-12 of that element, an eighth of bf16's.

    statistics [rank][owned row] of (maximum, sum, inverse scale of the left, and of the right half)
    O          [rank][owned row][512] fp16

The mailbox lies over the buffers of keys, so that nobody sends before all CTAs have read theirs.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device.online_softmax import finite
from kernelkit.device.shared_words import load_below, operands, store
from kernelkit.device.words import bits_of, float_of
from mla.attention.formats import LATENT
from mla.attention.sm90.args import Scope
from mla.attention.sm90.plan import STATISTICS, Plan90

SCALED_EXPONENT = 127 + 14  # biased exponent of the largest element of a half row once scaled
MOST_EXPONENT = 253  # biased, of a scale, so that its inverse is a normal number
STATISTICS_BYTES, ROW_BYTES = STATISTICS * 4, LATENT * 2
VECTOR = 8  # elements that a lane sends or adds at a time
NOTHING = (-math.inf, 0.0, 0.0, 0.0)  # statistics of a CTA without keys


@cute.jit
def senders_of(plan: Plan90, scope: Scope) -> Int32:
    """Return the number of CTAs of this cluster that have keys, which are the first ones."""
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
            read_only_args=[address, rows * senders * (STATISTICS_BYTES + ROW_BYTES)],
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


@cute.jit
def statistics_at(plan: Plan90, scope: Scope, rank: Int32, slot: Int32) -> Int32:
    """Return the address of a rank's statistics of an owned row."""
    return scope.buffers.statistics + (rank * plan.owned_rows + slot) * STATISTICS_BYTES


@cute.jit
def row_at(plan: Plan90, scope: Scope, rank: Int32, slot: Int32) -> Int32:
    """Return the address of a rank's O of an owned row."""
    return scope.buffers.mail + (rank * plan.owned_rows + slot) * ROW_BYTES


@cute.jit
def send(
    plan: Plan90, scope: Scope, row: Int32, address: Int32, values: tuple[Uint32, ...]
) -> None:
    """Send one, two or four words to the owner of a row, at this address of its shared memory."""
    if cutlass.const_expr(plan.config.cluster == 1):
        store(address, Uint32, values)
    else:
        count = len(values)
        vector, words = operands("r", 1, count)
        cute.arch.inline_ptx(
            "{ .reg .b32 to, box; "
            f"mapa.shared::cluster.u32 to, {{$r0}}, {{$r{2 + count}}}; "
            f"mapa.shared::cluster.u32 box, {{$r{1 + count}}}, {{$r{2 + count}}}; "
            "st.async.shared::cluster.mbarrier::complete_tx::bytes"
            f"{vector}.b32 [to], {words}, [box]; }}",
            read_only_args=[address, *values, scope.buffers.mail_full, row // plan.owned_rows],
        )


@cute.jit
def scale_of(largest: Float32) -> tuple[Float32, Uint32]:
    """Return the scale of half a row by its largest magnitude, and the bits of its inverse."""
    exponent = Int32(bits_of(largest) >> 23)
    own = cutlass.min(254 + SCALED_EXPONENT - 127 - exponent, MOST_EXPONENT)
    return float_of(Uint32(own << 23)), Uint32((254 - own) << 23)


@cute.jit
def pack_halves(low: Float32, high: Float32) -> Uint32:
    """Two fp32 rounded to fp16 in one word."""
    return cute.arch.inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


@cute.jit
def unpack_halves(word: Uint32) -> tuple[Float32, Float32]:
    """Two fp16 of a word as fp32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
        "cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }",
        write_only_types=[Float32] * 2,
        read_only_args=[word],
    )


@cute.jit
def received(
    plan: Plan90, scope: Scope, slot: Int32, vector: Int32, senders: Int32
) -> tuple[cute.Tensor, Float32, Float32]:
    """Return (eight elements of O, not normalised; maximum; sum) of an owned row, over all senders
    in the order of ranks.
    """
    cluster, found, rows = plan.config.cluster, [], []
    for rank in cutlass.range_constexpr(cluster):
        address = statistics_at(plan, scope, Int32(rank), slot)
        found.append(load_below(address, rank, senders, NOTHING))
    for rank in cutlass.range_constexpr(cluster):
        address = row_at(plan, scope, Int32(rank), slot) + vector * 16
        rows.append(load_below(address, rank, senders, (0.0,) * 4))
    top = found[0][0]
    for rank in cutlass.range_constexpr(1, cluster):
        top = cute.arch.fmax(top, found[rank][0])
    base, total, is_left = finite(top), Float32(0.0), vector < LATENT // VECTOR // 2
    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    for rank in cutlass.range_constexpr(cluster):
        weight = cute.math.exp2(found[rank][0] - base, fastmath=True)
        total += weight * found[rank][1]
        factor = weight * (found[rank][2] if is_left else found[rank][3])
        for word in cutlass.range_constexpr(4):
            pair = unpack_halves(bits_of(rows[rank][word]))
            acc[2 * word] += factor * pair[0]
            acc[2 * word + 1] += factor * pair[1]
    return acc, top, total
