"""The online softmax of two rows in the registers of a thread, as accumulators of wgmma and of
mma.sync have them (device code).

Four lanes share a row: they exchange its maximum whenever it is computed, its sum once at the end.
`kernelkit.device.online_softmax` defines `row_max` and `scale_log2`, and which elements belong to
which row (`RowView`).

A maximum costs as many instructions as an exponential, and the maximum of a row changes in few
tiles. So the kernel keeps a stale maximum and checks it afterwards. If the sum of a thread's
weights exceeds 2 ** rescale_log2, the maximum may be too small: the tile is weighed again, with a
new maximum for the rows that asked for one. If the sum is within the bound, so is every weight. In
e4m3 the sum may exceed the bound of a single weight; there a row asks if one of its weights became
448.

Rows do not depend on each other: a row that did not ask keeps its maximum, so its weights have the
same bits whatever the other rows of the tile hold.

`far` rows (`kernelkit.device.online_softmax.FAR_LOG2`) ask in every tile, since only the second
weighing does them right: their maximum is subtracted before the multiplication (`bring_near`).

In e4m3 the factor of a row's scores may be negative. The row's top, the score with the largest
weight, is then the smallest score, and a hidden key scores +inf.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from fmha.mods import parsed
from fmha.plan import AttentionPlan
from fmha.shared.args import Lane, Scalars, Scope, Work
from fmha.shared.fp8 import score_scale
from fmha.shared.mods import change_scores, hide_scores
from kernelkit.device import online_softmax
from kernelkit.device.control import once
from kernelkit.device.online_softmax import (
    RowView,
    bounded_factor,
    is_far,
    keep_branch,
    keep_columns,
    softcap_scores,
)
from kernelkit.device.warp_mma import pack, pack_e4m3
from kernelkit.plan.limits import FLT_MAX

PIECE = 8  # weights rounded at a time
FULL_CARRIES = 0x02020202  # added to unsigned e4m3, carries into the sign bit of 448
SIGNS = 0x80808080


@dataclass(frozen=True)
class Reference:
    """Reference of the weights of a thread's two rows: tensors (2,) in registers."""

    row_max: cute.Tensor  # the score with the largest weight
    row_sum: cute.Tensor  # of this thread's weights
    # Addend of a score in log2 units: -row_max, 0 for a far row, FLT_MAX without a maximum.
    shift: cute.Tensor
    # Limit of the sum of a tile's weights; 0 without a maximum, -1 to ask in every tile.
    limit: cute.Tensor
    # In e4m3: factor of a row's scores, in log2 units or as `change` needs it.
    factor: cute.Tensor | None


def make_reference(plan: AttentionPlan) -> Reference:
    factor = cute.make_rmem_tensor(2, Float32) if plan.config.is_fp8 else None
    return Reference(*(cute.make_rmem_tensor(2, Float32) for _ in range(4)), factor)


@cute.jit
def begin_row(
    plan: AttentionPlan, reference: Reference, lane: Lane, work: Work, scope: Scope
) -> None:
    """Initialise the reference of rows that have seen no key."""
    reference.row_sum.fill(0.0)
    for half in cutlass.range_constexpr(2):
        if cutlass.const_expr(plan.config.is_fp8):
            factor = scope.scalars.scale_log2
            if cutlass.const_expr(plan.config.scales_first):
                factor = scope.scalars.softcap_log2
            scale = score_scale(scope.tensors.tables, work, lane.rows[half].head)
            if cutlass.const_expr(scale is not None):
                factor = factor * scale
            reference.factor[half] = bounded_factor(factor)
        reference.row_max[half] = hidden(plan, reference, half)


@cute.jit
def scale_of(
    plan: AttentionPlan, reference: Reference, scalars: Scalars, half: cutlass.Constexpr
) -> Float32:
    """Return the factor of a row's scores inside exp2; negative only in `signed` kernels."""
    if cutlass.const_expr(plan.config.is_fp8 and not plan.config.scales_first):
        return reference.factor[half]
    return scalars.scale_log2


