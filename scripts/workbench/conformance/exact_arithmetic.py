"""What arithmetic instructions should yield, from the manual, with exact numbers.

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


def wrap(
    function: Callable[..., int], bits: int, signed: bool = False
) -> Callable[..., np.ndarray]:
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
    return sum(
        (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32)
    )


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
    up = {
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1),
        "rna": rest >= Fraction(1, 2),
    }[how]
    result = (steps + up) * unit
    if result > Fraction(largest):
        inward = how == "rz" or (how == "rm" and not negative) or (how == "rp" and negative)
        result = largest if inward else math.inf
    value = float(result)
    return -value if negative else value


_IEEE = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
}


def exact(
    kind: str,
    form: str = "f32",
    how: str = "rn",
    *,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
) -> Callable[..., np.ndarray]:
    """add, sub, mul, fma, div, rcp or sqrt on float arrays, computed exactly and rounded once.

    ftz flushes subnormal operands and results, keeping the sign; sat clamps to [0, 1], NaN to 0;
    relu clamps at 0 and keeps NaN.
    """
    least = 2.0 ** FORMATS[form][1]

    def flush(x: float) -> float:
        return math.copysign(0.0, x) if ftz and abs(x) < least else x

    def one(*operands: float) -> float:
        operands = tuple(flush(x) for x in operands)
        true = _exact_value(kind, operands)
        if true is None:  # not finite: IEEE double arithmetic has the same rules
            with np.errstate(all="ignore"):
                return float(_IEEE[kind](*map(np.float64, operands)))
        if true == 0:
            return math.copysign(0.0, _zero_sign(kind, operands, how))
        value = rounded(true, form, how)
        if ftz and abs(value) <= least:
            small = _unbounded(true, how) if form == "f32" else value
            return value if abs(small) >= least else math.copysign(0.0, true)
        return value

    def call(*operands: np.ndarray) -> np.ndarray:
        out = each(one, *(x.astype(np.float64) for x in operands)).astype(np.float64)
        if sat:
            out = np.where(out > 0, np.minimum(out, 1), 0)
        return np.where(out <= 0, 0, out) if relu else out

    return call


def _unbounded(x: Fraction, how: str) -> float:
    """A small number rounded to 24 bits whatever its exponent: what .ftz tests (seen on H100)."""
    scale = Fraction(2) ** 100
    return float(Fraction(rounded(x * scale, "f32", how)) / scale)


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
    """The root, or a number that rounds like it: 200 bits and a sticky one."""
    scaled = x * (1 << 600)
    root = math.isqrt(scaled.numerator // scaled.denominator)
    inexact = Fraction(root * root) != scaled
    return Fraction(2 * root + inexact, 2 << 300)


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


def narrow(
    form: str, how: str = "rn", *, satfinite: bool = False, relu: bool = False
) -> Callable[[np.ndarray], np.ndarray]:
    """f32 -> the values of a narrower float format (not its codes), with NaN kept."""
    largest = FORMATS[form][2]

    def one(x: float) -> float:
        if math.isnan(x):
            return x
        value = rounded(Fraction(x), form, how) if math.isfinite(x) and x else x
        if satfinite and abs(value) > largest:
            value = math.copysign(largest, value)
        value = math.copysign(value, x)
        return 0.0 if relu and value <= 0 else value

    return lambda values: each(one, values.astype(np.float64)).astype(np.float64)


def code_of(form: str) -> Callable[[np.ndarray], np.ndarray]:
    """Values of a narrow format -> its codes: sign, biased exponent, mantissa."""
    mantissa, least, _ = FORMATS[form]
    bits = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}[form]
    nan = {"e4m3": 0x7F, "e5m2": 0x7F}.get(form, (1 << bits - 1) - 1)

    def one(x: float) -> int:
        if math.isnan(x):
            return nan
        sign = (math.copysign(1, x) < 0) << bits - 1
        size = abs(x)
        if size < 2.0**least:
            return sign | int(size / 2.0 ** (least - mantissa))
        power = math.frexp(size)[1] - 1
        return sign | (power - least + 1) << mantissa | int((size / 2.0**power - 1) * 2**mantissa)

    return lambda values: each(one, values).astype(np.int64)


def decoded(form: str) -> Callable[[np.ndarray], np.ndarray]:
    """Codes of a narrow format -> values."""
    mantissa, least, _ = FORMATS[form]
    bits = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}[form]

    def one(code: int) -> float:
        size = code & (1 << bits - 1) - 1
        if (form == "e4m3" and size == 0x7F) or (form == "e5m2" and size > 0x7C):
            return math.nan
        if form == "e5m2" and size == 0x7C:
            value = math.inf
        elif size >> mantissa == 0:
            value = size * 2.0 ** (least - mantissa)
        else:
            value = (1 + (size & (1 << mantissa) - 1) / 2**mantissa) * 2.0 ** (
                (size >> mantissa) - 1 + least
            )
        return -value if code >> bits - 1 & 1 else value

    return lambda codes: each(one, codes).astype(np.float64)


def halves(words: np.ndarray, dtype: type = np.float16) -> tuple[np.ndarray, np.ndarray]:
    """Packed words -> (low, high), each as `dtype`."""
    pairs = np.ascontiguousarray(words).view(dtype).reshape(len(words), 2)
    return pairs[:, 0], pairs[:, 1]


def packed(low: np.ndarray, high: np.ndarray, dtype: type = np.float16) -> np.ndarray:
    """(low, high) -> words of twice their width."""
    pairs = np.stack([np.asarray(low).astype(dtype), np.asarray(high).astype(dtype)], 1)
    pairs = np.where(pairs != pairs, dtype(np.nan), pairs) if np.dtype(dtype).kind == "f" else pairs
    return np.ascontiguousarray(pairs.astype(dtype)).view(f"u{2 * pairs.itemsize}").reshape(-1)


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
