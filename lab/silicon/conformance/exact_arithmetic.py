"""Number formats and IEEE arithmetic on Python numbers: exact results, rounded once.

Nothing of ptxemu is used here: values go through `fractions`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """A floating-point format without its sign; `nan` is the code that hardware writes."""

    bits: int
    mantissa: int  # bits without the leading one
    least: int  # exponent of the smallest normal number
    largest: float
    nan: int


FORMATS = {
    "f64": Format(64, 52, -1022, (2 - 2.0**-52) * 2.0**1023, 0x7FF8 << 48),
    "f32": Format(32, 23, -126, (2 - 2.0**-23) * 2.0**127, 0x7FFFFFFF),
    "f16": Format(16, 10, -14, 65504.0, 0x7FFF),
    "bf16": Format(16, 7, -126, (2 - 2.0**-7) * 2.0**127, 0x7FFF),
    "tf32": Format(32, 10, -126, (2 - 2.0**-10) * 2.0**127, 0x7FFFE000),
    "e4m3": Format(8, 3, -6, 448.0, 0x7F),
    "e5m2": Format(8, 2, -14, 57344.0, 0x7F),
    "e2m3": Format(6, 3, 0, 7.5, 0x1F),
    "e3m2": Format(6, 2, -2, 28.0, 0x1F),
    "e2m1": Format(4, 1, 0, 6.0, 0x7),
}

# -- codes ----------------------------------------------------------------------------------


@cache
def _narrow_values(form: str) -> np.ndarray:
    """The value of every code of a format of at most 8 bits."""
    bits, mantissa, least, largest, _ = FORMATS[form]
    half = 1 << bits - 1
    positive = []
    for code in range(half):
        exponent, fraction = code >> mantissa, (code & (1 << mantissa) - 1) / 2.0**mantissa
        value = (fraction + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 1 + least)
        infinite = form == "e5m2" and exponent == 31 and fraction == 0
        positive.append(value if value <= largest else math.inf if infinite else math.nan)
    return np.array([*positive, *(-value for value in positive)])


def values_of(form: str, codes: np.ndarray) -> np.ndarray:
    """float64 of bit patterns of a float or integer format, whose bits beyond it do not count."""
    if form == "ue8m0":
        return np.where(codes & 255 == 255, np.nan, 2.0 ** ((codes & 255).astype(np.float64) - 127))
    if form == "s2f6":
        return values_of("s8", codes) / 64
    if form[0] in "us":
        size, sign = int(form[1:]) // 8, "i" if form[0] == "s" else "u"
        return codes.astype(f"u{size}").view(f"{sign}{size}").astype(np.float64)
    bits = FORMATS[form].bits
    if bits <= 8:
        return _narrow_values(form)[codes.astype(np.uint8) & (1 << bits) - 1]
    words = codes.astype(f"u{bits // 8}")
    if form == "bf16":
        words = words.astype(np.uint32) << 16
    if form == "tf32":
        words &= 0xFFFFE000
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return words.view(f"f{words.itemsize}").astype(np.float64)


def decode(form: str, codes: Sequence[int]) -> list[float]:
    """`values_of` as Python numbers."""
    return values_of(form, np.array(codes, np.uint64)).tolist()


def encode(form: str, values: Sequence[float]) -> list[int]:
    """The bit patterns of values that the format can represent."""
    if form == "ue8m0":
        return [255 if math.isnan(x) else int(math.log2(x)) + 127 for x in values]
    bits, _, _, _, nan = FORMATS[form]
    if bits <= 8:
        magnitudes = _narrow_values(form)[: 1 << bits - 1].tolist()
        code_of = {x: k for k, x in enumerate(magnitudes)}
        sign = 1 << bits - 1
        return [
            nan if math.isnan(x) else code_of[abs(x)] | (math.copysign(1, x) < 0) * sign
            for x in values
        ]
    kind = {"f16": np.float16, "f64": np.float64}.get(form, np.float32)
    with np.errstate(invalid="ignore"):
        codes = np.array(values, np.float64).astype(kind).view(f"u{np.dtype(kind).itemsize}")
    shift = 16 if form == "bf16" else 0
    pairs = zip(values, codes.tolist(), strict=True)
    return [nan if math.isnan(x) else code >> shift for x, code in pairs]


# -- rounding -------------------------------------------------------------------------------


def rounded(x: Fraction, form: str, how: str = "rn") -> float:
    """An exact number rounded once to a format: rn, rz, rm, rp, rna. Zero comes back as +0."""
    _, mantissa, least, largest, _ = FORMATS[form]
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, least)
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - mantissa)
    steps, rest = divmod(size / unit, 1)
    negative = x < 0
    up = {
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1),
        "rna": rest >= Fraction(1, 2),
    }[how]
    size = (steps + up) * unit
    inward = how == "rz" or (how == "rm" and not negative) or (how == "rp" and negative)
    value = float(size) if size <= largest else largest if inward else math.inf
    return -value if negative else value


def to_format(x: float, form: str, how: str = "rn", *, satfinite: bool = False) -> float:
    """A float or an integer in a format, with NaN, infinities and the sign of zero kept."""
    if not math.isfinite(x):
        value = x
    else:
        value = math.copysign(rounded(Fraction(x), form, how), x)
    if satfinite and abs(value) > FORMATS[form].largest:
        return math.copysign(FORMATS[form].largest, value)
    return value


def flushed(x: float, form: str = "f32") -> float:
    """A subnormal number of the format as zero of the same sign."""
    return math.copysign(0.0, x) if abs(x) < 2.0 ** FORMATS[form].least else x


def flushed_result(value: float, true: Fraction, form: str, how: str) -> float:
    """A rounded result as .ftz leaves it: what counts is the true value rounded with an unbounded
    exponent (seen on an H100)."""
    least = FORMATS[form].least
    if abs(value) > 2.0**least:
        return value
    tested = rounded(true / Fraction(2) ** least, form, how)
    return value if abs(tested) >= 1 else math.copysign(0.0, true)


# -- arithmetic -----------------------------------------------------------------------------

_IEEE: dict[str, Callable] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
}


def ieee(
    kind: str, form: str, how: str, operands: tuple[float, ...], *, ftz: bool = False
) -> float:
    """add, sub, mul, fma, div, rcp or sqrt, computed exactly and rounded once.

    ftz flushes subnormal operands and results, keeping the sign.
    """
    if ftz:
        operands = tuple(flushed(x, form) for x in operands)
    true = _exact_value(kind, operands)
    if kind == "fma" and all(map(math.isfinite, operands[:2])) and not math.isfinite(operands[2]):
        return operands[2]  # though the product may be beyond the range of a double
    if true is None:  # not finite: IEEE double arithmetic has the same rules
        with np.errstate(all="ignore"):
            return float(_IEEE[kind](*map(np.float64, operands)))
    if true == 0:
        return math.copysign(0.0, _zero_sign(kind, operands, how))
    value = rounded(true, form, how)
    return flushed_result(value, true, form, how) if ftz else value


def _exact_value(kind: str, operands: tuple[float, ...]) -> Fraction | None:
    """The mathematical result, or None where an operand or the result is not finite."""
    if not all(map(math.isfinite, operands)):
        return None
    values = [Fraction(x) for x in operands]
    if kind == "sqrt":
        return _square_root(values[0]) if values[0] >= 0 else None
    if kind in ("div", "rcp") and values[-1] == 0:
        return None
    return _IEEE[kind](*values)


def _square_root(x: Fraction) -> Fraction:
    """The root, or a number that rounds like it: many bits and a sticky one."""
    scaled = x * (1 << 2400)
    root = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = Fraction(root * root) != scaled
    return Fraction(2 * root + inexact, 2 << 1200)


def _zero_sign(kind: str, operands: tuple[float, ...], how: str) -> float:
    """The sign of an exact zero: of the product, or of addends that agree; else + (rm: -)."""
    signs = [math.copysign(1, x) for x in operands]
    if kind in ("mul", "div", "rcp", "sqrt"):
        return math.prod(signs)
    addends = {
        "add": signs,
        "sub": [signs[0], -signs[-1]],
        "fma": [signs[0] * signs[1 % len(signs)], signs[-1]],
    }[kind]
    if addends[0] == addends[1]:
        return addends[0]
    return -1.0 if how == "rm" else 1.0