def signed(plan: AttentionPlan) -> bool:
    """Whether `scale_of` may be negative. Scores that are scaled first have the sign."""
    return (plan.config.q_scale or plan.config.k_scale) and not plan.config.scales_first


@cute.jit
def hidden(plan: AttentionPlan, reference: Reference, half: cutlass.Constexpr) -> Float32:
    """Return the score of keys that a row does not see, and its top while it has seen none."""
    score = -Float32.inf
    if cutlass.const_expr(signed(plan)):
        score = Float32.inf if reference.factor[half] < 0.0 else score
    return score


@cute.jit
def base_of(
    plan: AttentionPlan, reference: Reference, half: cutlass.Constexpr, top: Float32
) -> Float32:
    """`top` of a row as a base for weights: any finite base gives 0 to hidden keys."""
    return Float32(0.0) if top == hidden(plan, reference, half) else top


@cute.jit
def mask(
    plan: AttentionPlan,
    scores: cute.Tensor,
    reference: Reference,
    lane: Lane,
    key: Int32,
    begin: int,
    end: int,
) -> None:
    """Hide the keys that a row does not see, in elements [begin, end).

    Args:
        begin, end: multiples of 4.
        key: first key of the tile.
    """
    view = RowView(2, begin, end)
    for half in cutlass.range_constexpr(2):
        row, config = lane.rows[half], plan.config
        keep_columns(
            scores,
            row.end,
            row.begin if cutlass.const_expr(config.left) else None,
            row.sink_end if cutlass.const_expr(config.sink_tokens) else None,
            view,
            half,
            key + lane.column,
            hidden(plan, reference, half),
        )
        if cutlass.const_expr(config.tree):
            unseen, first = hidden(plan, reference, half), key + lane.column
            keep_branch(scores, row.branch, view, half, first, unseen)


@cute.jit
def change(
    plan: AttentionPlan,
    scores: cute.Tensor,
    reference: Reference,
    lane: Lane,
    scope: Scope,
    key: Int32,
    begin: int,
    end: int,
) -> None:
    """Apply the softcap or the score_mod to elements [begin, end). key: first key of the tile."""
    factors = scope.scalars.softcap_log2
    if cutlass.const_expr(plan.config.is_fp8):
        factors = (reference.factor[0], reference.factor[1])
    if cutlass.const_expr(plan.config.softcap):
        softcap_scores(scores, factors, RowView(2, begin, end))
    else:
        spots, tables = (lane.rows[0].spot, lane.rows[1].spot), scope.tensors.tables.score_mod
        first, view = key + lane.column, RowView(2, begin, end)
        program = parsed(plan.config.score_mod)
        change_scores(program, scores, spots, tables, first, factors, view)


@cute.jit
def hide(
    plan: AttentionPlan,
    scores: cute.Tensor,
    reference: Reference,
    lane: Lane,
    scope: Scope,
    key: Int32,
    begin: int,
    end: int,
) -> None:
    """Hide keys by the mask_mod, in elements [begin, end). key: first key of the tile."""
    spots, tables = (lane.rows[0].spot, lane.rows[1].spot), scope.tensors.tables.mask_mod
    unseen = (hidden(plan, reference, 0), hidden(plan, reference, 1))
    first, view = key + lane.column, RowView(2, begin, end)
    hide_scores(parsed(plan.config.mask_mod), scores, spots, tables, first, unseen, view)


