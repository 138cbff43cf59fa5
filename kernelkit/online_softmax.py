"""One row of the online softmax in registers (device code).

Weights are exp2(scale_log2 * (s - row_max)): the log2 domain saves a multiplication per element.
row_max is the reference maximum: it may lag the true one by `slack_log2`, because a weight may be
as large as 2 ** slack_log2 without harm, and every time it does not move O need not be rescaled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

CHUNK = 32  # scores per mask word, per conversion and per TMEM store


@cute.jit
def keep_columns(scores: cute.Tensor, visible: Int32) -> None:
    """Scores (N,) at and beyond column `visible` (any integer) become -inf.

    One 32-bit mask per 32 columns; the bit tests then need no comparison per element.
    """
    for chunk in cutlass.range_constexpr(cute.size(scores) // CHUNK):
        kept = visible - chunk * CHUNK
        bits = Uint32(0)
        if kept > 0:
            bits = Uint32(0xFFFFFFFF) >> Uint32(CHUNK - cutlass.min(kept, CHUNK))
        for bit in cutlass.range_constexpr(CHUNK):
            column = chunk * CHUNK + bit
            inside = cutlass.Boolean(bits & Uint32(1 << bit))
            scores[column] = scores[column] if inside else -Float32.inf


@cute.jit
def next_max(
    scores: cute.Tensor, row_max: Float32, scale_log2: Float32, slack_log2: cutlass.Constexpr
) -> tuple:
    """(row_max to use from now on, shrink = what older sums and O are to be multiplied by).

    Where nothing was summed before (row_max = -inf) shrink is 1: there is nothing to rescale.
    """
    top = scores.load().reduce(cute.ReductionOp.MAX, row_max, 0)
    new_max = row_max
    # (-inf) - (-inf) is NaN, the comparison false, and a row that saw no key stays at -inf.
    if (top - row_max) * scale_log2 > slack_log2:
        new_max = top
    shrink = cute.math.exp2((row_max - new_max) * scale_log2, fastmath=True)
    if row_max == -Float32.inf:
        shrink = Float32(1.0)
    return new_max, shrink


@cute.jit
def exponentiate(scores: cute.Tensor, row_max: Float32, scale_log2: Float32) -> None:
    """scores (N,) in place: exp2(scale_log2 * (s - row_max)), 0 where both are -inf."""
    finite_max = row_max
    if row_max == -Float32.inf:
        finite_max = Float32(0.0)
    shift = -finite_max * scale_log2
    for pair in cutlass.range(0, cute.size(scores), 2, unroll_full=True):
        low, high = cute.arch.fma_packed_f32x2(
            (scores[pair], scores[pair + 1]), (scale_log2, scale_log2), (shift, shift)
        )
        scores[pair] = cute.math.exp2(low, fastmath=True)
        scores[pair + 1] = cute.math.exp2(high, fastmath=True)


@cute.jit
def row_total(weights: cute.Tensor) -> Float32:
    """Sum of the weights (N,) in fp32: two interleaved pairs of partial sums, then their sum."""
    first, second = (Float32(0.0), Float32(0.0)), (Float32(0.0), Float32(0.0))
    for quad in cutlass.range_constexpr(0, cute.size(weights), 4):
        first = cute.arch.add_packed_f32x2(first, (weights[quad], weights[quad + 1]))
        second = cute.arch.add_packed_f32x2(second, (weights[quad + 2], weights[quad + 3]))
    total = cute.arch.add_packed_f32x2(first, second)
    return total[0] + total[1]
