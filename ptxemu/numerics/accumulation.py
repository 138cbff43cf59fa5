"""Sums as tensor cores compute them: terms aligned to the largest exponent among products and C.

Products are exact. Each product and C is truncated a number of bits below the leading bit of the
largest exponent. The terms are added exactly, so their order does not matter. The sum is truncated
to f32, or rounded to nearest even to f16. Exponents are those of the operands; subnormal numbers
have the least exponent of their type. A carry of a product such as 1.5 * 1.5 does not change its
exponent.

Measured on an H100 for sm_90a (`scripts/conformance.py --questions`): 25 bits for f16, bf16 and
tf32; 13 bits for FP8 in wgmma. Its f32 results keep 13 bits, too, as DeepSeek-V3's report states.
FP8 in mma.sync is converted to f16 there and summed from zero. Elements 0, 1, 4, 5, ... along K are
summed first, then the others are added to that sum, both in D's type. C is added in the end, with
one rounding.

ptxas of CUDA 13.0 and 13.5 makes the same code (F2FP, two HMMA, FADD or HADD2) for sm_100, sm_103
and sm_110, whose tensor cores have FP8 in tcgen05.mma alone. sm_89, sm_120 and sm_121 have one
QMMA. For newer GPUs MMA-Sim (arXiv:2511.10909, github.com/microsoft/MMA-Sim) claims 25 bits for all
of this, including tcgen05.mma without scales. We could not check this.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ptxemu.errors import UnsupportedPtx
from ptxemu.numerics import formats
from ptxemu.numerics.formats import CANONICAL_NAN_F32, f64_to_f32

# exponents of the least normal numbers
_LEAST = {
    **dict.fromkeys(("f32", "bf16", "tf32"), -126),
    **dict.fromkeys(("f16", "e5m2"), -14),
    "e4m3": -6,
    "e3m2": -2,
    **dict.fromkeys(("e2m3", "e2m1"), 0),
}
_FP8 = ("e4m3", "e5m2")
_HOPPER = ("f16", "bf16", "tf32", *_FP8)
_WITHOUT_QMMA = (90, 100, 101, 103, 110)  # whose mma.sync turns FP8 into f16
_NOTHING = -4096  # the exponent of zero, which moves nobody
_AT_ONCE = 1 << 18  # products, so that what is written is still in a cache when it is read
_F32_BITS = 23


class Rule(NamedTuple):
    """Precision of sums.

    bits: number of bits of a term below the largest exponent.
    kept: number of bits of an f32 result below its leading bit.
    split: whether FP8 goes through f16, in two sums.
    """

    bits: int
    kept: int = _F32_BITS
    split: bool = False


class Types(NamedTuple):
    """Types of a product's matrices, named as in PTX; C has the type of D."""

    d: str
    a: str
    b: str


@lru_cache(maxsize=256)
def rule(instruction: str, target: str, types: Types) -> Rule:
    """Return how the GPU of a `.target` sums in "mma.sync", "wgmma.mma_async" or "tcgen05.mma".

    Raises UnsupportedPtx if neither a GPU nor a publication documents it.
    """
    digits = re.match(r"sm_(\d+)", target)
    version = int(digits[1]) if digits else 0
    eight, known = types.a in _FP8, {types.a, types.b}.issubset(_HOPPER)
    if instruction == "wgmma.mma_async" and version == 90 and known:
        return Rule(13, 13) if eight else Rule(25)
    if instruction == "mma.sync" and (version >= 100 or (version == 90 and known)):
        return Rule(25, split=eight and version in _WITHOUT_QMMA)
    if instruction == "tcgen05.mma" and version >= 100:
        return Rule(25)  # MMA-Sim's claim
    raise unknown(f"{instruction} of {types.d}.{types.a}.{types.b}, .target {target or 'none'}")


def unknown(what: str) -> UnsupportedPtx:
    """Return the error for sums that have not been measured."""
    return UnsupportedPtx(f"accumulation='aligned': how {what} sums is not known")


def accumulate(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, types: Types, how: Rule
) -> np.ndarray:
    """D = A B^T + C, rounded to its type, as float32 (m, n).

    a (m, k), b (n, k), c (m, n) or None for zeros: float32 with values of their types.
    """
    if c is None:
        c = np.zeros((len(a), len(b)), np.float32)
    if not how.split:
        return _aligned(a, b, c, types, how)
    halves, total = Types(types.d, "f16", "f16"), np.zeros_like(c)
    columns = np.arange(a.shape[1])
    for mine in (columns % 4 < 2, columns % 4 >= 2):
        total = _aligned(a[:, mine], b[:, mine], total, halves, how)
    return _rounded(total.astype(np.float64) + c, types.d)


def _aligned(a: np.ndarray, b: np.ndarray, c: np.ndarray, types: Types, how: Rule) -> np.ndarray:
    """Return one aligned sum, computed for some rows of A at a time."""
    a, b, c = (matrix.astype(np.float64) for matrix in (a, b, c))
    of_a, of_b, of_c = (
        _exponents(x, type_) for x, type_ in ((a, types.a), (b, types.b), (c, types.d))
    )
    total = np.empty_like(c)
    rows = max(1, _AT_ONCE // b.size)
    for start in range(0, len(a), rows):
        part = slice(start, start + rows)
        total[part] = _sums(a[part], b, c[part], (of_a[part], of_b, of_c[part]), how)
    plain = a @ b.T + c  # beyond f32 nothing overflows in it
    special = ~np.isfinite(plain)
    if special.any():
        total = np.where(special, plain, total)
    return _finished(total, types.d, how.kept)


def _exponents(values: np.ndarray, type_: str) -> np.ndarray:
    found = np.maximum(np.frexp(values)[1] - 1, _LEAST[type_])
    return np.where(values == 0, np.int32(_NOTHING), found)


def _sums(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray,
    powers: tuple[np.ndarray, np.ndarray, np.ndarray],
    how: Rule,
) -> np.ndarray:
    """float64, exact: terms are integers of at most 28 bits once they are cut off."""
    of_a, of_b, of_c = powers
    top = np.maximum((of_a[:, None, :] + of_b).max(axis=2), of_c)
    shift = how.bits - top
    terms = np.ldexp(a[:, None, :] * b, shift[:, :, None])
    whole = np.trunc(terms, out=terms).sum(axis=2) + np.trunc(np.ldexp(c, shift))
    return np.ldexp(whole, -shift)


def _finished(total: np.ndarray, type_: str, kept: int) -> np.ndarray:
    """Round to the type of D, as float32: to nearest even for f16, else truncate.

    Zeros are positive.
    """
    if type_ == "f16":
        return _rounded(total, type_)
    out = f64_to_f32(total, "rz")
    if kept < _F32_BITS:
        mask = np.uint32(0xFFFFFFFF << (_F32_BITS - kept) & 0xFFFFFFFF)
        out = np.where(np.isfinite(out), (out.view(np.uint32) & mask).view(np.float32), out)
    out = np.where(np.abs(total) >= 2.0**128, np.copysign(np.float32(np.inf), total), out)
    return _canonical(out.astype(np.float32, copy=False))


def _rounded(total: np.ndarray, type_: str) -> np.ndarray:
    """Round to nearest even, as float32."""
    if type_ == "f16":
        return _canonical(formats.f16_to_f32(formats.f64_to_f16(total).astype(np.uint16)))
    return _canonical(total.astype(np.float32))


def _canonical(values: np.ndarray) -> np.ndarray:
    values = np.where(np.isnan(values), CANONICAL_NAN_F32, values)
    return np.where(values == 0, np.float32(0), values)
