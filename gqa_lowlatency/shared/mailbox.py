"""Reduction of a cluster through distributed shared memory (device code).

Owner r of R finishes columns [r n, (r + 1) n), n = columns / R. Every CTA with keys writes its
results for these columns into its slot of the owner's mailbox, by st.async: maximum and sum of each
column, and its O, not normalised. The owner's mbarrier counts the bytes. Mailboxes are not cleared:
only the slots of CTAs with keys are read. Maxima are in log2 units.

    statistics [owned column][rank] of (maximum, sum)      O [rank][owned column][head_dim]

A single CTA with all keys fills its mailbox by ordinary stores.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from gqa_lowlatency.config import DecodeConfig
from kernelkit.device.online_softmax import finite
from kernelkit.device.shared_words import load, load_below, operands, store

VECTOR = 4  # fp32 that one thread sends or adds at a time
WORDS = 2  # of the statistics of a column: maximum and sum


@dataclass(frozen=True)
class Statistics:
    """Statistics of a column: its maximum, and the sum of its weights under that maximum."""

    row_max: Float32
    row_sum: Float32


@dataclass(frozen=True)
class Mailbox:
    """Addresses in shared memory, equal in every CTA of the cluster."""

    statistics: Int32
    o: Int32
    arrived: Int32


@cute.jit
def open_mailbox(config: DecodeConfig, box: Mailbox, rank: Int32, senders: Int32) -> None:
    """Initialise the mbarrier with the expected bytes; called by one thread before the cluster's
    barrier.
    """
    cute.arch.inline_ptx("mbarrier.init.shared.b64 [{$r0}], 1;", read_only_args=[box.arrived])
    cute.arch.mbarrier_init_fence()
    if rank < config.owner_ctas and senders > 0:
        nbytes = senders * ((config.statistics_bytes + config.mail_bytes) // config.cluster)
        cute.arch.inline_ptx(
            "mbarrier.arrive.expect_tx.relaxed.cta.shared.b64 _, [{$r0}], {$r1};",
            read_only_args=[box.arrived, nbytes],
        )


@cute.jit
def send_statistics(
    config: DecodeConfig, box: Mailbox, rank: Int32, column: Int32, statistics: Statistics
) -> None:
    """Send this CTA's statistics of a column to its owner."""
    owner = column // config.owned_columns
    place = (column % config.owned_columns) * config.cluster + rank
    values = (statistics.row_max, statistics.row_sum)
    _send(config, box, owner, box.statistics + place * WORDS * 4, values)


@cute.jit
def send_o(
    config: DecodeConfig,
    box: Mailbox,
    rank: Int32,
    column: Int32,
    dim: Int32,
    values: tuple[Float32, ...],
) -> None:
    """Send one, two or four adjacent elements of O, from head dim `dim` on, to the owner."""
    owner = column // config.owned_columns
    line = rank * config.owned_columns + column % config.owned_columns
    _send(config, box, owner, box.o + (line * config.head_dim + dim) * 4, values)


@cute.jit
def _send(
    config: DecodeConfig, box: Mailbox, owner: Int32, address: Int32, values: tuple[Float32, ...]
) -> None:
    count = len(values)
    vector, words = operands("r", 1, count)
    if cutlass.const_expr(config.cluster == 1):
        store(address, Float32, values)
    else:
        cute.arch.inline_ptx(
            "{ .reg .b32 to, box; "
            f"mapa.shared::cluster.u32 to, {{$r0}}, {{$r{2 + count}}}; "
            f"mapa.shared::cluster.u32 box, {{$r{1 + count}}}, {{$r{2 + count}}}; "
            "st.async.shared::cluster.mbarrier::complete_tx::bytes"
            f"{vector}.f32 [to], {words}, [box]; }}",
            read_only_args=[address, *values, box.arrived, owner],
        )


@cute.jit
def wait_for_mail(config: DecodeConfig, box: Mailbox) -> None:
    """Wait for all announced bytes. Peers write them, so the acquire has cluster scope."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; "
        "WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0; "
        "@done bra DONE; bra WAIT; DONE: }",
        read_only_args=[box.arrived],
    )


@cute.jit
def merged(
    config: DecodeConfig, box: Mailbox, slot: Int32, vector: Int32, senders: Int32
) -> tuple[cute.Tensor, Statistics]:
    """Return vector `vector` of O in an owned column, and the column's statistics.

    A vector is four adjacent elements, not normalised. Sums are in the order of ranks.
    """
    found, o = [], []
    for rank in cutlass.range_constexpr(config.cluster):
        place = _statistics(config, box, slot, rank)
        found.append(load_below(place, rank, senders, (-math.inf, 0.0)))
    for rank in cutlass.range_constexpr(config.cluster):
        line = rank * config.owned_columns + slot
        place = box.o + (line * config.head_dim + vector * VECTOR) * 4
        o.append(load_below(place, rank, senders, (0.0,) * VECTOR))
    top = found[0][0]
    for rank in cutlass.range_constexpr(1, config.cluster):
        top = cute.arch.fmax(top, found[rank][0])
    base, total = finite(top), Float32(0.0)
    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    for rank in cutlass.range_constexpr(config.cluster):
        weight = cute.math.exp2(found[rank][0] - base, fastmath=True)
        total += weight * found[rank][1]
        for k in cutlass.range_constexpr(VECTOR):
            acc[k] += weight * o[rank][k]
    return acc, Statistics(top, total)


@cute.jit
def merged_in_turn(
    config: DecodeConfig, box: Mailbox, slot: Int32, vector: Int32, senders: Int32
) -> tuple[cute.Tensor, Statistics]:
    """Merge like `merged`, one rank after the other, for Hopper with dependent launches.

    Measured on an H100: one entry of 8k keys in L2 takes 7.5 us, with `merged` 9.9 us, with both
    loops below in one 8.7 us. The cause is not known (notes/decode.md, 2026-11-26). Without PDL
    `merged` is faster.
    """
    top, total = -Float32.inf, Float32(0.0)
    for rank in cutlass.range_constexpr(config.cluster):
        if rank < senders:
            top = cutlass.max(top, load(_statistics(config, box, slot, rank), Float32))
    for rank in cutlass.range_constexpr(config.cluster):
        if rank < senders:
            address = _statistics(config, box, slot, rank)
            weight = cute.math.exp2(load(address, Float32) - finite(top), fastmath=True)
            total += weight * load(address + 4, Float32)
    base = finite(top)
    acc = cute.make_rmem_tensor(VECTOR, Float32)
    acc.fill(0.0)
    for rank in cutlass.range_constexpr(config.cluster):
        if rank < senders:
            weight = cute.math.exp2(
                load(_statistics(config, box, slot, rank), Float32) - base, fastmath=True
            )
            line = rank * config.owned_columns + slot
            address = box.o + (line * config.head_dim + vector * VECTOR) * 4
            values = load(address, Float32, VECTOR)
            for k in cutlass.range_constexpr(VECTOR):
                acc[k] += weight * values[k]
    return acc, Statistics(top, total)


@cute.jit
def _statistics(config: DecodeConfig, box: Mailbox, slot: Int32, rank: Int32) -> Int32:
    """Return the address of a rank's statistics of an owned column."""
    return box.statistics + (slot * config.cluster + rank) * WORDS * 4
