"""The online softmax in the registers of a thread, which has one row or two (device code).

Weights are exp2(scale_log2 * (s - row_max)): the log2 domain saves a multiplication per element.
row_max is the reference maximum: it may lag the true one by `slack_log2`, because a weight may be
as large as 2 ** slack_log2 without harm, and every time it does not move O need not be rescaled.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Uint64

from kernelkit.device.control import once
from kernelkit.plan.limits import FLT_MAX
from kernelkit.plan.log2 import LN_2, LOG2_E, MAX_FACTOR, MIN_FACTOR

# A row whose maximum is larger than this in log2 units is `far`: the rounding of scale_log2 *
# row_max would show in its weights, so the maximum is subtracted before the multiplication.
FAR_LOG2 = 2.0**14
# Beyond this only scores equal to the row maximum have a weight, see `refer`.
ONE_HOT_LOG2 = 2.0**28
CHUNK = 32  # scores per mask word and per conversion
ALL_BITS = 0xFFFFFFFF


# Numbers of one row that an instruction takes: two where there is arithmetic on pairs.
Numbers = tuple[Float32, ...]
# A number for all rows of a thread, or one for each.
OfRows = Float32 | float | tuple[Float32, ...]


@dataclass(frozen=True)
class RowView:
    """Elements [begin, end) of a thread's scores, seen as rows.

    rows: 1 where the thread has a lane of tensor memory; 2 in an accumulator of wgmma or mma.sync,
        whose element c + 2 h + 4 j belongs to row h and to column c + 8 j.
    begin, end: multiples of 4.
    """

    rows: int
    begin: int
    end: int

    @property
    def width(self) -> int:
        """Elements that an instruction takes: pairs on architectures with tensor memory."""
        return 2 if self.rows == 1 else 1

    @property
    def firsts(self) -> range:
        """First element of what each instruction takes."""
        return range(self.begin, self.end, self.width)

    def row_of(self, element: int) -> int:
        return element // 2 % self.rows

    def chunks(self, row: int) -> list[tuple[int, list[int]]]:
        """(first column, elements) of each CHUNK elements of a row."""
        step = CHUNK * self.rows
        return [
            (
                first if self.rows == 1 else first // 4 * 8,
                [k for k in range(first, min(first + step, self.end)) if self.row_of(k) == row],
            )
            for first in range(self.begin, self.end, step)
        ]

    def columns_below(self, limit: Int32) -> Int32:
        """Number of a row's columns below `limit`, from its first element on; negative for none. In
        two rows the columns are 0, 1, 8, 9, 16, 17, .."""
        return limit if self.rows == 1 else (limit >> 3) * 2 + cutlass.min(limit & 7, 2)

    def gather(self, word: Uint64, start: Int32, columns: int) -> Uint32:
        """Bits of `word`, whose lowest one belongs to column `start`, for a row's first `columns`
        columns."""
        if self.rows == 1:
            return window_of(word, start)
        bits = Uint32(0)
        for first in range(0, 4 * columns, CHUNK):  # four pairs of neighbours in each
            window = window_of(word, start - first)
            for pair in range(0, CHUNK, 8):
                bits = bits | ((window >> pair & 3) << (first + pair) // 4)
        return bits


@dataclass(frozen=True)
class Branch:
    """Tokens that a row sees among the newest ones.

    word: bit j is token j, that of column begin + j; columns before `begin` are not restricted.
    """

    word: Uint64
    begin: Int32


def view_of(scores: cute.Tensor, view: RowView | None) -> RowView:
    """Return `view`; where there is none, all scores belong to one row."""
    return view or RowView(1, 0, cute.size(scores))


def of_row(numbers: OfRows, row: int) -> Float32 | float:
    """Return the number of a row."""
    return numbers[row] if isinstance(numbers, tuple) else numbers


@cute.jit
def softcap_scores(scores: cute.Tensor, softcap_log2: OfRows, view: RowView | None = None) -> None:
    """scores in place: s becomes -1 / (1 + exp(2 s / c)), softcap_log2 being 2 log2(e) / c.

    c tanh(s / c) = c + 2 c * (-1 / (1 + exp(2 s / c))). The softmax has no use for the first c, so
    a softcap costs no more than this, and 2 c becomes part of the scale. It is exact to rounding
    over the whole range, unlike tanh.approx, and +-inf become -0 and -1.
    """
    view = view_of(scores, view)
    for first in view.firsts:
        numbers = tuple(scores[first + k] for k in range(view.width))
        powers = exp2(multiply(numbers, of_row(softcap_log2, view.row_of(first))))
        # Negated here, so that the maximum of the scores stays a maximum.
        negative = multiply_add(powers, -1.0, -1.0)
        for k in cutlass.range_constexpr(view.width):
            scores[first + k] = cute.arch.rcp_approx(negative[k])


@cute.jit
def softcap_score(score: Float32, scale_log2: Float32, softcap_log2: Float32) -> Float32:
    """c tanh(s / c) in log2 units: the formula of `softcap_scores` for one score and as a whole,
    on architectures without arithmetic on pairs. scale_log2 is 2 c log2(e)."""
    power = cute.math.exp2(score * softcap_log2, fastmath=True)
    return scale_log2 * (0.5 - cute.arch.rcp_approx(1.0 + power))


@cute.jit
def keep_columns(
    scores: cute.Tensor,
    end: Int32,
    begin: Int32 | None = None,
    prefix_end: Int32 | None = None,
    view: RowView | None = None,
    row: cutlass.Constexpr = 0,
    first: Int32 | int = 0,
    unseen: Float32 | float = -Float32.inf,
) -> None:
    """Scores of `row` become `unseen` outside [begin, end) and [0, prefix_end); any integers will
    do. first: the column of the thread's first element.

    One 32-bit mask per 32 columns; the bit tests then need no comparison per element.
    """
    view = view_of(scores, view)
    for column, elements in view.chunks(row):
        bits = lowest_bits(view.columns_below(end - (first + column)))
        if cutlass.const_expr(begin is not None):
            bits = bits & ~lowest_bits(view.columns_below(begin - (first + column)))
        if cutlass.const_expr(prefix_end is not None):
            bits = bits | lowest_bits(view.columns_below(prefix_end - (first + column)))
        keep_elements(scores, elements, bits, unseen)


@cute.jit
def keep_branch(
    scores: cute.Tensor,
    branch: Branch,
    view: RowView | None = None,
    row: cutlass.Constexpr = 0,
    first: Int32 | int = 0,
    unseen: Float32 | float = -Float32.inf,
) -> None:
    """Scores of `row` become `unseen` at newest tokens that `branch` does not name. first: the
    column of the thread's first element."""
    view = view_of(scores, view)
    for column, elements in view.chunks(row):
        start = branch.begin - (first + column)
        bits = lowest_bits(view.columns_below(start))
        bits = bits | view.gather(branch.word, start, len(elements))
        keep_elements(scores, elements, bits, unseen)


