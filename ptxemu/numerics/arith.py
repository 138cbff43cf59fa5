"""IEEE arithmetic of PTX for f64, f32, f16 and bf16: one rounding per operation.

Operands are float arrays, or uint16 codes for f16 and bf16; Python and numpy scalars broadcast.
Section titles are those of the PTX ISA, "Floating-Point Instructions" and "Half Precision
Floating-Point Instructions". An f32 NaN result is the canonical one that hardware writes,
0x7fffffff; f64 keeps the payload of an operand; f16 and bf16 give 0x7fff. The packed .f16x2 and
.bf16x2 forms are the same functions on halves of 32-bit words: `packed(fma_bf16, a, b, c)`.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from math import copysign, isfinite, isnan

import numpy as np

from ptxemu.numerics.formats import (
    MIN_NORMAL_F32,
    NAN_16,
    bf16_to_f32,
    canonical_nan_f32,
    f32_to_bf16,
    f32_to_f16,
    f64_to_f32,
    f64_to_f32_odd,
    flush_f32,
    has_nan,
    odd_f64,
    step,
    two_sum,
)

_LOW_29 = np.int64(0x1FFFFFFF)  # f64 mantissa bits that f32 does not have
_TIE_29 = np.int64(0x10000000)
_MIN_NORMAL = np.float64(MIN_NORMAL_F32)


def _finish_f32(result: np.ndarray, sat: bool = False) -> np.ndarray:
    """.sat (to [0, 1], NaN becomes +0), else the canonical NaN."""
    if sat:
        return np.where(result > 0, np.minimum(result, np.float32(1)), np.float32(0))[()]
    return canonical_nan_f32(result)


def flushed(ftz: bool, *operands: np.ndarray) -> tuple[np.ndarray, ...]:
    """The operands as float32, subnormals flushed under .ftz."""
    arrays = tuple(np.asarray(x, dtype=np.float32) for x in operands)
    return tuple(flush_f32(x) for x in arrays) if ftz else arrays


def flush_result(x: np.ndarray, rounding: str) -> np.ndarray:
    """.ftz of an exact (or odd) f64 result: zero if it is below 2^-126 after rounding to 24 bits.

    The exponent of that rounding is unbounded, so a value that only the coarser spacing of f32
    subnormals would round up to 2^-126 is flushed (seen on H100).
    """
    size = np.abs(x)
    if rounding == "rn":
        kept = size >= _MIN_NORMAL * (1 - 2.0**-25)
    else:
        kept = size >= _MIN_NORMAL
        if rounding != "rz":
            outward = np.signbit(x) == (rounding == "rm")
            kept |= outward & (size > _MIN_NORMAL * (1 - 2.0**-24))
    return np.where(kept | np.isnan(x), x, np.copysign(0.0, x))[()]


def _round_sum(x: np.ndarray, y: np.ndarray, rounding: str, ftz: bool) -> np.ndarray:
    """The exact sum of two float64 arrays, rounded once to f32."""
    head, error = two_sum(x, y)
    total = odd_f64(head, error)
    result = f64_to_f32(flush_result(total, rounding) if ftz else total, rounding)
    if rounding == "rm":  # an exact zero from operands of opposite sign is -0 in this mode only
        opposite = (head == 0) & (np.signbit(x) != np.signbit(y))
        result = np.where(opposite, np.float32(-0.0), result)[()]
    return result


def _may_round_twice(total: np.ndarray) -> bool:
    """Whether rounding this inexact f64 sum to f32 might differ from rounding the exact sum.

    Only where the f64 landed on an f32 midpoint, or where f32 is subnormal and its midpoints lie
    elsewhere. NaN counts as normal here.
    """
    ties = (np.asarray(total).view(np.int64) & _LOW_29) == _TIE_29
    if np.count_nonzero(ties):
        return True
    size = np.abs(total)
    below = size <= _MIN_NORMAL
    return bool(np.count_nonzero(below) and np.count_nonzero(below & (size > 0)))


def add_f32(
    a: np.ndarray, b: np.ndarray, rounding: str = "rn", *, ftz: bool = False, sat: bool = False
) -> np.ndarray:
    """Floating Point Instructions: add."""
    if ftz:
        a, b = flushed(ftz, a, b)
    if rounding == "rn":
        total = np.add(a, b, dtype=np.float32)  # exact where it is subnormal
        return _finish_f32(flush_f32(total) if ftz else total, sat)
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    return _finish_f32(_round_sum(a, b, rounding, ftz), sat)


def sub_f32(
    a: np.ndarray, b: np.ndarray, rounding: str = "rn", *, ftz: bool = False, sat: bool = False
) -> np.ndarray:
    """Floating Point Instructions: sub."""
    return add_f32(a, np.negative(b, dtype=np.float32), rounding, ftz=ftz, sat=sat)


def mul_f32(
    a: np.ndarray, b: np.ndarray, rounding: str = "rn", *, ftz: bool = False, sat: bool = False
) -> np.ndarray:
    """Floating Point Instructions: mul."""
    if rounding == "rn" and not ftz:
        return _finish_f32(np.multiply(a, b, dtype=np.float32), sat)
    a, b = flushed(ftz, a, b)
    product = np.multiply(a, b, dtype=np.float64)
    if ftz:
        product = flush_result(product, rounding)
    return _finish_f32(f64_to_f32(product, rounding), sat)


def fma_f32(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    rounding: str = "rn",
    *,
    ftz: bool = False,
    sat: bool = False,
) -> np.ndarray:
    """Floating Point Instructions: fma (and mad). The product is exact in f64, the sum repaired."""
    if ftz:
        a, b, c = flushed(ftz, a, b, c)
    product = np.multiply(a, b, dtype=np.float64)
    if rounding == "rn":
        total = np.add(product, c, dtype=np.float64)
        if not _may_round_twice(total):
            return _finish_f32(total.astype(np.float32), sat)
    return _finish_f32(_round_sum(product, np.asarray(c, dtype=np.float64), rounding, ftz), sat)


def div_f32(a: np.ndarray, b: np.ndarray, rounding: str = "rn", *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: div, the IEEE forms div.{rn,rz,rm,rp}."""
    a, b = flushed(ftz, a, b)
    quotient = np.divide(a, b, dtype=np.float32)
    if rounding != "rn":  # nearest * b is exact in f64, so the residual has the right sign
        residual = a - np.multiply(quotient, b, dtype=np.float64)
        error = np.where(np.signbit(b), -residual, residual)
        quotient = step(quotient.view(np.uint32), error, rounding).view(np.float32)
    if ftz and np.count_nonzero(np.abs(quotient) <= MIN_NORMAL_F32):
        # f64 is fine enough for a quotient of f32 numbers not to land on a threshold
        wide = flush_result(np.divide(a, b, dtype=np.float64), rounding)
        quotient = np.where(wide == 0, wide.astype(np.float32), quotient)[()]
    return _finish_f32(quotient)


