"""End of rows of O: factors, LSE, and the rows that a CTA finishes from its mailbox (device code).

If several clusters share an entry, each owner leaves its sums in the workspace and increments a
counter. The owner that arrives last adds them in the order of parts, whichever came last, and
resets the counter to 0 for the next launch.

    partial [unit][part][owned row][columns + 4]: O, then maximum, sum and padding
    unit: an entry's row tile, a slice, a rank, and a CTA of it
"""

from dataclasses import dataclass
from typing import Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from kernelkit.device.barriers import meet
from kernelkit.device.online_softmax import finite, in_log2_units
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import pack
from kernelkit.plan.barriers import BarrierPlan
from kernelkit.plan.log2 import LN_2
from mla.attention.config import LatentConfig
from mla.attention.formats import LATENT
from mla.attention.kernel_arguments import KernelArguments
from mla.attention.shared import mailbox
from mla.attention.shared.mail import PARTS_AHEAD, MailPlan
from mla.attention.shared.mailbox import Mailbox
from mla.attention.shared.work import Work
from mla.attention.tiles import RowTiles

MOST_AHEAD = 8  # rows of a thread whose sinks it loads before they come
PAIRS = mailbox.VECTOR // 2
ROTATED_FROM = (LATENT - 64) // mailbox.VECTOR  # vector, if any is rotated back


class EndPlan(Protocol):
    """What the end of a row needs of a kernel's plan."""

    @property
    def config(self) -> LatentConfig: ...
    @property
    def tiles(self) -> RowTiles: ...
    @property
    def mail(self) -> MailPlan: ...
    @property
    def barriers(self) -> BarrierPlan: ...


@dataclass(frozen=True)
class End:
    """Rows that a CTA finishes, and its place among those that share their keys."""

    given: KernelArguments
    entry: Int32
    token: Int32  # first token of the row tile
    head: Int32  # first head of the row tile
    slice: Int32  # of the columns of V
    unit: Int32  # of the workspace
    part: Int32  # cluster
    parts: Int32  # clusters that leave sums: those with keys, or the first one
    box: Mailbox
    flag: Int32  # address of a word of shared memory


