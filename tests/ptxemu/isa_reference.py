"""What PTX instructions should yield, written from the manual with exact arithmetic, for the ISA tests.

Nothing of ptxemu is used here: floats go through `fractions`, integers through Python's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

# -- integers -------------------------------------------------------------------------------


def each(function: Callable[..., int | float], *operands: np.ndarray) -> np.ndarray:
    """function on the Python numbers of every element; integers come back as an object array."""
    rows = zip(*(np.asarray(x).reshape(-1).tolist() for x in operands), strict=True)
    return np.array([function(*row) for row in rows], dtype=object)


def wrap(function: Callable[..., int], bits: int, signed: bool = False) -> Callable[..., np.ndarray]:
    """The same as a function on arrays, reduced modulo 2^bits into the range of the type."""

    def call(*operands: np.ndarray) -> np.ndarray:
        values = [int(x) & ((1 << bits) - 1) for x in each(function, *operands)]
        if signed:
            values = [x - (1 << bits) if x >> bits - 1 else x for x in values]
        return np.array(values, dtype=f"{'i' if signed else 'u'}{bits // 8}")

    return call


def clamp(low: int, high: int) -> Callable[[int], int]:
    return lambda x: max(low, min(high, x))


def truncated_divide(a: int, b: int) -> int:
    """C's division; all ones for a zero divisor (unspecified by the manual)."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def truncated_remainder(a: int, b: int) -> int:
    return a - b * truncated_divide(a, b) if b else -1


def funnel(low: int, high: int, amount: int) -> int:
    """shf.l: the upper word of high:low << amount."""
    return ((high << 32 | low) << amount) >> 32 & 0xFFFFFFFF


def extract_field(a: int, start: int, length: int, bits: int, signed: bool) -> int:
    """bfe, after the pseudocode of the manual."""
    start, length = start & 0xFF, length & 0xFF
    top = bits - 1
    sign = a >> min(start + length - 1, top) & 1 if signed and length else 0
    field = 0
    for i in range(bits):
        bit = a >> i + start & 1 if i < length and i + start <= top else sign
        field |= bit << i
    return field


def insert_field(a: int, b: int, start: int, length: int, bits: int) -> int:
    """bfi, after the pseudocode of the manual."""
    start, length = start & 0xFF, length & 0xFF
    field = b
    for i in range(min(length, bits)):
        if start + i < bits:
            field = field & ~(1 << start + i) | (a >> i & 1) << start + i
    return field


def permute(a: int, b: int, selector: int) -> int:
    """prmt without a mode."""
    source = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for i in range(4):
        pick = selector >> 4 * i & 0xF
        byte = source[pick & 7]
        result |= (0xFF * (byte >> 7) if pick & 8 else byte) << 8 * i
    return result


def reversed_bits(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


def lookup(a: int, b: int, c: int, table: int) -> int:
    """lop3."""
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


# -- floats ---------------------------------------------------------------------------------

FORMATS = {  # mantissa bits without the leading one, smallest normal exponent, largest finite value
    "f64": (52, -1022, (2 - 2.0**-52) * 2.0**1023),
    "f32": (23, -126, (2 - 2.0**-23) * 2.0**127),
    "f16": (10, -14, 65504.0),
    "bf16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "tf32": (10, -126, (2 - 2.0**-10) * 2.0**127),
    "e4m3": (3, -6, 448.0),
    "e5m2": (2, -14, 57344.0),
    "e2m3": (3, 0, 7.5),
    "e3m2": (2, -2, 28.0),
    "e2m1": (1, 0, 6.0),
}


def rounded(x: Fraction, form: str, how: str = "rn") -> float:
    """An exact number rounded once to a format: rn, rz, rm, rp, rna. Zero comes back as +0."""
    mantissa, least, largest = FORMATS[form]
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = max(size.numerator.bit_length() - size.denominator.bit_length() - 1, least)
    while Fraction(2) ** (exponent + 1) <= size:
        exponent += 1
    unit = Fraction(2) ** (exponent - mantissa)
    steps, rest = divmod(size / unit, 1)
    negative = x < 0
    up = {"rz": False, "rm": negative and rest > 0, "rp": not negative and rest > 0,
          "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1),
          "rna": rest >= Fraction(1, 2)}[how]
    result = (steps + up) * unit
    if result > Fraction(largest):
        inward = how == "rz" or (how == "rm" and not negative) or (how == "rp" and negative)
        result = largest if inward else math.inf
    value = float(result)
    return -value if negative else value


def exact(function: Callable[..., Fraction], form: str = "f32", how: str = "rn", *, ftz: bool = False,
          sat: bool = False, relu: bool = False) -> Callable[..., np.ndarray]:
    """An arithmetic function on Fractions -> one on float arrays, rounded once.

    Non-finite operands and zero results go through IEEE double arithmetic, where `function` works too.
    """

    def flush(x: float) -> float:
        return math.copysign(0.0, x) if ftz and abs(x) < 2.0 ** FORMATS[form][1] else x

    def one(*operands: float) -> float:
        operands = tuple(flush(x) for x in operands)
        if all(map(math.isfinite, operands)):
            try:
                true = function(*map(Fraction, operands))
            except ZeroDivisionError:
                true = None
            if true:
                return flush(rounded(true, form, how))
        with np.errstate(all="ignore"):
            value = float(function(*map(np.float64, operands)))
            other = float(function(*map(np.float64, operands))) if how != "rm" else value
        if how == "rm" and value == 0 and all(map(math.isfinite, operands)):
            return _zero_downwards(function, operands, other)
        return value

    def call(*operands: np.ndarray) -> np.ndarray:
        out = np.array([one(*row) for row in zip(*(x.astype(np.float64).tolist() for x in operands),
                                                 strict=True)])
        if sat:
            out = np.where(out > 0, np.minimum(out, 1), 0)
        if relu:
            out = np.where(out <= 0, 0, out)
        return out

    return call


def _zero_downwards(function: Callable, operands: tuple, value: float) -> float:
    """An exact zero sum is -0 when rounding down, unless every addend is +0."""
    tiny = float(function(*(np.float64(x) for x in operands)))
    if len(operands) < 2 or math.copysign(1, tiny) < 0:
        return tiny
    signs = _addend_signs(function, operands)
    return 0.0 if signs == {1.0} else -0.0


def _addend_signs(function: Callable, operands: tuple) -> set[float]:
    """Signs of the two addends of a sum (a, b) or a fused (a * b, c)."""
    kind = getattr(function, "kind", "add")
    if kind == "mul":
        return {math.copysign(1, operands[0]) * math.copysign(1, operands[1])}
    if kind == "fma":
        a, b, c = (math.copysign(1, x) for x in operands)
        return {a * b, c}
    return {math.copysign(1, operands[0]), math.copysign(1, operands[1]) * (-1 if kind == "sub" else 1)}


def bf16(codes: np.ndarray) -> np.ndarray:
    """bf16 codes -> f32."""
    return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(values: np.ndarray, how: str = "rn") -> np.ndarray:
    """Numbers -> bf16 codes; NaN is 0x7fff."""

    def one(x: float) -> int:
        if math.isnan(x):
            return 0x7FFF
        value = rounded(Fraction(x), "bf16", how) if math.isfinite(x) and x else x
        return int(np.float32(value).view(np.uint32)) >> 16

    return np.array([one(x) for x in values.tolist()], np.uint16)