def rcp_f32(a: np.ndarray, rounding: str = "rn", *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: rcp, the IEEE forms."""
    return div_f32(np.asarray(np.float32(1)), a, rounding, ftz=ftz)


def sqrt_f32(a: np.ndarray, rounding: str = "rn", *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: sqrt, the IEEE forms."""
    (a,) = flushed(ftz, a)
    root = np.sqrt(a)
    if rounding != "rn":
        residual = a - np.multiply(root, root, dtype=np.float64)
        root = step(root.view(np.uint32), residual, rounding).view(np.float32)
    return _finish_f32(root)


def _extreme(pick_max: bool, a: np.ndarray, b: np.ndarray, nan: bool) -> np.ndarray:
    """min or max of two f32 arrays with the PTX NaN rule and -0 < +0; NaN not yet canonical."""
    if pick_max:
        result = np.maximum(a, b) if nan else np.fmax(a, b)
        preferred = np.uint32(0)
    else:
        result = np.minimum(a, b) if nan else np.fmin(a, b)
        preferred = np.uint32(0x80000000)
    zero = result == 0
    if np.count_nonzero(zero):  # numpy returns either operand when both are zeros
        swap = zero & ((a.view(np.uint32) == preferred) | (b.view(np.uint32) == preferred))
        result = np.where(swap, preferred.view(np.float32), result)
    return result


def minmax_f32(
    op: str,
    *operands: np.ndarray,
    nan: bool = False,
    xorsign_abs: bool = False,
    absolute: bool = False,
    ftz: bool = False,
) -> np.ndarray:
    """Floating Point Instructions: min, max with two or three operands; `op` is 'min' or 'max'.

    `nan`: .NaN (any NaN operand wins; otherwise NaN operands are ignored); `xorsign_abs`:
    .xorsign.abs (two operands); `absolute`: .abs of the three-operand form.
    """
    values = flushed(ftz, *operands)
    inputs = values
    if xorsign_abs or absolute:
        values = tuple(np.abs(x) for x in values)
    result = _fold(op == "max", values, nan)
    if has_nan(result):  # a signalling operand, too, makes one in some of numpy's loops
        result = _fold(op == "max", tuple(canonical_nan_f32(x) for x in values), nan)
    if xorsign_abs:
        signs = (inputs[0].view(np.uint32) ^ inputs[1].view(np.uint32)) & np.uint32(0x80000000)
        result = (np.asarray(result).view(np.uint32) | signs).view(np.float32)
    return canonical_nan_f32(result)[()]


def _fold(pick_max: bool, values: tuple[np.ndarray, ...], nan: bool) -> np.ndarray:
    result = values[0]
    for value in values[1:]:
        result = _extreme(pick_max, result, value, nan)
    return result


min_f32, max_f32 = partial(minmax_f32, "min"), partial(minmax_f32, "max")


def _resigned_f32(change: np.ufunc, a: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: neg, abs."""
    (a,) = flushed(ftz, a)
    return canonical_nan_f32(change(a))


def _resigned_f64(change: np.ufunc, a: np.ndarray) -> np.ndarray:
    """Floating Point Instructions: neg.f64, abs.f64. A NaN keeps its sign (seen on H100)."""
    return _quiet_payload(np.where(np.isnan(a), a, change(a)), a)


neg_f32, abs_f32 = partial(_resigned_f32, np.negative), partial(_resigned_f32, np.abs)
neg_f64, abs_f64 = partial(_resigned_f64, np.negative), partial(_resigned_f64, np.abs)


def minmax_f64(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Floating Point Instructions: min, max on f64. A NaN operand is ignored; -0 < +0; of two NaNs
    the second is the result, made quiet (seen on H100)."""
    wins = a < b if op == "min" else a > b
    wins |= (a == b) & (np.signbit(a) == (op == "min"))
    return _quiet_payload(np.where(wins | np.isnan(b), a, b), b, a)


def _quiet_payload(result: np.ndarray, *operands: np.ndarray) -> np.ndarray:
    """f64 NaN results: the first NaN of `operands`, made quiet, else the default NaN.

    Hardware (H100) looks at b, then the addend, then a.
    """
    if not has_nan(result):
        return result
    bits = np.full(np.shape(result), 0xFFF8000000000000, dtype=np.uint64)
    for x in reversed(operands):
        x = np.asarray(x, dtype=np.float64)
        bits = np.where(np.isnan(x), x.view(np.uint64) | np.uint64(1 << 51), bits)
    return np.where(np.isnan(result), bits.view(np.float64), result)[()]


def _fma_exact(a: float, b: float, c: float, rounding: str) -> float:
    """a * b + c of finite doubles with one rounding, by rational arithmetic."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        product_sign = copysign(1, a) * copysign(1, b)
        if product_sign == copysign(1, c):
            return copysign(0.0, c)
        return -0.0 if rounding == "rm" else 0.0
    try:
        nearest = float(exact)
    except OverflowError:
        nearest = float("inf") if exact > 0 else -float("inf")
    if nearest == 0 and exact < 0:
        nearest = -0.0
    if nearest in (float("inf"), -float("inf")):
        error = -nearest
    else:
        error = float((exact > Fraction(nearest)) - (exact < Fraction(nearest)))
    bits = np.asarray(np.float64(nearest)).view(np.uint64)
    return float(step(bits, np.asarray(error), rounding).view(np.float64))


def fma_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Floating Point Instructions: fma.f64. Element by element and exact: f64 is rare here."""
    a, b, c = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (a, b, c)))
    result = np.asarray(a * b + c).copy()
    for where in np.ndindex(result.shape):
        x, y, z = float(a[where]), float(b[where]), float(c[where])
        if isfinite(x) and isfinite(y) and not isnan(z):
            result[where] = _fma_exact(x, y, z, rounding) if isfinite(z) else z
    return _quiet_payload(result[()], b, c, a)


