"""The online softmax of two rows in the registers of a warpgroup (device code).

Element c + 2 h + 4 j of a thread belongs to row h. Four lanes share a row: its maximum travels
between them for every tile, its sum once at the end. `kernelkit.online_softmax` says what
`row_max`, `scale_log2` and the slack mean.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from fmha.config import EXP2_PAIRS
from fmha.sm90.plan import Plan90
from fmha.sm90.rows import Lane, Row
from kernelkit.online_softmax import (
    EXP2_COEFFICIENTS,
    LEAST_EXPONENT,
    ROUNDER,
    finite,
    lowest_bits,
    next_max,
    raised,
)

CHUNK = 64  # elements of a thread whose 32 of a row share a word of bits
QUAD = 4  # lanes that share a row


@cute.jit
def mask(plan: Plan90, scores: cute.Tensor, lane: Lane, key: Int32) -> None:
    """Keys that a row does not see score -inf. key: with which the tile begins."""
    for half in cutlass.range_constexpr(2):
        row, first = lane.rows[half], key + lane.column
        for chunk in cutlass.range_constexpr(0, cute.size(scores), CHUNK):
            bits = seen(plan, row, first + chunk // 4 * 8)
            for place in cutlass.range_constexpr(min(CHUNK, cute.size(scores) - chunk) // 2):
                number = chunk + place // 2 * 4 + half * 2 + place % 2
                inside = Boolean(bits & Uint32(1 << place))
                scores[number] = scores[number] if inside else -Float32.inf


@cute.jit
def seen(plan: Plan90, row: Row, first: Int32) -> Uint32:
    """Which of a thread's 32 columns, whose first one is key `first`, a row sees: a bit for each."""
    bits = lowest_bits(columns_below(row.end - first))
    if cutlass.const_expr(plan.config.left):
        bits = bits & ~lowest_bits(columns_below(row.begin - first))
    if cutlass.const_expr(plan.config.sink_tokens):
        bits = bits | lowest_bits(columns_below(row.sink_end - first))
    return bits


@cute.jit
def columns_below(limit: Int32) -> Int32:
    """How many of the columns 0, 1, 8, 9, 16, 17, .. are below `limit`; negative for none."""
    return (limit >> 3) * 2 + cutlass.min(limit & 7, 2)


@cute.jit
def softcap(scores: cute.Tensor, softcap_log2: Float32) -> None:
    """`kernelkit.online_softmax.softcap_scores` without arithmetic on pairs."""
    for number in cutlass.range_constexpr(cute.size(scores)):
        power = cute.math.exp2(scores[number] * softcap_log2, fastmath=True)
        scores[number] = cute.arch.rcp_approx(-1.0 - power)


@cute.jit
def move_max(
    plan: Plan90, scores: cute.Tensor, row_max: cute.Tensor, scale_log2: Float32
) -> tuple[Float32, Float32]:
    """row_max (2,) becomes what the tile's weights refer to; returns by what each row's older sums
    and O are to be multiplied."""
    found = []
    for half in cutlass.range_constexpr(2):
        # Two chains, so that one does not wait for the other.
        top, other = row_max[half], scores[2 * half + 1]
        for pair in cutlass.range_constexpr(0, cute.size(scores), 4):
            top = cute.arch.fmax(top, scores[pair + 2 * half])
            if cutlass.const_expr(pair > 0):
                other = cute.arch.fmax(other, scores[pair + 2 * half + 1])
        found.append(cute.arch.fmax(top, other))
    factors = []
    for half in cutlass.range_constexpr(2):
        top = found[half]
        for step in cutlass.range_constexpr(2):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << step))
        new_max, factor = next_max(top, row_max[half], scale_log2, plan.config.rescale_log2)
        row_max[half] = new_max
        factors.append(factor)
    return tuple(factors)


@cute.jit
def exponentiate(
    plan: Plan90, scores: cute.Tensor, row_max: cute.Tensor, scale_log2: Float32
) -> None:
    """scores in place: exp2(scale_log2 * (s - row_max)), 0 where both are -inf."""
    share = plan.layout.exp2_share
    shifts = tuple(-finite(row_max[half]) * scale_log2 for half in range(2))
    for number in cutlass.range_constexpr(cute.size(scores)):
        power = scores[number] * scale_log2 + shifts[number // 2 % 2]
        if cutlass.const_expr((number // 2 + 1) * share % EXP2_PAIRS < share):
            scores[number] = exp2_polynomial(power)
        else:
            scores[number] = cute.math.exp2(power, fastmath=True)


@cute.jit
def exp2_polynomial(exponent: Float32) -> Float32:
    """`kernelkit.online_softmax.exp2_polynomial` of one number."""
    x = cute.arch.fmax(exponent, LEAST_EXPONENT)
    rounded = x + ROUNDER
    rest = x - (rounded - ROUNDER)
    c1, c2, c3 = EXP2_COEFFICIENTS
    value = rest * c3 + c2
    value = value * rest + c1
    value = value * rest + 1.0
    return raised(value, rounded)


@cute.jit
def add_weights(
    weights: cute.Tensor, row_sum: cute.Tensor, factors: tuple[Float32, Float32]
) -> None:
    """row_sum (2,), this thread's part: older sums times their factors, and the tile's weights."""
    for half in cutlass.range_constexpr(2):
        total, other = row_sum[half] * factors[half], weights[2 * half + 1]
        for pair in cutlass.range_constexpr(0, cute.size(weights), 4):
            total = total + weights[pair + 2 * half]
            if cutlass.const_expr(pair > 0):
                other = other + weights[pair + 2 * half + 1]
        row_sum[half] = total + other


@cute.jit
def over_lanes(row_sum: cute.Tensor) -> None:
    """row_sum (2,): the sum of what the four lanes of a row have."""
    for half in cutlass.range_constexpr(2):
        total = row_sum[half]
        for step in cutlass.range_constexpr(2):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=1 << step)
        row_sum[half] = total


@cute.jit
def rescale(o: cute.Tensor, factors: tuple[Float32, Float32]) -> None:
    """Wait for all products, then multiply the rows of O, unless no row of the warp needs it.

    The wait stands behind the branch: in front of it ptxas moves it to where the maximum begins.
    """
    if cute.arch.vote_any_sync(cutlass.min(factors[0], factors[1]) < 1.0):
        warpgroup.wait_group(0)
        for number in cutlass.range_constexpr(cute.size(o)):
            o[number] = o[number] * factors[number // 2 % 2]
    warpgroup.wait_group(0)


@cute.jit
def round_weights(scores: cute.Tensor, p: cute.Tensor) -> None:
    """Weights as the A operand of the next product: the same elements in the same order."""
    for number in cutlass.range_constexpr(0, cute.size(scores), 8):
        source = cute.make_tensor(scores.iterator + number, cute.make_layout(8))
        target = cute.make_tensor(p.iterator + number, cute.make_layout(8))
        target.store(source.load().to(p.element_type))