@cute.jit
def keep_elements(
    scores: cute.Tensor, elements: list[int], bits: Uint32, unseen: Float32 | float
) -> None:
    """Scores of `elements` become `unseen` where their bit is 0."""
    for bit in cutlass.range_constexpr(len(elements)):
        element = elements[bit]
        inside = Boolean(bits & Uint32(1 << bit))
        scores[element] = scores[element] if inside else unseen


@cute.jit
def lowest_bits(count: Int32) -> Uint32:
    """A word whose `count` lowest bits are set, none below 0 and all from 32 on."""
    # PTX shifts out everything by 32 and more; LLVM leaves that undefined.
    above = cute.arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[Uint32(ALL_BITS), Uint32(cutlass.max(count, 0))],
    )
    return ~above


@cute.jit
def window_of(word: Uint64, start: Int32) -> Uint32:
    """Bits of `word`, whose lowest one belongs to column `start`, for columns 0 to 31."""
    # PTX shifts out everything by 64 and more; LLVM leaves that undefined.
    left = cute.arch.inline_ptx(
        "shl.b64 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint64],
        read_only_args=[word, Uint32(cutlass.max(start, 0))],
    )
    moved = cute.arch.inline_ptx(
        "shr.u64 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint64],
        read_only_args=[left, Uint32(cutlass.max(-start, 0))],
    )
    return Uint32(moved & ALL_BITS)


