"""End of a CTA: rows of O and their LSE, from registers or from the mailbox (device code).

If several clusters share an entry, each owner leaves its sums in the workspace and increments a
counter. The owner that arrives last adds them in the order of parts, whichever came last, and
resets the counter to 0 for the next launch.

    partial [unit][part][owned row][516]: O, then maximum, sum and padding
    unit = (entry tiles + row tile) cluster + rank
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from fmha.shared.epilogue import trade
from kernelkit.device.barriers import meet
from kernelkit.device.online_softmax import finite, in_log2_units
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import pack
from kernelkit.plan.log2 import LN_2
from mla.attention.formats import LATENT
from mla.attention.sm90 import mailbox
from mla.attention.sm90.args import Lane, Partial, Reference, Scope
from mla.attention.sm90.plan import PARTIAL_WORDS, ROWS, TEAMS, Plan90
from mla.attention.sm90.products import COLUMNS

MAXIMA, SUMS = 0, 1  # numbers of rows in shared memory
AHEAD = 4  # parts that are loaded at once
VECTORS = LATENT // mailbox.VECTOR


@cute.jit
def finish(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    reference: Reference,
    sums: tuple[Float32, Float32],
) -> None:
    """Finish the rows of this CTA, or its share of them; called by both teams."""
    tops = (reference.row_max[0], reference.row_max[1])
    if cutlass.const_expr(plan.reduces):
        post(plan, scope, lane, o, tops, sums)
        collect(plan, scope)
    else:
        store_rows(plan, scope, lane, o, tops, sums)


@cute.jit
def published(scope: Scope, kind: Int32 | int) -> cute.Tensor:
    """Return MAXIMA, or SUMS of even or odd units, of the rows in shared memory, (row, team)."""
    layout = cute.make_layout((ROWS, TEAMS))
    return cute.make_tensor(scope.buffers.rows + kind * ROWS * TEAMS, layout)


@cute.jit
def sums_of_both(
    plan: Plan90, scope: Scope, lane: Lane, reference: Reference, step: Int32
) -> tuple[Float32, Float32]:
    """Return the sums of the weights of both rows, over their lanes and both teams.

    When it returns, both teams have done all products of unit number `step`.
    """
    kind = SUMS
    if cutlass.const_expr(plan.config.ways.resident > 0):
        # A team may be at the end of its next unit while the other one still reads the sums.
        kind = SUMS + step % 2
    numbers = published(scope, kind)
    for half in cutlass.range_constexpr(2):
        total = reference.row_sum[half]
        for step in cutlass.range_constexpr(2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        if lane.column == 0:
            numbers[lane.row + 8 * half, lane.team] = total
    meet(plan.barriers, "math")
    first, second = lane.row, lane.row + 8
    return numbers[first, 0] + numbers[first, 1], numbers[second, 0] + numbers[second, 1]


@cute.jit
def factors_of(
    plan: Plan90, scope: Scope, head: Int32, top: Float32, total: Float32
) -> tuple[Float32, Float32]:
    """Return (factor that normalises O, LSE in natural log) of a row. A sink changes O alone."""
    lse = (cute.math.log2(total, fastmath=True) + top) * LN_2
    lse = -Float32.inf if total == 0.0 else lse
    factor = Float32(0.0) if total == 0.0 else cute.arch.rcp_approx(total)
    if cutlass.const_expr(plan.config.sinks):
        sink = in_log2_units(scope.given.tables.sinks[head])
        joint = cute.arch.fmax(top, sink)
        scale = cute.math.exp2(top - finite(joint), fastmath=True)
        every = total * scale + cute.math.exp2(sink - finite(joint), fastmath=True)
        factor = Float32(0.0) if total == 0.0 else scale * cute.arch.rcp_approx(every)
    return factor * key_scale(plan, scope), lse


@cute.jit
def key_scale(plan: Plan90, scope: Scope) -> Float32:
    """Return the factor of keys without scales of their own, 1 without one."""
    if cutlass.const_expr(not plan.config.key_scale):
        return Float32(1.0)
    return scope.given.tables.key_scale[0]


@cute.jit
def place_of(plan: Plan90, scope: Scope, row: Int32) -> tuple[Int32, Int32]:
    """Return (token, head) of a row of the tile."""
    heads = plan.tiles.heads
    return scope.work.token + row // heads, scope.work.head + row % heads


@cute.jit
def is_real(plan: Plan90, token: Int32, head: Int32) -> Boolean:
    """Whether a row of the tile has a token and a head."""
    return token < plan.config.tokens and head < plan.config.heads


@cute.jit
def angles(plan: Plan90, scope: Scope, pair: Int32) -> tuple[Float32, Float32]:
    """Return (cos, sin) of a pair of the columns that are rotated back, at the entry's position."""
    tables = scope.given.tables
    position = tables.positions[scope.work.entry]
    return tables.cos[position, pair], tables.sin[position, pair]


# ---- from registers


