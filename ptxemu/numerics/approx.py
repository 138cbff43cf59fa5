"""The `.approx` instructions of PTX by fixed tables and polynomials: the same bits everywhere.

Hardware's own bits are not specified, only error bounds and special values (PTX ISA,
"Floating-Point Instructions": ex2, lg2, rcp, rsqrt, sqrt, sin, cos, tanh, div). These functions
hold both, using nothing but correctly rounded elementary operations: no libm, no vectorised
transcendental. Tables come from decimal arithmetic at import, which is the same everywhere.
Arguments and results are float32 arrays, or uint16 codes for f16 and bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ptxemu.numerics import formats
from ptxemu.numerics.arith import div_f32, flushed, rcp_f32, sqrt_f32
from ptxemu.numerics.formats import CANONICAL_NAN_F32, canonical_nan_f32, flush_f32, has_nan

_EXP_STEPS = 64  # exp2 table entries per octave
_EXP_LOWEST, _EXP_HIGHEST = -151, 128  # 2^x is 0 at the former and infinite at the latter
_LOG_STEPS = 64  # log2 table entries per octave
_LOG_ORIGIN = 0.6875  # log2 reduces to [0.6875, 1.375), a range that holds 1 well inside


class _ExpTable(NamedTuple):
    """2^(k/64) for all f32 exponents, and c1 r + c2 r^2 ~ 2^(r/64) - 1 for r in [0, 1]."""

    full: np.ndarray
    normal: np.ndarray  # the same with 0 below 2^-126: .ftz costs nothing
    c1: np.float32
    c2: np.float32


def _exp_table() -> _ExpTable:
    """Build the exp2 table.

    With L = ln(2)/64 the coefficients are L r + L^2 r^2/2 plus the best quadratic a r^2 + b r for
    L^3 r^3/6: what remains is a Chebyshev cubic with one zero at r = 0, so that 2^n stays exact;
    the error is below 2^-26.8.
    """
    with localcontext() as context, np.errstate(over="ignore", under="ignore"):
        context.prec = 40
        unit = Decimal(2).ln() / _EXP_STEPS
        octave = np.array([float((unit * k).exp()) for k in range(_EXP_STEPS)])
        scales = np.ldexp(1.0, np.arange(_EXP_LOWEST, _EXP_HIGHEST + 1))
        full = np.outer(scales, octave).astype(np.float32).ravel()
        half = Decimal(3).sqrt() / 2
        a, b = 3 * half / (1 + half), Decimal("-1.5") / (1 + half) ** 2
        c1 = np.float32(float(unit + b * unit**3 / 6))
        c2 = np.float32(float(unit**2 / 2 + a * unit**3 / 6))
    normal = full.copy()
    normal[: (-126 - _EXP_LOWEST) * _EXP_STEPS] = 0
    return _ExpTable(full, normal, c1, c2)


class _LogTable(NamedTuple):
    """Per slice of [0.6875, 1.375): a factor near 1/m, and -log2 of that factor."""

    inverse: np.ndarray
    log2: np.ndarray
    series: tuple[float, ...]  # Taylor coefficients of log2(1 + r), from r^4 down to r


def _log_table() -> _LogTable:
    """Build the log2 table; the slices on both sides of 1 use the factor 1, so log2(1) is +0."""
    origin = int(np.float64(_LOG_ORIGIN).view(np.int64))
    starts = (origin + (np.arange(_LOG_STEPS + 1, dtype=np.int64) << 46)).view(np.float64)
    inverse, log2 = [], []
    with localcontext() as context:
        context.prec = 40
        ln2 = Decimal(2).ln()
        for low, high in pairwise(starts):
            factor = 1.0 if 1.0 in (low, high) else float(np.float32(2.0 / (low + high)))
            inverse.append(factor)
            log2.append(float(-Decimal(factor).ln() / ln2))
        series = tuple(float(Decimal(c) / ln2) for c in ("-0.25", "1", "-0.5", "1"))
        series = (series[0], float(1 / (3 * ln2)), series[2], series[3])
    return _LogTable(np.array(inverse), np.array(log2), series)


_EXP = _exp_table()
_LOG = _log_table()


def _exp2_parts(x: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split 2^x into a table value T and a small q with 2^x = T + T q (q >= 0)."""
    scaled = np.minimum(np.maximum(x, np.float32(_EXP_LOWEST)), np.float32(_EXP_HIGHEST))
    scaled *= np.float32(_EXP_STEPS)
    whole = np.floor(scaled)
    scaled -= whole
    whole -= np.float32(_EXP_LOWEST * _EXP_STEPS)
    value = table.take(whole.astype(np.intp), mode="clip")  # clip: a NaN has no index
    q = scaled * _EXP.c2
    q += _EXP.c1
    q *= scaled
    return value, q