@cute.jit
def top_score(scores: cute.Tensor, row_max: Float32) -> Float32:
    """The largest of the scores (N,) and row_max."""
    return scores.load().reduce(cute.ReductionOp.MAX, row_max, 0)


@cute.jit
def followed(
    top: Float32, row_max: Float32, scale_log2: Float32, slack_log2: cutlass.Constexpr
) -> Float32:
    """Return row_max, or `top` where that is larger by more than the slack."""
    # (-inf) - (-inf) is NaN, the comparison false, and a row that saw no key stays at -inf.
    return top if (top - row_max) * scale_log2 > slack_log2 else row_max


@cute.jit
def next_max(
    top: Float32, row_max: Float32, scale_log2: Float32, slack_log2: cutlass.Constexpr
) -> tuple[Float32, Float32]:
    """(row_max to use from now on, acc_scale = what older sums and O are to be multiplied by).

    top: at least row_max. Where nothing was summed before (row_max = -inf) acc_scale is 1: there is
    nothing to rescale.
    """
    new_max = followed(top, row_max, scale_log2, slack_log2)
    acc_scale = cute.math.exp2((row_max - new_max) * scale_log2, fastmath=True)
    if row_max == -Float32.inf:
        acc_scale = Float32(1.0)
    return new_max, acc_scale


@cute.jit
def refer(
    top: Float32,
    row_max: Float32,
    older: Float32,
    scale_log2: Float32,
    one_hot: Float32,
    slack_log2: cutlass.Constexpr,
) -> tuple[Float32, Float32, Float32, Float32]:
    """Return (row_max, acc_scale, scale, shift): weights are exp2(scale * s + shift) from now on.

    As `next_max`, for rows of any scores whose weights have the exponents of fp32. `shift` is
    -scale_log2 * row_max, rounded. The error of that is a factor that all weights of the row have,
    so it cancels: acc_scale is the exact ratio to weights of the shift before, `older`, and the LSE
    is log2 of the sum less the shift. Up to ONE_HOT_LOG2 the factor is within 2^8. Beyond, the
    fp32 numbers next to row_max are 16 log2 units away and have no weight. So `scale` may be
    smaller than scale_log2 there, and makes the maximum ONE_HOT_LOG2.

    one_hot: ONE_HOT_LOG2 / scale_log2
    top: at least row_max
    """
    new_max = followed(top, row_max, scale_log2, slack_log2)
    base = finite(new_max)
    scale, shift = scale_log2, -base * scale_log2
    exponent = shift - older
    for _ in cutlass.range(once(cute.arch.vote_any_sync(abs(top) > one_hot)), unroll=1):
        if abs(base) > one_hot:
            exponent = (row_max - new_max) * scale_log2
            scale = cute.arch.rcp_approx(abs(base) * (1.0 / ONE_HOT_LOG2))
            shift = -base * scale
    # Above 0 only where nothing was summed before, so that any finite factor will do.
    acc_scale = cute.math.exp2(cute.arch.fmin(exponent, 0.0), fastmath=True)
    return new_max, acc_scale, scale, shift


@cute.jit
def finite(top: Float32) -> Float32:
    """`top` as a base for weights: (-inf) - (-inf) would be NaN, any finite base gives 0."""
    return Float32(0.0) if top == -Float32.inf else top


@cute.jit
def magnitude(factor: Float32) -> Float32:
    """Return |factor| within [MIN_FACTOR, MAX_FACTOR]; NaN stays NaN, which fmin would hide."""
    size = abs(factor)
    size = Float32(MIN_FACTOR) if size < MIN_FACTOR else size
    return Float32(MAX_FACTOR) if size > MAX_FACTOR else size


@cute.jit
def bounded_factor(factor: Float32, power: Float32 | None = None) -> Float32:
    """Return `factor` times `power`, which is above 0, within the same magnitudes; its sign stays,
    also where the product is 0."""
    size = magnitude(factor if cutlass.const_expr(power is None) else factor * power)
    return -size if factor < 0.0 else size


