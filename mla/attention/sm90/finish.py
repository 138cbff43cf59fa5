"""End of a CTA: rows of O and their LSE, from registers or through the mailbox (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fmha.shared.epilogue import trade
from kernelkit.device.barriers import meet
from kernelkit.device.shared_words import store
from kernelkit.device.warp_mma import pack, store_fragment
from mla.attention.shared.collect import (
    angles,
    collect,
    end_of,
    factors_of,
    place_of,
    position_of,
    sink_of,
)
from mla.attention.shared.mailbox import Mailbox, send, senders_of
from mla.attention.sm90.args import Lane, Reference, Scope
from mla.attention.sm90.plan import ROWS, TEAMS, Plan90

MAXIMA, SUMS = 0, 1  # numbers of rows in shared memory


@cute.jit
def mailbox_of(plan: Plan90, scope: Scope) -> Mailbox:
    """Return the mailbox of this CTA."""
    work, buffers = scope.work, scope.buffers
    senders = senders_of(plan.mail, work.active, work.part)
    return Mailbox(buffers.mail, buffers.sent, buffers.mail_full, work.rank, work.sharer, senders)


@cute.jit
def published(scope: Scope, kind: Int32 | int) -> cute.Tensor:
    """Return MAXIMA, or SUMS of even or odd units, of the rows in shared memory, (row, team)."""
    layout = cute.make_layout((ROWS, TEAMS))
    return cute.make_tensor(scope.buffers.rows + kind * ROWS * TEAMS, layout)


@cute.jit
def sums_of_team(reference: Reference) -> tuple[Float32, Float32]:
    """Return the sums of the weights of the team's tiles of both rows, over their lanes."""
    sums = []
    for half in cutlass.range_constexpr(2):
        total = reference.row_sum[half]
        for step in cutlass.range_constexpr(2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        sums.append(total)
    return sums[0], sums[1]


@cute.jit
def sums_of_both(
    plan: Plan90, scope: Scope, lane: Lane, sums: tuple[Float32, Float32], step: Int32
) -> tuple[Float32, Float32]:
    """Return the sums of both rows over both teams. sums: of this team.

    When it returns, both teams have done all products of unit number `step`.
    """
    kind = SUMS
    if cutlass.const_expr(plan.config.ways.resident > 0):
        # A team may be at the end of its next unit while the other one still reads the sums.
        kind = SUMS + step % 2
    numbers = published(scope, kind)
    for half in cutlass.range_constexpr(2):
        if lane.column == 0:
            numbers[lane.row + 8 * half, lane.team] = sums[half]
    meet(plan.barriers, "math")
    first, second = lane.row, lane.row + 8
    return numbers[first, 0] + numbers[first, 1], numbers[second, 0] + numbers[second, 1]


# ---- from registers


@cute.jit
def store_rows(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    reference: Reference,
    sums: tuple[Float32, Float32],
) -> None:
    """Store the team's columns of both rows of a thread, and their LSE. sums: of both teams."""
    given, entry, factors, tops = scope.given, scope.work.entry, [], reference.row_max
    end = end_of(plan, scope.given, scope.work, mailbox_of(plan, scope))
    for half in cutlass.range_constexpr(2):
        token, head = place_of(plan, end, lane.row + 8 * half)
        factor = Float32(0.0)
        if lane.real[half]:
            sink = sink_of(plan.config, given, head)
            factor, lse = factors_of(plan.config, given, sink, tops[half], sums[half])
            if cutlass.const_expr(lane.team == 0):
                if lane.column == 0 and scope.work.slice == 0:
                    given.lse[entry, token, head] = lse
        factors.append(factor)
    for element in cutlass.range_constexpr(cute.size(o)):
        o[element] = o[element] * factors[element // 2 % 2]
    if cutlass.const_expr(plan.config.rope > 0 and lane.team == 1):
        if scope.work.slice == plan.config.slices - 1:
            rotate_back(plan, scope, lane, o)
    words = cute.make_rmem_tensor(cute.size(o) // 2, Uint32)
    for word in cutlass.range_constexpr(cute.size(words)):
        words[word] = pack(o[2 * word], o[2 * word + 1], "bf16")
    trade(words, 2)
    piece = cute.make_rmem_tensor(4, Uint32)
    for half in cutlass.range_constexpr(2):
        if lane.real[half]:
            token, head = place_of(plan, end, lane.row + 8 * half)
            start = cute.recast_ptr(given.o[entry, token, head, None].iterator, dtype=Uint32)
            first = lane.team * plan.config.slices + scope.work.slice
            start = start + first * (plan.team_columns // 2) + lane.column * 2
            for number in cutlass.range_constexpr(plan.team_columns // 32):
                for word in cutlass.range_constexpr(4):
                    piece[word] = words[8 * number + 2 * word + half]
                target = (start + number * 16).align(16)
                cute.autovec_copy(piece, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def rotate_back(plan: Plan90, scope: Scope, lane: Lane, o: cute.Tensor) -> None:
    """Rotate the last columns, pairs of neighbours, by minus the angle of the position."""
    blocks, every = plan.config.rope // 8, plan.team_columns // 8
    position = position_of(plan.config, scope.given, scope.work.entry)
    for block in cutlass.range_constexpr(blocks):
        cos, sin = angles(scope.given, position, block * 4 + lane.column // 2)
        for half in cutlass.range_constexpr(2):
            place = 4 * (every - blocks + block) + 2 * half
            x, y = o[place], o[place + 1]
            o[place] = x * cos + y * sin
            o[place + 1] = y * cos - x * sin


# ---- through the mailbox


@cute.jit
def finish_together(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    reference: Reference,
    sums: tuple[Float32, Float32],
) -> None:
    """Finish this CTA's share of the rows of all CTAs that share their keys; called by both teams.
    sums: of this team.
    """
    post(plan, scope, lane, o, reference, sums)
    collect(plan, end_of(plan, scope.given, scope.work, mailbox_of(plan, scope)))


@cute.jit
def post(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    reference: Reference,
    sums: tuple[Float32, Float32],
) -> None:
    """Send this CTA's part of every row to its owner, once all CTAs have read their keys.

    The rows to send replace the keys of this CTA once both teams have read them. Copies to a peer
    read keys, too, until the peer has all of its tiles.
    """
    copied = plan.crosses
    meet(plan.barriers, "math")
    if cutlass.const_expr(plan.config.cluster > 1):
        # A release by every warp would wait for memory. One warp's, behind the barrier of all that
        # have read the keys, stands for all.
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            cute.arch.fence_acq_rel_cluster()
        cute.arch.cluster_arrive_relaxed()
        if cutlass.const_expr(copied):
            cute.arch.cluster_wait()
    lay_out(plan, scope, lane, o, reference, sums)
    meet(plan.barriers, "math")
    if cutlass.const_expr(plan.config.cluster > 1):
        if cutlass.const_expr(not copied):
            cute.arch.cluster_wait()
        send(plan.mail, mailbox_of(plan, scope))


@cute.jit
def lay_out(
    plan: Plan90,
    scope: Scope,
    lane: Lane,
    o: cute.Tensor,
    reference: Reference,
    sums: tuple[Float32, Float32],
) -> None:
    """Store the team's columns of O and its statistics to the rows to send."""
    words, sent = cute.make_rmem_tensor(cute.size(o) // 2, Uint32), scope.buffers.sent
    for word in cutlass.range_constexpr(cute.size(words)):
        words[word] = pack(o[2 * word], o[2 * word + 1], "bf16")
    for half in cutlass.range_constexpr(2):
        if lane.column == 0:
            address = sent + (lane.row + 8 * half) * plan.mail.row_bytes + 2 * plan.mail.columns
            if cutlass.const_expr(lane.team == 0):
                store(address, Float32, (reference.row_max[half], sums[half]))
            else:
                store(address + 8, Float32, (sums[half], Float32(0.0)))
    number = cute.arch.lane_idx()
    row = lane.warp * 16 + number % 16
    columns = plan.team_columns
    address = sent + row * plan.mail.row_bytes + lane.team * (columns * 2) + number // 16 * 16
    for block in cutlass.range_constexpr(0, columns // 8, 2):
        four = tuple(words[2 * block + word] for word in range(4))
        store_fragment(address + block * 16, four)
    if cutlass.const_expr(plan.config.cluster > 1):  # else nothing is copied
        cute.arch.fence_proxy("async.shared", space="cta")