def add_f64(a: np.ndarray, b: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Floating Point Instructions: add.f64."""
    if rounding == "rn":
        return _quiet_payload(np.add(a, b, dtype=np.float64), b, a)
    return fma_f64(a, np.ones(()), b, rounding)


def add_f64_in_memory(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """add.f64 as the atomic unit of global memory computes it.

    A NaN operand is returned unchanged, even a signalling one, the new before the old (seen on
    H100; undefined by the manual).
    """
    total = add_f64(old, new)
    return np.where(np.isnan(new), new, np.where(np.isnan(old), old, total))


def sub_f64(a: np.ndarray, b: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Floating Point Instructions: sub.f64."""
    return add_f64(a, np.where(np.isnan(b), b, np.negative(b)), rounding)


def _directed_f64(
    nearest: np.ndarray, residual: Callable[..., Fraction], rounding: str, *operands: np.ndarray
) -> np.ndarray:
    """The directed rounding of a nearest result. residual(result, *operands): a rational number
    with the sign of exact minus result; asked of finite operands only."""
    if rounding == "rn":
        return nearest
    nearest, *arrays = np.broadcast_arrays(nearest, *operands)
    error = np.zeros(nearest.shape)
    for where in np.ndindex(nearest.shape):
        values, result = [float(x[where]) for x in arrays], float(nearest[where])
        if isnan(result) or not all(map(isfinite, values)) or values[-1] == 0:
            continue  # what is not finite is exact, and so are a root of zero and a quotient by it
        if isfinite(result):
            exact = residual(Fraction(result), *map(Fraction, values))
            error[where] = (exact > 0) - (exact < 0)
        else:  # beyond the largest number
            error[where] = -result
    bits = np.array(nearest, np.float64).view(np.uint64)
    return step(bits, error, rounding).view(np.float64)[()]


def div_f64(a: np.ndarray, b: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Floating Point Instructions: div.f64."""
    nearest = np.divide(a, b, dtype=np.float64)

    def residual(quotient: Fraction, x: Fraction, y: Fraction) -> Fraction:
        return (x - quotient * y) / y

    return _directed_f64(nearest, residual, rounding, a, b)


def rcp_f64(a: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Floating Point Instructions: rcp.f64."""
    return div_f64(np.ones_like(a, np.float64), a, rounding)


def sqrt_f64(a: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Floating Point Instructions: sqrt.f64."""
    return _directed_f64(np.sqrt(a), lambda root, x: x - root * root, rounding, np.asarray(a))


def mul_f64(a: np.ndarray, b: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """Floating Point Instructions: mul.f64."""
    if rounding == "rn":
        return _quiet_payload(np.multiply(a, b, dtype=np.float64), b, a)
    zero = np.where(np.signbit(a) ^ np.signbit(b), -0.0, 0.0)  # keeps the sign of a zero product
    return fma_f64(a, b, zero, rounding)


_MIN_NORMAL_F16 = 2.0**-14
_ROUNDS_TO_NORMAL_F16 = _MIN_NORMAL_F16 * (1 - 2.0**-12)


def packed(fn: Callable[..., np.ndarray], *words: np.ndarray, **flags: bool) -> np.ndarray:
    """Apply a 16-bit operation to both halves of uint32 words (.f16x2, .bf16x2)."""
    words = np.broadcast_arrays(*(np.asarray(w, dtype=np.uint32) for w in words))
    halves = (np.ascontiguousarray(w).view(np.uint16) for w in words)
    return fn(*halves, **flags).view(np.uint32).reshape(words[0].shape)[()]


def _modified(code: np.ndarray, relu: bool, sat: bool, one: int) -> np.ndarray:
    """.relu (negative becomes +0) or .sat (to [0, 1], NaN becomes +0), then the canonical NaN."""
    infinity = 0x7C00 if one == 0x3C00 else 0x7F80
    nan = (code & np.uint16(0x7FFF)) > infinity
    if relu or sat:
        code = np.where(code >> np.uint16(15), np.uint16(0), code)
    if sat:
        return np.where(nan, np.uint16(0), np.minimum(code, np.uint16(one)))[()]
    return np.where(nan, NAN_16, code)[()] if np.count_nonzero(nan) else code


def _flushed_code(a: np.ndarray, ftz: bool) -> np.ndarray:
    """.ftz of an f16 code: no mantissa without an exponent."""
    a = np.asarray(a, np.uint16)
    return a & np.where(a & np.uint16(0x7C00), np.uint16(0xFFFF), np.uint16(0x8000)) if ftz else a


def _resigned(
    change: np.ufunc, bits: int, one: int, a: np.ndarray, *, ftz: bool = False
) -> np.ndarray:
    """Half Precision Floating Point Instructions: neg, abs."""
    return _modified(change(_flushed_code(a, ftz), np.uint16(bits)), False, False, one)


neg_f16 = partial(_resigned, np.bitwise_xor, 0x8000, 0x3C00)
abs_f16 = partial(_resigned, np.bitwise_and, 0x7FFF, 0x3C00)
neg_bf16 = partial(_resigned, np.bitwise_xor, 0x8000, 0x3F80)
abs_bf16 = partial(_resigned, np.bitwise_and, 0x7FFF, 0x3F80)


def _f16_operands(ftz: bool, *codes: np.ndarray) -> list[np.ndarray]:
    """Decode to f64, where sums and products of two f16 are exact."""
    values = [np.asarray(c, np.uint16).view(np.float16).astype(np.float64) for c in codes]
    return [flush_f16(v) for v in values] if ftz else values


def flush_f16(value: np.ndarray) -> np.ndarray:
    """Flush f16 subnormals, as wider floats, to zero of the same sign."""
    return value * (np.abs(value) >= _MIN_NORMAL_F16)


def _f16(
    function: Callable[..., np.ndarray],
    *codes: np.ndarray,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> np.ndarray:
    """Half Precision Floating Point Instructions of f16: a function of f64, rounded once.

    .ftz decides on the value rounded to 11 bits with an unbounded exponent (seen on H100).
    """
    value = np.asarray(function(*_f16_operands(ftz, *codes)))
    if ftz:
        value = value * ((np.abs(value) >= _ROUNDS_TO_NORMAL_F16) | np.isnan(value))
    return _modified(value.astype(np.float16).view(np.uint16), relu, sat, 0x3C00)


add_f16 = partial(_f16, np.add)
sub_f16 = partial(_f16, np.subtract)
mul_f16 = partial(_f16, np.multiply)
# The f64 sum may be inexact, but never on an f16 midpoint: a 22-bit product and an 11-bit addend
# within the exponents of f16 would have to span more than 42 bits below the midpoint bit.
fma_f16 = partial(_f16, lambda x, y, z: x * y + z)


def _bf16_sum(x: np.ndarray, y: np.ndarray, relu: bool = False) -> np.ndarray:
    """The exact sum of two float64 arrays, rounded once to bf16.

    Rounding through f64 and f32 can only go wrong where the f32 is a bf16 midpoint.
    """
    single = np.asarray(x + y).astype(np.float32)
    if np.count_nonzero((single.view(np.uint32) & np.uint32(0xFFFF)) == np.uint32(0x8000)):
        single = f64_to_f32_odd(odd_f64(*two_sum(x, y)))
    return _modified(f32_to_bf16(single), relu, False, 0x3F80)


def _wide(code: np.ndarray) -> np.ndarray:
    """bf16 as f64, where a product of two is exact."""
    return bf16_to_f32(code).astype(np.float64)


def add_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Half Precision Floating Point Instructions: add.bf16."""
    return _bf16_sum(_wide(a), _wide(b))


def sub_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Half Precision Floating Point Instructions: sub.bf16."""
    return _bf16_sum(_wide(a), -_wide(b))


def mul_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Half Precision Floating Point Instructions: mul.bf16."""
    return _bf16_sum(_wide(a) * _wide(b), np.array(-0.0))


def fma_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray, *, relu: bool = False) -> np.ndarray:
    """Half Precision Floating Point Instructions: fma.bf16."""
    return _bf16_sum(_wide(a) * _wide(b), _wide(c), relu)


def minmax_f16(op: str, *codes: np.ndarray, ftz: bool = False, **flags: bool) -> np.ndarray:
    """Half Precision Floating Point Instructions: min, max on f16; flags as `minmax_f32`."""
    values = _f16_operands(ftz, *codes)  # not f16_to_f32: .xorsign reads the sign of a NaN
    return f32_to_f16(minmax_f32(op, *values, **flags))


def minmax_bf16(op: str, *codes: np.ndarray, **flags: bool) -> np.ndarray:
    """Half Precision Floating Point Instructions: min, max on bf16; flags as `minmax_f32`."""
    return f32_to_bf16(minmax_f32(op, *(bf16_to_f32(c) for c in codes), **flags))


min_f16, max_f16 = partial(minmax_f16, "min"), partial(minmax_f16, "max")
min_bf16, max_bf16 = partial(minmax_bf16, "min"), partial(minmax_bf16, "max")