@cute.jit
def largest(
    plan: AttentionPlan, scores: cute.Tensor, reference: Reference
) -> tuple[Float32, Float32]:
    """Return the tops of the two rows so far, over this warpgroup's keys."""
    found = []
    for half in cutlass.range_constexpr(2):
        # Two chains, so that one does not wait for the other.
        top, other = reference.row_max[half], scores[2 * half + 1]
        if cutlass.const_expr(signed(plan)):
            # The smallest score is the largest of the negated ones. A branch costs registers.
            sign = Float32(-1.0) if reference.factor[half] < 0.0 else Float32(1.0)
            top, other = top * sign, other * sign
        for quad in cutlass.range_constexpr(0, cute.size(scores), 4):
            first, second = scores[quad + 2 * half], scores[quad + 2 * half + 1]
            if cutlass.const_expr(signed(plan)):
                first, second = first * sign, second * sign
            top = cute.arch.fmax(top, first)
            if cutlass.const_expr(quad > 0):
                other = cute.arch.fmax(other, second)
        top = cute.arch.fmax(top, other)
        for step in cutlass.range_constexpr(2):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
        if cutlass.const_expr(signed(plan)):
            top = top * sign
        found.append(top)
    return tuple(found)


@cute.jit
def asked(reference: Reference, sums: tuple[Float32, Float32]) -> tuple[Boolean, Boolean]:
    """Whether each row needs a new maximum: the sum of any of its four lanes is above the limit."""
    rows = []
    for half in cutlass.range_constexpr(2):
        mine = Int32(not (sums[half] <= reference.limit[half]))
        for step in cutlass.range_constexpr(2):
            mine = mine | cute.arch.shuffle_sync_bfly(mine, offset=1 << step)
        rows.append(mine != 0)
    return tuple(rows)


@cute.jit
def tops_of(
    reference: Reference, tops: tuple[Float32, Float32], rows: tuple[Boolean, Boolean]
) -> tuple[Float32, Float32]:
    """Return `tops` for the rows that asked, and the present maximum for the others."""
    first = tops[0] if rows[0] else reference.row_max[0]
    second = tops[1] if rows[1] else reference.row_max[1]
    return first, second


@cute.jit
def refer_to(
    plan: AttentionPlan, tops: tuple[Float32, Float32], reference: Reference, scalars: Scalars
) -> tuple[Float32, Float32]:
    """Make `tops` the reference of weights and sums; return the factors for O of each row.

    A row that has seen no key gets limit 0, so its first visible score always sets a maximum, even
    one so negative that exp2 would underflow.
    """
    factors = []
    for half in cutlass.range_constexpr(2):
        scale_log2 = scale_of(plan, reference, scalars, half)
        top = tops[half]
        base = base_of(plan, reference, half, top)
        factor = cute.math.exp2((reference.row_max[half] - base) * scale_log2, fastmath=True)
        reference.row_max[half] = top
        reference.row_sum[half] = reference.row_sum[half] * factor
        nothing = top == hidden(plan, reference, half)
        far = is_far(base, scale_log2)
        most = Float32(FLT_MAX if plan.config.is_fp8 else 2.0**plan.config.lag_log2)
        shift, limit = -base * scale_log2, most
        if far:
            shift, limit = Float32(0.0), Float32(-1.0)
        if nothing:
            shift, limit = Float32(FLT_MAX), Float32(0.0)
        if cutlass.const_expr(plan.config.is_fp8):
            shift = shift + plan.config.bias_log2
        reference.shift[half], reference.limit[half] = shift, limit
        factors.append(factor)
    return tuple(factors)


@cute.jit
def bring_near(
    plan: AttentionPlan, scores: cute.Tensor, reference: Reference, scalars: Scalars
) -> None:
    """Subtract the maximum from the scores of far rows, whose `shift` does not include it."""
    far, offsets = Boolean(False), []
    for half in cutlass.range_constexpr(2):
        base = base_of(plan, reference, half, reference.row_max[half])
        mine = is_far(base, scale_of(plan, reference, scalars, half))
        offsets.append(-base if mine else Float32(0.0))
        far = far or mine
    every = RowView(2, 0, cute.size(scores))
    for _ in cutlass.range(once(cute.arch.vote_any_sync(far)), unroll=1):
        for number in cutlass.range_constexpr(cute.size(scores)):
            scores[number] = scores[number] + offsets[every.row_of(number)]