@cute.jit
def negate(scores: cute.Tensor, negative: Boolean) -> None:
    """Negate the scores (N,) of a row whose factor is negative, so that its largest score is the
    one with the largest weight."""
    sign = Float32(-1.0) if negative else Float32(1.0)
    scores.store(scores.load() * sign)


@cute.jit
def is_far(base: Float32, scale_log2: Float32) -> Boolean:
    """Whether `base`, a finite row maximum, is to be subtracted before the multiplication."""
    return abs(base * scale_log2) > FAR_LOG2


@cute.jit
def may_be_far(top: Float32, scale_log2: Float32) -> Boolean:
    """Whether a row whose largest score is `top` may be far; its row_max lags by 2^13 at most. A
    row that saw no key may be, too: a second comparison would take 13 cycles."""
    return abs(top * scale_log2) > FAR_LOG2 / 2


@cute.jit
def bring_near(scores: cute.Tensor, row_max: Float32, scale_log2: Float32) -> None:
    """Subtract the maximum from the scores (N,) of a far row, in place."""
    top = finite(row_max)
    offset = -top if is_far(top, scale_log2) else Float32(0.0)
    scores.store(scores.load() + offset)


@cute.jit
def shift_of(row_max: Float32, scale_log2: Float32, near: cutlass.Constexpr = False) -> Float32:
    """Return what `exponentiate` adds. near: whether `bring_near` came before; without it the row
    may not be far."""
    base = finite(row_max)
    shift = -base * scale_log2
    if cutlass.const_expr(near):
        shift = Float32(0.0) if is_far(base, scale_log2) else shift
    return shift


