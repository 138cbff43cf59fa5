"""Conversions between integers and floats, and rounding to an integral float.

PTX ISA, "Data Movement and Conversion Instructions: cvt". Integer results and operands have the
numpy type of their PTX type (int8 to uint64); floats are f32 or f64 arrays.
"""

from __future__ import annotations

import numpy as np

from ptxemu.numerics.formats import f32_to_bf16, f32_to_f16
from ptxemu.numerics.rounding import (
    canonical_nan_f32,
    f64_to_f32,
    f64_to_f32_odd,
    odd_f64,
    step,
    two_sum,
)

_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_f32(x: np.ndarray, rounding: str = "rni") -> np.ndarray:
    """cvt.{rni,rzi,rmi,rpi}.f32.f32: the integral value nearest in the given direction, as f32."""
    return canonical_nan_f32(_INTEGRAL[rounding](np.asarray(x, dtype=np.float32)))


def float_to_int(x: np.ndarray, bits: int, signed: bool, rounding: str = "rzi") -> np.ndarray:
    """cvt.{rni,rzi,rmi,rpi}.{s,u}{8..64}.{f32,f64}: saturating, in the numpy type of the result.

    NaN gives 0 if the source is f32 (or f16, widened) and the result at most 32 bits, else the bit
    pattern with only the top bit set.
    """
    x = np.asarray(x)
    double = x.dtype == np.float64
    kind = np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
    whole = _INTEGRAL[rounding](x.astype(np.float64))
    limits = np.iinfo(kind)
    above, below, unordered = whole >= 2.0 ** (bits - signed), whole < limits.min, np.isnan(whole)
    result = np.where(above | below | unordered, 0, whole).astype(kind)
    result = np.where(above, kind.type(limits.max), result)
    result = np.where(below, kind.type(limits.min), result)
    if double or bits == 64:
        top = kind.type(limits.min if signed else 1 << (bits - 1))
        result = np.where(unordered, top, result)
    return result.astype(kind)[()]


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An integer array as the unevaluated sum of a float64 and its rounding error."""
    x = np.asarray(x)
    if x.dtype.itemsize < 8:
        value = x.astype(np.float64)
        return value, np.zeros_like(value)
    high = (x >> x.dtype.type(32)).astype(np.float64) * 2.0**32
    return two_sum(high, (x & x.dtype.type(0xFFFFFFFF)).astype(np.float64))


def int_to_f32(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """cvt.{rn,rz,rm,rp}.f32.{s,u}N: one rounding for every integer type."""
    return f64_to_f32(odd_f64(*_split(x)), rounding)


def int_to_f64(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """cvt.{rn,rz,rm,rp}.f64.{s,u}N."""
    head, error = _split(x)
    return step(np.asarray(head).view(np.uint64), error, rounding).view(np.float64)


def int_to_f16(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """cvt.{rn,rz,rm,rp}.f16.{s,u}N, as uint16 codes."""
    return f32_to_f16(f64_to_f32_odd(odd_f64(*_split(x))), rounding)


def int_to_bf16(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """cvt.{rn,rz,rm,rp}.bf16.{s,u}N, as uint16 codes."""
    return f32_to_bf16(f64_to_f32_odd(odd_f64(*_split(x))), rounding)