@cute.jit
def exponentiate(
    plan: AttentionPlan,
    scores: cute.Tensor,
    reference: Reference,
    scalars: Scalars,
    begin: int,
    end: int,
) -> None:
    """Replace elements [begin, end) by exp2 of the score in log2 units minus its reference."""
    scales = tuple(scale_of(plan, reference, scalars, half) for half in range(2))
    shifts = (reference.shift[0], reference.shift[1])
    view = RowView(2, begin, end)
    online_softmax.exponentiate(scores, scales, shifts, plan.layout.exp2_share, view)


@cute.jit
def tile_sums(plan: AttentionPlan, weights: cute.Tensor, p: cute.Tensor) -> tuple[Float32, Float32]:
    """Return the sums of this thread's weights of each row, infinite if a weight is too large for
    P.
    """
    sums = []
    for half in cutlass.range_constexpr(2):
        total, other = weights[2 * half], weights[2 * half + 1]
        for quad in cutlass.range_constexpr(4, cute.size(weights), 4):
            total = total + weights[quad + 2 * half]
            other = other + weights[quad + 2 * half + 1]
        total = total + other
        if cutlass.const_expr(plan.config.is_fp8):
            total = Float32.inf if is_full(p, half) else total
        sums.append(total)
    return tuple(sums)


@cute.jit
def is_full(p: cute.Tensor, half: cutlass.Constexpr) -> Boolean:
    """Return whether an e4m3 of the row is NaN or 448, to which larger values saturate."""
    words = cute.recast_tensor(p, Uint32)
    found = Uint32(0)
    for number in cutlass.range_constexpr(half, cute.size(words), 2):
        found = found | (words[number] + FULL_CARRIES)
    return found & SIGNS != 0


@cute.jit
def too_large(lane: Lane, reference: Reference, sums: tuple[Float32, Float32]) -> Boolean:
    """Return whether a weight may be above the limit, is NaN, or has no reference.

    Rows that the entry does not have are ignored: results must not depend on their contents.
    """
    first = sums[0] <= reference.limit[0] or not lane.real[0]
    second = sums[1] <= reference.limit[1] or not lane.real[1]
    return not (first and second)


@cute.jit
def take_up(reference: Reference, sums: tuple[Float32, Float32]) -> None:
    """Add the sums of a tile's weights to those of the rows."""
    for half in cutlass.range_constexpr(2):
        reference.row_sum[half] = reference.row_sum[half] + sums[half]


@cute.jit
def over_lanes(row_sum: cute.Tensor) -> None:
    """Sum row_sum (2,) over the four lanes of a row."""
    for half in cutlass.range_constexpr(2):
        total = row_sum[half]
        for step in cutlass.range_constexpr(2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        row_sum[half] = total


@cute.jit
def rescale(o: cute.Tensor, factors: tuple[Float32, Float32]) -> None:
    """Multiply the two rows of O by their factors."""
    every = RowView(2, 0, cute.size(o))
    for number in cutlass.range_constexpr(cute.size(o)):
        o[number] = o[number] * factors[every.row_of(number)]


@cute.jit
def round_weights(plan: AttentionPlan, scores: cute.Tensor, p: cute.Tensor) -> None:
    """Round weights to the A operand of the next product: the same elements in the same order.

    Uses `pack`: LLVM moves plain conversions to where P is used, where no exponentials are left to
    overlap with them.
    """
    words = cute.recast_tensor(p, Uint32)
    for number in cutlass.range_constexpr(cute.size(words)):
        if cutlass.const_expr(plan.config.is_fp8):
            first = number // 2 * 8 + number % 2 * 2  # of a row; the next two are 8 keys further
            four = (scores[first + place] for place in (0, 1, 4, 5))
            words[number] = pack_e4m3(*four)
        else:
            words[number] = pack(scores[2 * number], scores[2 * number + 1], plan.config.dtype)
