"""Epilogue of the two rows of a thread: O, LSE and maximum to global memory (device code)."""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from fmha.config import FP8
from fmha.plan import AttentionPlan
from fmha.shared.args import OUT_TYPES, Globals, Lane, Row, Scope, Work
from fmha.shared.two_rows import Reference, scale_of
from fmha.shared.walk import angle_row, entry_of_q
from kernelkit.device.narrow import to_e4m3
from kernelkit.device.online_softmax import finish_row
from kernelkit.device.warp_mma import pick
from kernelkit.plan.dtypes import ITEM_BYTES
from kernelkit.plan.log2 import LN_2


@cute.jit
def own_sink(plan: AttentionPlan, head: Int32, tensors: Globals) -> Float32 | None:
    """Return the sink of a row's head, fetched long before it is used; None without sinks."""
    if cutlass.const_expr(not plan.config.sinks):
        return None
    return tensors.tables.sinks[head]


@cute.jit
def finish(
    plan: AttentionPlan,
    scale_log2: Float32,
    row_max: Float32,
    row_sum: Float32,
    sink: Float32 | None,
) -> tuple[Float32, Float32, Float32]:
    """Return (normalising factor of O, LSE in natural log, row_max in log2 units) of a row.

    Args:
        scale_log2: factor of the row's scores, in log2 units.
        row_max: maximum in units of the scores.
        row_sum: sum of the weights, 0 if the row saw no key.
    """
    max_log2 = row_max * scale_log2
    if cutlass.const_expr(plan.config.softcap):
        max_log2 += scale_log2 * 0.5  # the c that `softcap_scores` omits
    if cutlass.const_expr(plan.config.is_fp8):
        max_log2 = max_log2 - plan.config.bias_log2  # a score at this maximum has weight 1
    factor, lse = finish_row(max_log2, row_sum, sink)
    return factor, lse, max_log2


@cute.jit
def store_statistics(
    plan: AttentionPlan, work: Work, row: Row, lse: Float32, max_log2: Float32, scope: Scope
) -> None:
    """Store LSE, and with raw O row_max in natural log, of a row that the entry has."""
    tensors = scope.tensors
    place = (work.q_start + row.token, row.head, entry_of_q(plan, work))
    tensors.lse[place] = lse
    if cutlass.const_expr(tensors.row_max is not None):
        tensors.row_max[place] = max_log2 * LN_2


@cute.jit
def finish_rows(
    plan: AttentionPlan,
    work: Work,
    lane: Lane,
    reference: Reference,
    sinks: Sequence[Float32 | None],
    scope: Scope,
) -> tuple[Float32, Float32]:
    """Store the statistics of both rows; return the normalising factors of O."""
    factors = []
    for half in cutlass.range_constexpr(2):
        scale_log2 = scale_of(plan, reference, scope.scalars, half)
        factor, lse, max_log2 = finish(
            plan, scale_log2, reference.row_max[half], reference.row_sum[half], sinks[half]
        )
        if lane.real[half] and lane.column == 0 and lane.part == 0:
            store_statistics(plan, work, lane.rows[half], lse, max_log2, scope)
        factors.append(factor)
    return tuple(factors)


@cute.jit
def round_output(plan: AttentionPlan, o: cute.Tensor, factor: Float32 | None) -> cute.Tensor:
    """Return O in its dtype. e4m3 is multiplied by `factor`, if there is one, and saturated."""
    rounded = cute.make_rmem_tensor(o.shape, OUT_TYPES[plan.config.o_dtype])
    if cutlass.const_expr(plan.config.o_dtype == FP8):
        cute.recast_tensor(rounded, Uint32).store(to_e4m3(o, factor).load())
    else:
        rounded.store(o.load().to(rounded.element_type))
    return rounded


