"""f16 and bf16 arithmetic of PTX on uint16 codes, each result rounded once.

PTX ISA, "Half Precision Floating-Point Instructions". The packed .f16x2 and .bf16x2 forms are the
same functions on the halves of 32-bit words: `packed(fma_bf16, a, b, c)`. NaN results are 0x7fff.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from ptxemu.numerics.arith import minmax_f32
from ptxemu.numerics.formats import NAN_16, bf16_to_f32, f32_to_bf16, f32_to_f16
from ptxemu.numerics.rounding import f64_to_f32_odd, odd_f64, two_sum

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
    """f16 subnormals, as wider floats, to zero of the same sign."""
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
