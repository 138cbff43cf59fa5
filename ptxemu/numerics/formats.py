"""Storage formats of PTX and rounding into them: codecs, conversions, element types by name.

Codes are unsigned arrays (uint16, uint32 for tf32, uint8 otherwise; 6- and 4-bit codes in the low
bits), values are float32. All functions follow "Data Movement and Conversion Instructions: cvt" and
"Alternate Floating-Point Data Formats" of the PTX ISA to the bit: NaN becomes the canonical NaN of
the destination, or its positive largest value where it has no NaN.

Every float is rounded once. A result that passes through a wider format first is made *odd* there
(round-to-odd: an inexact value gets a last bit of 1), so that no later rounding mistakes it for a
midpoint (Boldo and Melquiond, "When double rounding is odd", 2005). The caller sets `np.errstate`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

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


NAN_16 = np.uint16(0x7FFF)  # canonical NaN of both f16 and bf16
_HALF, _ONE, _BELOW_TIE = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)


class MiniFloat(NamedTuple):
    """A float of at most 8 bits: field widths, largest finite code, what NaN encodes to."""

    exponent_bits: int
    mantissa_bits: int
    largest: int
    nan: int
    has_inf: bool = False
    has_nan: bool = False

    @property
    def bias(self) -> int:
        """The usual IEEE bias, 2^(e-1) - 1."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign_bit(self) -> int:
        """Position of the sign bit."""
        return self.exponent_bits + self.mantissa_bits

    def value(self, code: int) -> float:
        """The value of one code; bits above the format's width are ignored."""
        magnitude = code & ((1 << self.sign_bit) - 1)
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude > self.largest and self.has_inf and mantissa == 0:
            absolute = float("inf")
        elif magnitude > self.largest:
            return float("nan")
        else:
            hidden = 1 << self.mantissa_bits if exponent else 0
            absolute = (hidden + mantissa) * 2.0 ** (
                max(exponent, 1) - self.bias - self.mantissa_bits
            )
        return -absolute if code >> self.sign_bit & 1 else absolute


E4M3 = MiniFloat(4, 3, largest=0x7E, nan=0x7F, has_nan=True)
E5M2 = MiniFloat(5, 2, largest=0x7B, nan=0x7F, has_inf=True, has_nan=True)
E3M2 = MiniFloat(3, 2, largest=0x1F, nan=0x1F)
E2M3 = MiniFloat(2, 3, largest=0x1F, nan=0x1F)
E2M1 = MiniFloat(2, 1, largest=0x07, nan=0x07)


def _values(form: MiniFloat) -> np.ndarray:
    """The 256 values, float32."""
    values = np.array([form.value(code) for code in range(256)], dtype=np.float32)
    values[np.isnan(values)] = CANONICAL_NAN_F32
    return values


def _encode(form: MiniFloat, x: np.ndarray, *, relu: bool = False) -> np.ndarray:
    """cvt.rn.satfinite{.relu} to a mini-float.

    The code's quantum is a power of two that depends on the exponent alone. So adding 2^23 quanta
    makes the f32 adder round to nearest even, and the low bits of the sum count the quanta.
    """
    x = np.asarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    magnitude = np.minimum(np.abs(x), np.float32(form.value(form.largest)))
    lowest = np.uint32((128 - form.bias) << 23)  # f32 exponent field of the smallest normal
    exponent = np.maximum(magnitude.view(np.uint32) & np.uint32(0x7F800000), lowest)
    magic = exponent + np.uint32((23 - form.mantissa_bits) << 23)
    quanta = (magnitude + magic.view(np.float32)).view(np.uint32) - magic
    code = ((exponent - lowest) >> np.uint32(23 - form.mantissa_bits)) + quanta
    if relu:
        code = np.where(bits >> 31, 0, code)
    else:
        code |= (bits >> np.uint32(31)) << np.uint32(form.sign_bit)
    if has_nan(x):
        code = np.where(np.isnan(x), form.nan, code)
    return code.astype(np.uint8)[()]


def _finish_16(
    code: np.ndarray, x: np.ndarray, largest: int, flags: tuple[bool, bool]
) -> np.ndarray:
    """`.satfinite` (magnitudes above `largest`), `.relu`, then the canonical NaN."""
    relu, satfinite = flags
    if satfinite:
        sign = code & np.uint16(0x8000)
        code = np.minimum(code ^ sign, np.uint16(largest)) | sign
    if relu:
        code = np.where(np.signbit(x), np.uint16(0), code)
    if has_nan(x):
        code = np.where(np.isnan(x), NAN_16, code)
    return code[()]


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """bf16 codes to f32: a shift. A NaN keeps its payload, which `cvt.f32.bf16` leaves open."""
    wide = np.asarray(bits).astype(np.uint32)
    wide <<= _HALF
    return wide.view(np.float32)[()]