@cute.jit
def store_rows(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    tops: tuple[Float32, Float32],
    sums: tuple[Float32, Float32],
) -> None:
    """Store the team's columns of both rows of a thread, and their LSE."""
    given, entry, factors = scope.given, scope.work.entry, []
    for half in cutlass.range_constexpr(2):
        token, head = place_of(plan, scope, lane.row + 8 * half)
        factor = Float32(0.0)
        if lane.real[half]:
            factor, lse = factors_of(plan, scope, head, tops[half], sums[half])
            if cutlass.const_expr(lane.team == 0):
                if lane.column == 0:
                    given.lse[entry, token, head] = lse
        factors.append(factor)
    for element in cutlass.range_constexpr(cute.size(o)):
        o[element] = o[element] * factors[element // 2 % 2]
    if cutlass.const_expr(plan.config.rope > 0 and lane.team == 1):
        rotate_back(plan, scope, lane, o)
    words = cute.make_rmem_tensor(cute.size(o) // 2, Uint32)
    for word in cutlass.range_constexpr(cute.size(words)):
        words[word] = pack(o[2 * word], o[2 * word + 1], "bf16")
    trade(words, 2)
    piece = cute.make_rmem_tensor(4, Uint32)
    for half in cutlass.range_constexpr(2):
        if lane.real[half]:
            token, head = place_of(plan, scope, lane.row + 8 * half)
            start = cute.recast_ptr(given.o[entry, token, head, None].iterator, dtype=Uint32)
            start = start + lane.team * (COLUMNS // 2) + lane.column * 2
            for number in cutlass.range_constexpr(COLUMNS // 32):
                for word in cutlass.range_constexpr(4):
                    piece[word] = words[8 * number + 2 * word + half]
                target = (start + number * 16).align(16)
                cute.autovec_copy(piece, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def rotate_back(plan: Plan90, scope: Scope, lane: Lane, o: cute.Tensor) -> None:
    """Rotate the last columns, pairs of neighbours, by minus the angle of the position."""
    blocks = plan.config.rope // 8
    for block in cutlass.range_constexpr(blocks):
        cos, sin = angles(plan, scope, block * 4 + lane.column // 2)
        for half in cutlass.range_constexpr(2):
            place = 4 * (COLUMNS // 8 - blocks + block) + 2 * half
            x, y = o[place], o[place + 1]
            o[place] = x * cos + y * sin
            o[place + 1] = y * cos - x * sin


# ---- through the mailbox


@cute.jit
def post(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    tops: tuple[Float32, Float32],
    sums: tuple[Float32, Float32],
) -> None:
    """Send this CTA's part of every row to its owner, once all CTAs have read their keys.

    Both teams have read theirs here, so that the rows to send may replace them. Copies to a peer
    read keys, too, until the peer has all of its tiles.
    """
    copied = plan.config.ways.crossing == "copies"
    if cutlass.const_expr(plan.config.cluster > 1):
        # A release by every warp would wait for memory. One warp's, behind a barrier of all that
        # have read the keys, stands for all.
        meet(plan.barriers, "math")
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            cute.arch.fence_acq_rel_cluster()
        cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(copied):
            cute.arch.cluster_wait()
    mailbox.lay_out(plan, scope, lane, o, tops, sums)
    meet(plan.barriers, "math")
    if cutlass.const_expr(plan.config.cluster > 1):
        if cutlass.const_expr(not copied):
            cute.arch.cluster_wait()
        mailbox.send(plan, scope)


@cute.jit
def collect(plan: Plan90, scope: Scope) -> None:
    """Finish the rows that this CTA owns, from its mailbox."""
    thread, _, _ = cute.arch.thread_idx()
    work, threads = scope.work, plan.roles["math"].threads
    senders, rows = mailbox.senders_of(plan, scope), mailbox.rows_of(plan, work.rank)
    if cutlass.const_expr(plan.config.cluster > 1):
        if senders * rows > 0:
            mailbox.wait_for_mail(scope)
        # Who has sent leaves once all owners have what it sent.
        cute.arch.cluster_arrive_relaxed()
    turns = -(-plan.owned_rows * VECTORS // threads)
    parts = cutlass.max((work.active + plan.config.cluster - 1) // plan.config.cluster, 1)
    unit = (work.entry * plan.tiles.count + work.tile) * plan.config.cluster + work.rank
    if senders > 0 or work.part == 0:
        for turn in cutlass.range_constexpr(turns):
            slot, vector = (thread + turn * threads) // VECTORS, thread % VECTORS
            if slot < rows:
                acc, top, total = mailbox.received(plan, scope, slot, vector, senders)
                if cutlass.const_expr(plan.config.parts):
                    leave(scope, Partial(unit, work.part, slot), vector, acc, top, total)
                else:
                    store_vector(plan, scope, slot, vector, acc, top, total)
        if cutlass.const_expr(plan.config.parts):
            if is_last(plan, scope, unit, parts):
                for turn in cutlass.range_constexpr(turns):
                    slot, vector = (thread + turn * threads) // VECTORS, thread % VECTORS
                    if slot < rows:
                        acc, top, total = add_parts(scope, unit, slot, vector, parts)
                        store_vector(plan, scope, slot, vector, acc, top, total)


@cute.jit
def store_vector(
    plan: Plan90,
    scope: Scope,
    slot: Int32,
    vector: Int32,
    acc: cute.Tensor,
    top: Float32,
    total: Float32,
) -> None:
    """Store eight elements of an owned row; the first vector's thread stores the LSE."""
    given, work = scope.given, scope.work
    token, head = place_of(plan, scope, work.rank * plan.owned_rows + slot)
    if is_real(plan, token, head):
        factor, lse = factors_of(plan, scope, head, top, total)
        for k in cutlass.range_constexpr(mailbox.VECTOR):
            acc[k] = acc[k] * factor
        if cutlass.const_expr(plan.config.rope > 0):
            first = vector - (VECTORS - plan.config.rope // mailbox.VECTOR)
            if first >= 0:
                for pair in cutlass.range_constexpr(mailbox.VECTOR // 2):
                    cos, sin = angles(plan, scope, first * (mailbox.VECTOR // 2) + pair)
                    x, y = acc[2 * pair], acc[2 * pair + 1]
                    acc[2 * pair] = x * cos + y * sin
                    acc[2 * pair + 1] = y * cos - x * sin
        words = cute.make_rmem_tensor(4, Uint32)
        for word in cutlass.range_constexpr(4):
            words[word] = pack(acc[2 * word], acc[2 * word + 1], "bf16")
        start = cute.recast_ptr(given.o[work.entry, token, head, None].iterator, dtype=Uint32)
        target = (start + vector * 4).align(16)
        cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))
        if vector == 0:
            given.lse[work.entry, token, head] = lse


@cute.jit
def leave(
    scope: Scope,
    place: Partial,
    vector: Int32,
    acc: cute.Tensor,
    top: Float32,
    total: Float32,
) -> None:
    """Store one part's sums of an owned row in the workspace."""
    start = line_of(scope, place.unit, place.part, place.slot)
    target = cute.make_tensor((start + vector * mailbox.VECTOR).align(16), mailbox.VECTOR)
    cute.autovec_copy(acc, target)
    if vector == 0:
        statistics = cute.make_tensor(start + LATENT, 2)
        statistics[0], statistics[1] = top, total


@cute.jit
def line_of(scope: Scope, unit: Int32, part: Int32, slot: Int32) -> cute.Pointer:
    """Return the row of a part in the workspace."""
    return scope.given.tables.partial[unit, part, None].iterator + slot * PARTIAL_WORDS


@cute.jit
def is_last(plan: Plan90, scope: Scope, unit: Int32, parts: Int32) -> Boolean:
    """Return whether all other parts have stored their sums; the counter is then reset to 0."""
    thread, _, _ = cute.arch.thread_idx()
    counts, flag = scope.given.tables.counts, scope.buffers.mail_full + 8
    meet(plan.barriers, "math")
    if thread == 0:
        before = cute.arch.atomic_add(counts.iterator + unit, Int32(1), sem="acq_rel", scope="gpu")
        if before == parts - 1:
            counts[unit] = Int32(0)
        store(flag, Int32, (before,))
    meet(plan.barriers, "math")
    return load(flag, Int32) == parts - 1


@cute.jit
def add_parts(
    scope: Scope, unit: Int32, slot: Int32, vector: Int32, parts: Int32
) -> tuple[cute.Tensor, Float32, Float32]:
    """Return (eight elements of O, not normalised; maximum; sum) of an owned row over all parts."""
    acc = cute.make_rmem_tensor(mailbox.VECTOR, Float32)
    acc.fill(0.0)
    top, total = -Float32.inf, Float32(0.0)
    values = cute.make_rmem_tensor((AHEAD, mailbox.VECTOR), Float32)
    found = cute.make_rmem_tensor((AHEAD, 2), Float32)
    for turn in cutlass.range((parts + AHEAD - 1) // AHEAD, unroll=1):
        for k in cutlass.range_constexpr(AHEAD):
            # A missing part is replaced by the last one, without weight.
            start = line_of(scope, unit, cutlass.min(turn * AHEAD + k, parts - 1), slot)
            source = cute.make_tensor((start + vector * mailbox.VECTOR).align(16), mailbox.VECTOR)
            eight = cute.make_rmem_tensor(mailbox.VECTOR, Float32)
            cute.autovec_copy(source, eight)
            for n in cutlass.range_constexpr(mailbox.VECTOR):
                values[k, n] = eight[n]
            statistics = cute.make_tensor(start + LATENT, 2)
            found[k, 0], found[k, 1] = statistics[0], statistics[1]
        higher = top
        for k in cutlass.range_constexpr(AHEAD):
            higher = cute.arch.fmax(higher, found[k, 0])
        old = cute.math.exp2(top - finite(higher), fastmath=True)
        total *= old
        for n in cutlass.range_constexpr(mailbox.VECTOR):
            acc[n] *= old
        for k in cutlass.range_constexpr(AHEAD):
            weight = cute.math.exp2(found[k, 0] - finite(higher), fastmath=True)
            weight = weight if turn * AHEAD + k < parts else Float32(0.0)
            total += found[k, 1] * weight
            for n in cutlass.range_constexpr(mailbox.VECTOR):
                acc[n] += values[k, n] * weight
        top = higher
    return acc, top, total