def ex2_approx(x: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: ex2. Bound: 2 ulp of the correctly rounded result."""
    x = np.asarray(x, dtype=np.float32)
    value, q = _exp2_parts(x, _EXP.normal if ftz else _EXP.full)
    q *= value
    q += value
    if has_nan(q):  # NaN in, or infinity * 0 at the top end
        q = np.where(np.isnan(q), np.where(np.isnan(x), CANONICAL_NAN_F32, np.inf), q)
        q = q.astype(np.float32)[()]
    return q


def lg2_approx(x: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: lg2. Bound: 2^-22, absolute within (0.5, 2), else relative."""
    (x,) = flushed(ftz, x)
    wide = np.asarray(x, dtype=np.float64)  # f32 subnormals are normal here
    offset = wide.view(np.int64) - np.float64(_LOG_ORIGIN).view(np.int64)
    exponent = offset >> 52
    index = (offset >> 46) & (_LOG_STEPS - 1)
    mantissa = (wide.view(np.int64) - (exponent << 52)).view(np.float64)
    r = mantissa * _LOG.inverse.take(index) - 1.0
    poly = np.float64(_LOG.series[0])
    for coefficient in _LOG.series[1:]:
        poly = poly * r + coefficient
    result = (poly * r + _LOG.log2.take(index) + exponent).astype(np.float32)
    regular = (x > 0) & (x < np.inf)
    if np.count_nonzero(regular) != regular.size:
        special = np.where(x == 0, -np.inf, np.where(x > 0, x, CANONICAL_NAN_F32))
        result = np.where(regular, result, special.astype(np.float32))[()]
    return result


def rcp_approx(x: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: rcp.approx. Bound: 1 ulp; this one is correctly rounded."""
    if not ftz:
        return rcp_f32(x)
    quotient = np.divide(1, flush_f32(np.asarray(x, dtype=np.float32)), dtype=np.float32)
    return canonical_nan_f32(flush_f32(quotient))


def sqrt_approx(x: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: sqrt.approx. Bound: 2^-23 relative; correctly rounded here."""
    return sqrt_f32(x, ftz=ftz)


def rsqrt_approx(x: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: rsqrt.approx. Bound: 2^-22.9 relative; 2^-23.9 here."""
    (x,) = flushed(ftz, x)
    return canonical_nan_f32((1.0 / np.sqrt(x.astype(np.float64))).astype(np.float32))


def _upper(x: np.ndarray) -> np.ndarray:
    """The upper half of f64, the lower one zero; subnormals become zero."""
    half = (np.atleast_1d(x).view(np.uint64) & np.uint64(0xFFFFFFFF << 32)).view(np.float64)
    return np.where(np.abs(half) < 2.0**-1022, np.copysign(0, half), half)


def upper_rcp_f64(x: np.ndarray) -> np.ndarray:
    """Floating Point Instructions: rcp.approx.ftz.f64. Only the upper halves of operand and result
    count; the manual gives no bound, and this one is truncated."""
    return _upper(1 / _upper(np.asarray(x, np.float64)))


def upper_rsqrt_f64(x: np.ndarray) -> np.ndarray:
    """Floating Point Instructions: rsqrt.approx.ftz.f64, as `upper_rcp_f64`."""
    return _upper(1 / np.sqrt(_upper(np.asarray(x, np.float64))))


def tanh_approx(x: np.ndarray) -> np.ndarray:
    """Floating Point Instructions: tanh. Bound: 2^-11 relative; subnormals pass through."""
    x = np.asarray(x, dtype=np.float32)
    size = np.abs(x)
    doubled = np.minimum(size, np.float32(10)) * np.float32(2.8853900817779268)  # 2 / ln 2
    value, q = _exp2_parts(doubled, _EXP.full)
    above_one = (value - np.float32(1)) + value * q  # exp(2 |x|) - 1 without cancellation
    result = np.copysign(above_one / (above_one + np.float32(2)), x)
    return canonical_nan_f32(np.where(size < np.float32(2.0**-12), x, result)[()])


def _reduced(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quarter turns of an angle, and the rest in [-pi/4, pi/4]. fmod is exact."""
    angle = np.fmod(np.asarray(x, dtype=np.float64), 6.283185307179586)
    turns = np.rint(angle * 0.6366197723675814)
    return turns, angle - turns * 1.5707963267948966


_SIN_SERIES = (1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1.0)
_COS_SERIES = (-1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1.0)


def _wave(x: np.ndarray, quarter: int) -> np.ndarray:
    """sin of x plus `quarter` quarter turns."""
    turns, rest = _reduced(x)
    square = rest * rest
    sine, cosine = np.float64(_SIN_SERIES[0]), np.float64(_COS_SERIES[0])
    for coefficient in _SIN_SERIES[1:]:
        sine = sine * square + coefficient
    for coefficient in _COS_SERIES[1:]:
        cosine = cosine * square + coefficient
    phase = np.where(np.isnan(turns), 0, turns).astype(np.int64) + quarter
    result = np.where(phase & 1, cosine, sine * rest)
    return np.where(phase & 2, -result, result).astype(np.float32)[()]


def sin_approx(x: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: sin. Bound: 2^-20.5 absolute in [-pi, pi]."""
    (x,) = flushed(ftz, x)
    return canonical_nan_f32(_wave(np.abs(x), 0) * np.copysign(np.float32(1), x))


def cos_approx(x: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: cos. Bound: 2^-20.5 absolute in [-pi, pi]."""
    return canonical_nan_f32(_wave(flushed(ftz, x)[0], 1))


def div_full(a: np.ndarray, b: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: div.full. Bound: 2 ulp; this one is correctly rounded."""
    return div_f32(a, b, ftz=ftz)


def div_approx(a: np.ndarray, b: np.ndarray, *, ftz: bool = False) -> np.ndarray:
    """Floating Point Instructions: div.approx, a * (1/b). Bound: 2 ulp for |b| in [2^-126, 2^126].

    For 2^126 < |b| < 2^128 the reciprocal is flushed: the result is 0, or NaN for infinite a.
    """
    b = np.asarray(b, dtype=np.float32)
    quotient = div_f32(a, b, ftz=ftz)
    size = np.abs(b)
    flushed = (size > np.float32(2.0**126)) & (size < np.inf)
    if np.count_nonzero(flushed):
        product = np.multiply(a, np.copysign(np.float32(0), b), dtype=np.float32)
        quotient = canonical_nan_f32(np.where(flushed, product, quotient)[()])
    return quotient


def _of_codes(
    function: Callable[..., np.ndarray], kind: str, **flags: bool
) -> Callable[..., np.ndarray]:
    """A function of f32 on the codes of f16 or bf16."""
    decode, encode = getattr(formats, f"{kind}_to_f32"), getattr(formats, f"f32_to_{kind}")
    return lambda code: encode(function(decode(code), **flags))


# Half Precision Floating Point Instructions: ex2, tanh. Bounds: 2^-9.9 and 2^-7 relative, 2^-10.987
# and 2^-8 absolute.
ex2_approx_f16 = _of_codes(ex2_approx, "f16")
ex2_approx_bf16 = _of_codes(ex2_approx, "bf16", ftz=True)
tanh_approx_f16, tanh_approx_bf16 = _of_codes(tanh_approx, "f16"), _of_codes(tanh_approx, "bf16")
