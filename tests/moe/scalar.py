"""A block quantiser in exact rational numbers, element by element.

It shares nothing with moe.reference: fp32 is a Fraction that is rounded like fp32 arithmetic, and
the code of a number is found by searching all codes of its format.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

FLT_MAX = float.fromhex("0x1.fffffep127")
E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E4M3 = [
    Fraction(8 * (code > 7) + code % 8, 8) * Fraction(2) ** (max(code // 8, 1) - 7)
    for code in range(127)
]
UE8M0 = [Fraction(2) ** (code - 127) for code in range(255)]
FORMATS = {
    "nvfp4": (E2M1, 0x7, 8, 6),
    "mxfp4": (E2M1, 0x7, 8, 6),
    "mxfp8": (E4M3, 0x7F, 128, 448),
}  # elements, code of NaN, sign bit, largest


def fp32(exact: Fraction) -> float:
    """Round `exact` >= 0 to the nearest fp32, ties to even."""
    if exact == 0:
        return 0.0
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    exponent -= exact < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(exact / quantum) * quantum
    return float(rounded) if rounded <= FLT_MAX else math.inf


def product(a: float, b: float) -> float:
    """a * b of fp32 numbers >= 0."""
    finite = math.isfinite(a) and math.isfinite(b)
    return fp32(Fraction(a) * Fraction(b)) if finite else a * b


def quotient(a: float, b: float) -> float:
    """a / b of fp32 numbers >= 0, a finite, b no infinity."""
    if math.isnan(a) or math.isnan(b):
        return math.nan
    if b == 0:
        return math.inf if a else math.nan
    return fp32(Fraction(a) / Fraction(b))


def nearest(x: float, values: list[Fraction]) -> int:
    """Return the code of the value nearest to x >= 0, the even one in a tie; x may be infinite."""
    if x >= values[-1]:
        return len(values) - 1
    above = bisect.bisect_left(values, x)
    return min(
        (above, max(above - 1, 0)), key=lambda code: (abs(values[code] - Fraction(x)), code % 2)
    )


def global_scale(amax: float) -> float:
    """Global scale g of a tensor in nvfp4."""
    if amax == 0:
        return 1.0
    g = 0.0 if math.isinf(amax) else quotient(2688.0, amax)
    return FLT_MAX if g > FLT_MAX else g


def block(x: list[float], fmt: str, g: float | None) -> tuple[list[int], int]:
    """(codes of the elements, code of the scale factor) of a block of fp32 numbers."""
    values, nan_code, sign, largest = FORMATS[fmt]
    amax = math.nan if any(map(math.isnan, x)) else max(map(abs, x))
    wanted = product(amax, fp32(Fraction(1, largest)))
    if fmt == "nvfp4":
        wanted = product(wanted, g)
        scale = 0x7F if math.isnan(wanted) else nearest(wanted, E4M3)
        factor = math.nan if scale == 0x7F else float(E4M3[scale])
        inverse = 0.0 if factor == 0 else quotient(g, factor)
        inverse = FLT_MAX if inverse > FLT_MAX else inverse
    else:
        scale = 0xFF if math.isnan(wanted) else min(bisect.bisect_left(UE8M0, wanted), 254)
        inverse = math.nan if scale == 0xFF else float(1 / UE8M0[scale])
    return [_element(value, inverse, (values, nan_code, sign)) for value in x], scale


def _element(x: float, inverse: float, form: tuple[list[Fraction], int, int]) -> int:
    values, nan_code, sign = form
    magnitude = product(abs(x), inverse)
    if math.isnan(magnitude):
        return nan_code
    return nearest(magnitude, values) + (sign if math.copysign(1, x) < 0 else 0)