@cute.jit
def store_pieces(
    plan: AttentionPlan, work: Work, lane: Lane, rounded: cute.Tensor, scope: Scope
) -> None:
    """Store each thread's pieces of the rows that the entry has; four lanes fill whole sectors.

    A piece of fp32 is a pair of columns. A piece of a narrower dtype is eight columns, which four
    lanes exchange.
    """
    words, batch = cute.recast_tensor(rounded, Uint32), entry_of_q(plan, work)
    wide = plan.config.out_bytes == ITEM_BYTES["fp32"]
    narrow = plan.config.out_bytes == ITEM_BYTES["e4m3"]
    size = 2 if wide or narrow else 4  # words of a piece
    if cutlass.const_expr(not wide):
        trade(words, 1 if narrow else 2)
    if cutlass.const_expr(narrow):
        part_rows(words)
    piece = cute.make_rmem_tensor(size, Uint32)
    for half in cutlass.range_constexpr(2):
        row = lane.rows[half]
        if lane.real[half]:
            line = scope.tensors.o[work.q_start + row.token, None, row.head, batch]
            start = cute.recast_ptr(line.iterator + lane.part * plan.layout.o_columns, dtype=Uint32)
            start = start + lane.column // 2 * size
            for number in cutlass.range_constexpr(cute.size(words) // 2 // size):
                for word in cutlass.range_constexpr(size):
                    place = 4 * number + 2 * half + word
                    if cutlass.const_expr(not wide and not narrow):
                        place = 8 * number + 2 * word + half
                    piece[word] = words[place]
                target = (start + number * 4 * size).align(4 * size)
                cute.autovec_copy(piece, cute.make_tensor(target, cute.make_layout(size)))


@cute.jit
def trade(words: cute.Tensor, first: cutlass.Constexpr) -> None:
    """Transpose squares of words among four lanes.

    A lane has a word of each eight columns, so four of each 32. It receives the four words of its
    eight columns.

    first: distance between the words of a square: 1 if a word has a pair of each row, as in e4m3;
        2 if words of the two rows alternate.
    """
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(2):
        upper = Boolean(lane >> step & 1)
        for number in cutlass.range_constexpr(cute.size(words)):
            # Bits of the number, from the lowest up: the row if rows alternate, which of the four,
            # 32 columns.
            other = number | first << step
            if cutlass.const_expr(other != number):
                sent = words[number] if upper else words[other]
                found = cute.arch.shuffle_sync_bfly(sent, offset=1 << step)
                words[number] = found if upper else words[number]
                words[other] = words[other] if upper else found


@cute.jit
def part_rows(words: cute.Tensor) -> None:
    """Separate the rows of e4m3 words, each of which has a pair of columns of each row.

    The four words of eight columns become two words of the first row, then two of the second.
    """
    for number in cutlass.range_constexpr(0, cute.size(words), 4):
        four = [words[number + k] for k in range(4)]
        for half in cutlass.range_constexpr(2):
            for word in cutlass.range_constexpr(2):
                pair = four[2 * word], four[2 * word + 1]
                selector = Int32(0x7632 if half else 0x5410)
                words[number + 2 * half + word] = pick(*pair, selector)


@cute.jit
def rotate_back(
    plan: AttentionPlan,
    work: Work,
    lane: Lane,
    o: cute.Tensor,
    scope: Scope,
    *,
    whole: cutlass.Constexpr,
) -> None:
    """Rotate the last rope_dim columns of O by minus the angle of the row's position.

    Pairs (x, y) of neighbours become (x cos + y sin, y cos - x sin). whole: no part of the columns
    extends past the last column.
    """
    config, tables = plan.config, scope.tensors.tables
    begin, columns = config.v_dim - config.rope_dim, plan.layout.o_columns
    # First column of a part that may be rotated.
    first = max(begin - (config.v_dim - 1) // columns * columns, 0)
    for half in cutlass.range_constexpr(2):
        position = angle_row(work, lane.rows[half].token, tables)
        for block in cutlass.range_constexpr(first // 8, columns // 8):
            dim = lane.part * columns + 8 * block + lane.column - begin
            inside = dim >= 0 if cutlass.const_expr(whole) else dim >= 0 and dim < config.rope_dim
            if inside:
                place = 4 * block + 2 * half
                cos, sin = tables.cos[position, dim // 2], tables.sin[position, dim // 2]
                x, y = o[place], o[place + 1]
                o[place] = x * cos + y * sin
                o[place + 1] = y * cos - x * sin
