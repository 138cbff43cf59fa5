"""What every codec and operation shares: NaN tests, flush to zero, exact sums, directed rounding.

A float is rounded once, always. Where a result passes through a wider format first, the wider value
is made *odd* (round-to-odd: an inexact value gets a last bit of 1), and then no later rounding can
mistake it for a midpoint (Boldo and Melquiond, "When double rounding is odd", 2005).
The caller sets `np.errstate` for a launch; nothing here does.
"""

from __future__ import annotations

import numpy as np

CANONICAL_NAN_F32 = np.uint32(0x7FFFFFFF).view(np.float32)
MIN_NORMAL_F32 = np.float32(2.0**-126)

_ROUNDINGS = ("rn", "rz", "rm", "rp")


def has_nan(x: np.ndarray) -> bool:
    """Whether any element is NaN; the one test that the rare NaN paths cost everybody."""
    return np.count_nonzero(np.isnan(x)) != 0


def canonical_nan_f32(x: np.ndarray) -> np.ndarray:
    """Replace every NaN by 0x7fffffff, the one NaN that single-precision hardware produces."""
    return np.where(np.isnan(x), CANONICAL_NAN_F32, x)[()] if has_nan(x) else x


def flush_f32(x: np.ndarray) -> np.ndarray:
    """`.ftz`: subnormal f32 values become zero of the same sign."""
    return x * (np.abs(x) >= MIN_NORMAL_F32)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knuth's error-free sum of two float64: `head + error` is exactly `a + b`."""
    head = a + b
    virtual = head - a
    return head, (a - (head - virtual)) + (b - virtual)


def odd_f64(head: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Round-to-odd of `head + error`, where `head` is its rounding to nearest even."""
    bits = np.asarray(head).view(np.int64)
    inexact = np.abs(error) > 0  # false for the NaN that an infinite head leaves
    outward = (error > 0) == (head > 0)
    move = inexact & ((bits & 1) == 0)
    return (bits + np.where(move, np.where(outward, 1, -1), 0)).view(np.float64)[()]


def step(bits: np.ndarray, error: np.ndarray, rounding: str) -> np.ndarray:
    """Turn round-to-nearest codes into a directed rounding.

    `bits`: unsigned sign-magnitude codes of the nearest values; `error`: the sign of exact minus
    nearest (NaN and 0 mean exact); `rounding`: 'rn', 'rz', 'rm' or 'rp', as in PTX.
    """
    if rounding == "rn":
        return bits
    if rounding not in _ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}")
    sign_bit = 8 * bits.dtype.itemsize - 1
    negative = (bits >> sign_bit) != 0
    below, above = error < 0, error > 0
    if rounding == "rz":
        wrong = np.where(negative, above, below)
    else:
        wrong = below if rounding == "rm" else above
    outward = below == negative
    one = bits.dtype.type(1)
    return np.where(wrong, np.where(outward, bits + one, bits - one), bits)[()]


def f64_to_f32(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """f64 to f32 with one rounding (PTX ISA: cvt). NaN results are not canonicalised here."""
    x = np.asarray(x, dtype=np.float64)
    nearest = x.astype(np.float32)
    if rounding == "rn":
        return nearest[()]
    return step(nearest.view(np.uint32), x - nearest, rounding).view(np.float32)


def f64_to_f32_odd(x: np.ndarray) -> np.ndarray:
    """f64 to f32 by round-to-odd, for a value that is going to be rounded to 16 bits."""
    x = np.asarray(x, dtype=np.float64)
    chopped = f64_to_f32(x, "rz")
    return (chopped.view(np.uint32) | (chopped != x)).view(np.float32)