def f32_to_bf16(
    x: np.ndarray, rounding: str = "rn", *, relu: bool = False, satfinite: bool = False
) -> np.ndarray:
    """cvt.{rn,rz,rm,rp}{.relu}{.satfinite}.bf16.f32; rn is the hot path of every epilogue."""
    x = np.asarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    if rounding == "rn":
        wide = bits >> _HALF
        wide &= _ONE
        wide += bits
        wide += _BELOW_TIE
        wide >>= _HALF
        code = wide.astype(np.uint16)
    else:
        code = (bits >> _HALF).astype(np.uint16)
        if rounding not in ("rz", "rm", "rp"):
            raise ValueError(f"unknown rounding {rounding!r}")
        if rounding != "rz":
            inexact = (bits & np.uint32(0xFFFF)) != 0
            away = np.signbit(x) == (rounding == "rm")
            code = code + (inexact & away)
    if relu or satfinite or has_nan(x):
        code = _finish_16(code, x, 0x7F7F, (relu, satfinite))
    return code[()]


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    """f16 codes to f32, exact (cvt.f32.f16)."""
    values = np.asarray(bits, dtype=np.uint16).view(np.float16).astype(np.float32)
    return canonical_nan_f32(values)[()]


def f16_to_f64(bits: np.ndarray) -> np.ndarray:
    """f16 codes to f64, exact (cvt.f64.f16); a NaN keeps its payload and becomes quiet."""
    bits = np.asarray(bits, dtype=np.uint16)
    values = bits.view(np.float16).astype(np.float64)
    if has_nan(values):
        wide = bits.astype(np.uint64)
        quiet = ((wide & 0x8000 | 0x7FF8) << np.uint64(48)) | (wide & 0x1FF) << np.uint64(42)
        values = np.where(np.isnan(values), quiet.view(np.float64), values)
    return values[()]


def f32_to_f16(
    x: np.ndarray, rounding: str = "rn", *, relu: bool = False, satfinite: bool = False
) -> np.ndarray:
    """cvt.{rn,rz,rm,rp}{.relu}{.satfinite}.f16.f32."""
    x = np.asarray(x, dtype=np.float32)
    nearest = x.astype(np.float16)
    code = nearest.view(np.uint16)
    if rounding != "rn":
        code = step(code, x - nearest.astype(np.float32), rounding)
    if relu or satfinite or has_nan(x):
        code = _finish_16(code, x, 0x7BFF, (relu, satfinite))
    return code[()]


def f32_to_tf32(
    x: np.ndarray, rounding: str = "rna", *, relu: bool = False, satfinite: bool = False
) -> np.ndarray:
    """cvt.{rna,rn,rz}{.relu}{.satfinite}.tf32.f32: a 32-bit word whose low 13 bits are zero.

    NaN is 0x7fffe000, but .rna has no instruction of its own: there a NaN is merely truncated, and
    .satfinite takes one unit from it as it does from an infinity (the code of ptxas for sm_100a).
    """
    x = np.asarray(x, dtype=np.float32)
    bits = x.view(np.uint32)
    if rounding == "rna":
        bits = np.where(np.isfinite(x), bits + np.uint32(0x1000), bits)
    elif rounding == "rn":
        bits = bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))
    elif rounding != "rz":
        raise ValueError(f"tf32 has no rounding {rounding!r}")
    code = bits & np.uint32(0xFFFFE000)
    if satfinite:
        overflow = (code & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F800000)
        code = np.where(overflow, code - np.uint32(0x2000), code)
    if relu:
        code = np.where(np.signbit(x), np.uint32(0), code)
    if rounding != "rna" and has_nan(x):
        code = np.where(np.isnan(x), np.uint32(0x7FFFE000), code)
    return code[()]


def tf32_to_f32(bits: np.ndarray) -> np.ndarray:
    """Return what the tensor core reads from a word of kind::tf32: its low 13 bits are ignored."""
    return (np.asarray(bits).astype(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)[()]


# cvt.rn.satfinite{.relu} of f32 to one element, of which e2m1 has the low 4 bits.
f32_to_e4m3, f32_to_e5m2 = partial(_encode, E4M3), partial(_encode, E5M2)
f32_to_e3m2, f32_to_e2m3 = partial(_encode, E3M2), partial(_encode, E2M3)
f32_to_e2m1 = partial(_encode, E2M1)

# Codes (uint8) to f32. Bits above a format's width are ignored.
FORMS = {"e4m3": E4M3, "e5m2": E5M2, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}
_TO_F32 = {name: _values(form) for name, form in FORMS.items()}
_TO_F16 = {name: f32_to_f16(values) for name, values in _TO_F32.items()}  # every format fits in f16
e4m3_to_f32, e5m2_to_f32 = _TO_F32["e4m3"].take, _TO_F32["e5m2"].take
e3m2_to_f32, e2m3_to_f32 = _TO_F32["e3m2"].take, _TO_F32["e2m3"].take
e2m1_to_f32 = _TO_F32["e2m1"].take


def minifloat_to_f16(bits: np.ndarray, name: str, *, relu: bool = False) -> np.ndarray:
    """cvt.rn{.relu}.f16x2.{e4m3,e5m2,e3m2,e2m3,e2m1}x2, one element: exact, NaN is 0x7fff."""
    code = _TO_F16[name].take(bits)
    return np.where(code & 0x8000, np.uint16(0), code)[()] if relu else code


_UE8M0_F32 = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan], dtype=np.float32)
_UE8M0_F32[255] = CANONICAL_NAN_F32
ue8m0_to_f32 = _UE8M0_F32.take