@cute.jit
def end_of(plan: EndPlan, given: KernelArguments, work: Work, box: Mailbox) -> End:
    """Return what the end of a CTA's rows depends on."""
    cluster, slices = plan.config.cluster, plan.config.slices
    tile = work.entry * plan.tiles.count + work.tile
    return End(
        given=given,
        entry=work.entry,
        token=work.token,
        head=work.head,
        slice=work.slice,
        unit=(tile * slices + work.slice) * cluster + work.rank,
        part=work.part,
        parts=cutlass.max((work.active + cluster - 1) // cluster, 1),
        box=box,
        flag=box.full + 8,
    )


@dataclass(frozen=True)
class Added:
    """Eight columns of an owned row, added over all senders."""

    acc: cute.Tensor  # O, not normalised: fp32 in registers
    top: Float32
    total: Float32


@dataclass(frozen=True)
class Slot:
    """Eight columns of an owned row."""

    turn: int
    row: Int32  # owned row
    vector: Int32  # of the slice


@cute.jit
def sink_of(config: LatentConfig, given: KernelArguments, head: Int32) -> Float32:
    """Return the sink of a head in log2 units, 0 without sinks. A head past the last one has its
    sink, so that no branch waits for the load.
    """
    if cutlass.const_expr(not config.sinks):
        return Float32(0.0)
    return in_log2_units(given.tables.sinks[cutlass.min(head, config.heads - 1)])


@cute.jit
def factors_of(
    config: LatentConfig, given: KernelArguments, sink: Float32, top: Float32, total: Float32
) -> tuple[Float32, Float32]:
    """Return (factor that normalises O, LSE in natural log) of a row. A sink changes O alone.

    sink: in log2 units.
    """
    lse = (cute.math.log2(total, fastmath=True) + top) * LN_2
    lse = -Float32.inf if total == 0.0 else lse
    factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
    if cutlass.const_expr(config.sinks):
        joint = cute.arch.fmax(top, sink)
        scale = cute.math.exp2(top - finite(joint), fastmath=True)
        every = total * scale + cute.math.exp2(sink - finite(joint), fastmath=True)
        factor = Float32(0.0) if total == 0.0 else scale * cute.arch.rcp_approx(every)
    return factor * key_scale(config, given), lse


@cute.jit
def key_scale(config: LatentConfig, given: KernelArguments) -> Float32:
    """Return the factor of keys without scales of their own, 1 without one."""
    if cutlass.const_expr(not config.key_scale):
        return Float32(1.0)
    return given.tables.key_scale[0]


@cute.jit
def place_of(plan: EndPlan, end: End, row: Int32) -> tuple[Int32, Int32]:
    """Return (token, head) of a row of the tile."""
    heads = plan.tiles.heads
    return end.token + row // heads, end.head + row % heads


@cute.jit
def is_real(plan: EndPlan, token: Int32, head: Int32) -> Boolean:
    """Whether a row of the tile has a token and a head."""
    return token < plan.config.tokens and head < plan.config.heads


@cute.jit
def position_of(config: LatentConfig, given: KernelArguments, entry: Int32) -> Int64:
    """Return the position of an entry, 0 if nothing is rotated."""
    if cutlass.const_expr(config.rope == 0):
        return Int64(0)
    return given.tables.positions[entry]


@cute.jit
def angles(given: KernelArguments, position: Int64, pair: Int32) -> tuple[Float32, Float32]:
    """Return (cos, sin) of a pair of the columns that are rotated back."""
    return given.tables.cos[position, pair], given.tables.sin[position, pair]


@dataclass(frozen=True)
class Ahead:
    """What a thread loads of the tables before its rows come: fp32 tensors in registers."""

    cos: cute.Tensor  # (pair,), of the thread's vector
    sin: cute.Tensor
    sinks: cute.Tensor  # (turn,), in log2 units; of few turns


@cute.jit
def load_ahead(plan: EndPlan, end: End, turns: cutlass.Constexpr) -> Ahead:
    """Load what the thread's slots need of the tables, all of which have the same vector."""
    config, mail, given = plan.config, plan.mail, end.given
    thread, _, _ = cute.arch.thread_idx()
    ahead = Ahead(*(cute.make_rmem_tensor(size, Float32) for size in (PAIRS, PAIRS, MOST_AHEAD)))
    if cutlass.const_expr(config.rope > 0):
        first = vector_of_o(plan, end, slot_of(mail, thread, 0)) - ROTATED_FROM
        position = position_of(config, given, end.entry)
        for pair in cutlass.range_constexpr(PAIRS):
            number = cutlass.max(first, 0) * PAIRS + pair
            ahead.cos[pair], ahead.sin[pair] = angles(given, position, number)
    for turn in cutlass.range_constexpr(min(turns, MOST_AHEAD)):
        row = end.box.rank * mail.owned_rows + slot_of(mail, thread, turn).row
        _, head = place_of(plan, end, row)
        ahead.sinks[turn] = sink_of(config, given, head)
    return ahead


@cute.jit
def collect(plan: EndPlan, end: End) -> None:
    """Finish the rows that this CTA owns, from its mailbox; called by the finishing threads.

    Another cluster barrier follows the mail: who has sent leaves once all owners have got it.
    """
    mail, box = plan.mail, end.box
    thread, _, _ = cute.arch.thread_idx()
    rows = mailbox.rows_of(mail, box.rank)
    turns = -(-mail.owned_rows * mail.vectors // mail.threads)
    ahead = load_ahead(plan, end, turns)
    if cutlass.const_expr(mail.cluster > 1):
        mailbox.wait_for_mail(mail, box)
        cute.arch.cluster_arrive_relaxed()
    if box.senders > 0 or end.part == 0:
        for turn in cutlass.range_constexpr(turns):
            slot = slot_of(mail, thread, turn)
            if slot.row < rows:
                acc, top, total = mailbox.received(mail, box, slot.row, slot.vector)
                if cutlass.const_expr(plan.config.parts):
                    leave(mail, end, slot, acc, top, total)
                else:
                    store_vector(plan, end, slot, ahead, Added(acc, top, total))
        if cutlass.const_expr(plan.config.parts):
            if is_last(plan, end):
                for turn in cutlass.range_constexpr(turns):
                    slot = slot_of(mail, thread, turn)
                    if slot.row < rows:
                        acc, top, total = add_parts(mail, end, slot)
                        store_vector(plan, end, slot, ahead, Added(acc, top, total))


@cute.jit
def slot_of(mail: MailPlan, thread: Int32, turn: cutlass.Constexpr) -> Slot:
    """Return what a thread finishes in a turn."""
    number = thread + turn * mail.threads
    return Slot(turn, number // mail.vectors, number % mail.vectors)


@cute.jit
def vector_of_o(plan: EndPlan, end: End, slot: Slot) -> Int32:
    """Return which eight columns of O those of a slot are.

    A slice has the same part of both halves of the columns, since each team has a half.
    """
    each = plan.mail.vectors // 2
    half, place = slot.vector // each, slot.vector % each
    return (half * plan.config.slices + end.slice) * each + place


@cute.jit
def store_vector(
    plan: EndPlan,
    end: End,
    slot: Slot,
    ahead: Ahead,
    added: Added,
) -> None:
    """Store eight elements of an owned row; the first vector's thread stores the LSE."""
    given, config, acc = end.given, plan.config, added.acc
    vector = vector_of_o(plan, end, slot)
    token, head = place_of(plan, end, end.box.rank * plan.mail.owned_rows + slot.row)
    if is_real(plan, token, head):
        if cutlass.const_expr(slot.turn < MOST_AHEAD):
            sink = ahead.sinks[slot.turn]
        else:
            sink = sink_of(config, given, head)
        factor, lse = factors_of(config, given, sink, added.top, added.total)
        for k in cutlass.range_constexpr(mailbox.VECTOR):
            acc[k] = acc[k] * factor
        if cutlass.const_expr(config.rope > 0):
            if vector >= ROTATED_FROM:
                for pair in cutlass.range_constexpr(PAIRS):
                    cos, sin = ahead.cos[pair], ahead.sin[pair]
                    x, y = acc[2 * pair], acc[2 * pair + 1]
                    acc[2 * pair] = x * cos + y * sin
                    acc[2 * pair + 1] = y * cos - x * sin
        words = cute.make_rmem_tensor(4, Uint32)
        for word in cutlass.range_constexpr(4):
            words[word] = pack(acc[2 * word], acc[2 * word + 1], "bf16")
        start = cute.recast_ptr(given.o[end.entry, token, head, None].iterator, dtype=Uint32)
        target = (start + vector * 4).align(16)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))
        if vector == 0:
            given.lse[end.entry, token, head] = lse


@cute.jit
def leave(
    mail: MailPlan,
    end: End,
    slot: Slot,
    acc: cute.Tensor,
    top: Float32,
    total: Float32,
) -> None:
    """Store one part's sums of an owned row in the workspace."""
    start = line_of(mail, end, end.part, slot.row)
    target = cute.make_tensor((start + slot.vector * mailbox.VECTOR).align(16), mailbox.VECTOR)
    cute.autovec_copy(acc, target)
    if slot.vector == 0:
        statistics = cute.make_tensor(start + mail.columns, 2)
        statistics[0], statistics[1] = top, total


@cute.jit
def line_of(mail: MailPlan, end: End, part: Int32, row: Int32) -> cute.Pointer:
    """Return the row of a part in the workspace."""
    return end.given.tables.partial[end.unit, part, None].iterator + row * mail.partial_words


@cute.jit
def is_last(plan: EndPlan, end: End) -> Boolean:
    """Return whether all other parts have stored their sums; the counter is then reset to 0."""
    thread, _, _ = cute.arch.thread_idx()
    counts, flag = end.given.tables.counts, end.flag
    meet(plan.barriers, plan.mail.barrier)
    if thread == 0:
        before = cute.arch.atomic_add(
            counts.iterator + end.unit, Int32(1), sem="acq_rel", scope="gpu"
        )
        if before == end.parts - 1:
            counts[end.unit] = Int32(0)
        store(flag, Int32, (before,))
    meet(plan.barriers, plan.mail.barrier)
    return load(flag, Int32) == end.parts - 1


@cute.jit
def add_parts(mail: MailPlan, end: End, slot: Slot) -> tuple[cute.Tensor, Float32, Float32]:
    """Return (eight elements of O, not normalised; maximum; sum) of an owned row over all parts."""
    acc = cute.make_rmem_tensor(mailbox.VECTOR, Float32)
    acc.fill(0.0)
    top, total = -Float32.inf, Float32(0.0)
    values = cute.make_rmem_tensor((PARTS_AHEAD, mailbox.VECTOR), Float32)
    found = cute.make_rmem_tensor((PARTS_AHEAD, 2), Float32)
    for turn in cutlass.range((end.parts + PARTS_AHEAD - 1) // PARTS_AHEAD, unroll=1):
        for k in cutlass.range_constexpr(PARTS_AHEAD):
            # A missing part is replaced by the last one, without weight.
            start = line_of(mail, end, cutlass.min(turn * PARTS_AHEAD + k, end.parts - 1), slot.row)
            source = cute.make_tensor(
                (start + slot.vector * mailbox.VECTOR).align(16), mailbox.VECTOR
            )
            eight = cute.make_rmem_tensor(mailbox.VECTOR, Float32)
            cute.autovec_copy(source, eight)
            for n in cutlass.range_constexpr(mailbox.VECTOR):
                values[k, n] = eight[n]
            statistics = cute.make_tensor(start + mail.columns, 2)
            found[k, 0], found[k, 1] = statistics[0], statistics[1]
        higher = top
        for k in cutlass.range_constexpr(PARTS_AHEAD):
            higher = cute.arch.fmax(higher, found[k, 0])
        old = cute.math.exp2(top - finite(higher), fastmath=True)
        total *= old
        for n in cutlass.range_constexpr(mailbox.VECTOR):
            acc[n] *= old
        for k in cutlass.range_constexpr(PARTS_AHEAD):
            weight = cute.math.exp2(found[k, 0] - finite(higher), fastmath=True)
            weight = weight if turn * PARTS_AHEAD + k < end.parts else Float32(0.0)
            total += found[k, 1] * weight
            for n in cutlass.range_constexpr(mailbox.VECTOR):
                acc[n] += values[k, n] * weight
        top = higher
    return acc, top, total