@cute.jit
def exponentiate(
    scores: cute.Tensor,
    scale_log2: OfRows,
    shift: OfRows,
    by_polynomial: cutlass.Constexpr = 0,
    view: RowView | None = None,
) -> None:
    """scores in place: exp2(scale_log2 * s + shift).

    by_polynomial: number of pairs of scores, out of 16, that go through `exp2_polynomial`, which
    leaves the MUFU to the others.
    """
    view = view_of(scores, view)
    for first in view.firsts:
        row, numbers = view.row_of(first), tuple(scores[first + k] for k in range(view.width))
        powers = multiply_add(numbers, of_row(scale_log2, row), of_row(shift, row))
        if cutlass.const_expr((first // 2 + 1) * by_polynomial % 16 < by_polynomial):
            # The maxima of two rows are checked by their weights: one too large has to be inf.
            powers = exp2_polynomial(powers, view.rows == 2)
        else:
            powers = exp2(powers)
        for k in cutlass.range_constexpr(view.width):
            scores[first + k] = powers[k]


def exp2(exponents: Numbers) -> Numbers:
    """Return exp2 of each number, by the MUFU."""
    return tuple(cute.math.exp2(exponent, fastmath=True) for exponent in exponents)


def multiply(numbers: Numbers, factor: Float32 | float) -> Numbers:
    """Return each number times `factor`."""
    if len(numbers) == 2:
        return cute.arch.mul_packed_f32x2(numbers, (factor, factor))
    return (numbers[0] * factor,)


def add(numbers: Numbers, addend: float) -> Numbers:
    """Return each number plus `addend`."""
    if len(numbers) == 2:
        return cute.arch.add_packed_f32x2(numbers, (addend, addend))
    return (numbers[0] + addend,)


def multiply_add(
    numbers: Numbers, factor: Float32 | float | Numbers, addend: Float32 | float | Numbers
) -> Numbers:
    """Return each number times `factor` plus `addend`, which may be those of each number."""
    factors, addends = (
        given if isinstance(given, tuple) else (given,) * len(numbers) for given in (factor, addend)
    )
    if len(numbers) == 2:
        return cute.arch.fma_packed_f32x2(numbers, factors, addends)
    return (numbers[0] * factors[0] + addends[0],)


# 2^f over -1/2 <= f <= 1/2 is 1 + f (c1 + f (c2 + f c3)), chosen for the least relative error.
EXP2_COEFFICIENTS = (0.693282898, 0.242210975, 0.0550090578)
EXP2_ERROR = 1.02e-4  # relative, of what `exp2_polynomial` returns
LEAST_EXPONENT = -127.0  # 2 to that is 0 here
INFINITE_EXPONENT = 128.0  # 2 to that is inf in fp32
EXPONENT_AT = 23  # bit where the exponent of an fp32 begins
ROUNDER = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to an integer


def exp2_polynomial(exponents: Numbers, bounded: bool) -> Numbers:
    """exp2 of numbers without the MUFU, by Cody and Waite: the nearest integer goes into the
    exponent, the rest through a polynomial. 2^-127 and less are exactly 0.

    bounded: whether 2^128 and more are to be inf; else the exponents have to be below 128, since
    they would run over into the sign.
    """
    x = tuple(cute.arch.fmax(exponent, LEAST_EXPONENT) for exponent in exponents)
    if bounded:
        x = tuple(cute.arch.fmin(exponent, INFINITE_EXPONENT) for exponent in x)
    rounded = add(x, ROUNDER)
    rest = multiply_add(add(rounded, -ROUNDER), -1.0, x)
    c1, c2, c3 = EXP2_COEFFICIENTS
    value = multiply_add(rest, c3, c2)
    value = multiply_add(value, rest, c1)
    value = multiply_add(value, rest, 1.0)
    return tuple(raised(*each) for each in zip(value, rounded, strict=True))


@cute.jit
def raised(value: Float32, rounded: Float32) -> Float32:
    """value * 2^n, n being the integer that `rounded` holds in its lowest bits."""
    bits = value.bitcast(Int32) + (rounded.bitcast(Int32) << EXPONENT_AT)
    return bits.bitcast(Float32)


@cute.jit
def row_total(weights: cute.Tensor, older: Float32, more: Float32 | float = 0.0) -> Float32:
    """older + more + the sum of the weights (N,) in fp32: two interleaved pairs of partial sums,
    then their sum.

    The older sum is where the first of them begins. Added at the end it is an FFMA that a loop
    carries, and then ptxas keeps MUFU.EX2 10 cycles apart instead of 8.
    """
    first, second = (older, Float32(0.0)), (Float32(more), Float32(0.0))
    for quad in cutlass.range_constexpr(0, cute.size(weights), 4):
        first = cute.arch.add_packed_f32x2(first, (weights[quad], weights[quad + 1]))
        second = cute.arch.add_packed_f32x2(second, (weights[quad + 2], weights[quad + 3]))
    total = cute.arch.add_packed_f32x2(first, second)
    return total[0] + total[1]


@cute.jit
def in_log2_units(sink: Float32) -> Float32:
    """Return a sink's logit times log2(e), FLT_MAX at most: inf - inf would be NaN."""
    sink_log2 = sink * LOG2_E
    return Float32(FLT_MAX) if sink_log2 == Float32.inf else sink_log2


@cute.jit
def finish_row(
    max_log2: Float32, row_sum: Float32, sink: Float32 | None = None
) -> tuple[Float32, Float32]:
    """Return (factor of sum(P V), LSE in natural log) of a whole row.

    max_log2: row_max in log2 units; -inf with row_sum 0 if the row saw no key
    sink: natural-log logit of one more key whose value is zero

    Without keys and sink the factor is 0 and LSE is -inf.
    """
    acc_scale, total = Float32(1.0), row_sum
    if cutlass.const_expr(sink is not None):
        sink_log2 = in_log2_units(sink)
        joint = cutlass.max(max_log2, sink_log2)
        base = finite(joint)
        acc_scale = cute.math.exp2(max_log2 - base, fastmath=True)
        total = row_sum * acc_scale + cute.math.exp2(sink_log2 - base, fastmath=True)
        max_log2 = joint
    factor = Float32(0.0)
    if total != 0.0:
        factor = acc_scale * cute.arch.rcp_approx(total)
    return factor, (max_log2 + cute.math.log2(total, fastmath=True)) * LN_2