def ue8m0_to_bf16(bits: np.ndarray) -> np.ndarray:
    """cvt.rn.bf16x2.ue8m0x2, one element: exact (2^-127 is a bf16 subnormal)."""
    return f32_to_bf16(ue8m0_to_f32(bits))


def f32_to_ue8m0(x: np.ndarray, rounding: str = "rz", *, satfinite: bool = False) -> np.ndarray:
    """cvt.{rz,rp}{.satfinite}.ue8m0x2.f32, one element: the sign is dropped, the magnitude rounded.

    Below 2^-127 the result is code 0; above 2^127 it is NaN (0xff), or 0xfe with `.satfinite`.
    """
    if rounding not in ("rz", "rp"):
        raise ValueError(f"ue8m0 has no rounding {rounding!r}")
    x = np.asarray(x, dtype=np.float32)
    magnitude = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    if rounding == "rp":
        tiny = magnitude <= np.uint32(0x00400000)  # 2^-127 and below
        magnitude = np.where(tiny, np.uint32(0), magnitude + np.uint32(0x007FFFFF))
    code = np.minimum(magnitude >> np.uint32(23), np.uint32(0xFE if satfinite else 0xFF))
    if has_nan(x):
        code = np.where(np.isnan(x), 0xFF, code)
    return code.astype(np.uint8)[()]


def s2f6_to_f32(bits: np.ndarray) -> np.ndarray:
    """s2f6 codes (8-bit two's complement fixed point, 6 fraction bits) to f32."""
    return np.asarray(bits, dtype=np.uint8).view(np.int8).astype(np.float32) * np.float32(1 / 64)


def f64_to_f16(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """cvt.{rn,rz,rm,rp}.f16.f64 with one rounding; a NaN keeps its sign and upper payload."""
    return _narrow_nan(f32_to_f16(f64_to_f32_odd(x), rounding), x, 10)


def f64_to_bf16(x: np.ndarray, rounding: str = "rn") -> np.ndarray:
    """cvt.{rn,rz,rm,rp}.bf16.f64 with one rounding; a NaN keeps its sign and upper payload."""
    return _narrow_nan(f32_to_bf16(f64_to_f32_odd(x), rounding), x, 7)


def _narrow_nan(code: np.ndarray, x: np.ndarray, mantissa_bits: int) -> np.ndarray:
    """Give the 16-bit codes of f64 NaNs their sign and as much of the payload as fits, quiet."""
    if not has_nan(x):
        return code
    bits = np.asarray(x, dtype=np.float64).view(np.uint64)
    quiet = 0x8000 - (1 << (mantissa_bits - 1))  # exponent and the first mantissa bit
    payload = (bits >> np.uint64(52 - mantissa_bits)) & np.uint64((1 << mantissa_bits) - 1)
    nan = (bits >> np.uint64(63) << np.uint64(15)) | np.uint64(quiet) | payload
    return np.where(np.isnan(x), nan.astype(np.uint16), code)[()]


# Conversions between integers and floats: integers have the numpy type of their PTX type (int8 to
# uint64), floats are f32 or f64 arrays.

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


TENSOR_COLUMNS = 512  # of tensor memory, each of 128 lanes of 32 bits
Decode = Callable[[np.ndarray], np.ndarray]


def _as(dtype: str) -> Decode:
    return lambda codes: codes.view(dtype)


def _codes(function: Decode) -> Decode:
    return lambda codes: np.asarray(function(codes))


# name -> bytes of an element, and its codes (unsigned of that size) to values that numpy has
ELEMENTS: dict[str, tuple[int, Decode]] = {
    **{f"u{8 * size}": (size, _as(f"u{size}")) for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": (size, _as(f"i{size}")) for size in (1, 2, 4, 8)},
    "f16": (2, _codes(f16_to_f32)),
    "bf16": (2, _codes(bf16_to_f32)),
    "f32": (4, _as("f4")),
    "tf32": (4, _as("f4")),
    "f64": (8, _as("f8")),
    "e4m3": (1, _codes(e4m3_to_f32)),
    "e5m2": (1, _codes(e5m2_to_f32)),
    "ue8m0": (1, _codes(ue8m0_to_f32)),
}


def decoded(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes, uint8 [..., bytes of a row], as values [..., elements]; bf16 and fp8 as float32."""
    size, decode = ELEMENTS[dtype]
    return decode(np.ascontiguousarray(raw).view(f"u{size}"))
