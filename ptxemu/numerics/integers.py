"""Integer and bit instructions of PTX on arrays of bit patterns.

Operands are unsigned arrays (uint16, uint32 or uint64 by `width`), signed types the same bits;
Python ints are taken modulo 2^width, and a call with nothing but Python ints returns one. Section
titles are those of the PTX ISA ("Integer Arithmetic Instructions", "Logic and Shift
Instructions").
Conversions between integers and floats are in `formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import numpy as np

_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
Signs = tuple[bool, bool]  # whether each factor is of a signed type
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def _bits(x: np.ndarray | int, width: int) -> np.ndarray:
    """The operand as an unsigned array of `width` bits, reduced modulo 2^width."""
    kind = _UNSIGNED[width]
    if isinstance(x, int):
        return np.array(x & ((1 << width) - 1), dtype=kind)
    return np.asarray(x).astype(kind, copy=False)


def _signed(x: np.ndarray, signed: bool) -> np.ndarray:
    """View the same bits as signed, if requested."""
    return np.asarray(x).view(_SIGNED[8 * x.dtype.itemsize]) if signed else x


def _lanewise(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Give `fn` unsigned arrays of the call's width; return Python ints for Python ints."""

    @wraps(fn)
    def call(*operands: np.ndarray | int, width: int = 32, **options: object) -> Any:
        values = [_bits(x, width) for x in operands]
        result = fn(*values, width=width, **options)
        if not all(isinstance(x, int) for x in operands):
            return result
        return tuple(map(int, result)) if isinstance(result, tuple) else int(result)

    return call


def _double(x: np.ndarray, signed: bool) -> np.ndarray:
    """Operands of at most 32 bits, widened to 64 with their sign."""
    return _signed(x, signed).astype(np.int64).view(np.uint64)


def _mul_hi_u64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Upper half of a 64 x 64 bit product, from 32-bit limbs."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a_high, a_low, b_high, b_low = a >> half, a & low, b >> half, b & low
    middle = a_high * b_low + (a_low * b_low >> half)
    carry = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (carry >> half)


@_lanewise
def mul_hi(a: np.ndarray, b: np.ndarray, *, width: int, signed: bool = False) -> np.ndarray:
    """Integer Arithmetic Instructions: mul.hi of 64 bits, upper half of the product."""
    high = _mul_hi_u64(a, b)
    if signed:
        zero = np.uint64(0)
        high = high - np.where(a >> np.uint64(63), b, zero) - np.where(b >> np.uint64(63), a, zero)
    return high


@_lanewise
def mul24(
    a: np.ndarray, b: np.ndarray, *, width: int, high: bool = False, signed: bool = False
) -> np.ndarray:
    """Integer Arithmetic Instructions: mul24.{lo,hi}: bits 31..0 or 47..16 of a 24 x 24 product."""
    shift = np.int32(8) if signed else np.uint32(8)
    x, y = (_double(_signed(v << np.uint32(8), signed) >> shift, signed) for v in (a, b))
    return (x * y >> np.uint64(16 if high else 0)).astype(np.uint32)


@_lanewise
def add_sat(a: np.ndarray, b: np.ndarray, *, width: int) -> np.ndarray:
    """Integer Arithmetic Instructions: add.sat.s32 (and the sum of mad.hi.sat.s32)."""
    return _saturated(_double(a, True).view(np.int64) + _double(b, True).view(np.int64))


@_lanewise
def sub_sat(a: np.ndarray, b: np.ndarray, *, width: int) -> np.ndarray:
    """Integer Arithmetic Instructions: sub.sat.s32."""
    return _saturated(_double(a, True).view(np.int64) - _double(b, True).view(np.int64))


def _saturated(total: np.ndarray) -> np.ndarray:
    return np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32).view(np.uint32)


def halves(
    a: np.ndarray, b: np.ndarray, name: str, *, signed: bool, relu: bool = False
) -> np.ndarray:
    """Integer Arithmetic Instructions: add, min, max of .u16x2 and .s16x2, words of two halves."""
    kind = np.int16 if signed else np.uint16
    words = np.broadcast_arrays(np.asarray(a, np.uint32), np.asarray(b, np.uint32))
    x, y = (np.ascontiguousarray(word).view(kind) for word in words)
    out = {"add": np.add, "min": np.minimum, "max": np.maximum}[name](x, y)
    if relu:
        out = np.maximum(out, kind(0))
    return out.view(np.uint32).reshape(words[0].shape)[()]


@_lanewise
def add_carry(
    a: np.ndarray, b: np.ndarray, carry: np.ndarray, *, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Extended-Precision Arithmetic Instructions: add.cc, addc: (sum, carry-out)."""
    partial = a + b
    total = partial + carry
    return total, ((partial < a) | (total < partial)).astype(a.dtype)


@_lanewise
def sub_borrow(
    a: np.ndarray, b: np.ndarray, borrow: np.ndarray, *, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Extended-Precision Arithmetic Instructions: sub.cc, subc: (difference, borrow-out)."""
    partial = a - b
    return partial - borrow, ((a < b) | (partial < borrow)).astype(a.dtype)


@_lanewise
def sad(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, *, width: int, signed: bool = False
) -> np.ndarray:
    """Integer Arithmetic Instructions: sad, c + |a - b|."""
    smaller = _signed(a, signed) < _signed(b, signed)
    return c + np.where(smaller, b - a, a - b)


@_lanewise
def div(a: np.ndarray, b: np.ndarray, *, width: int, signed: bool = False) -> np.ndarray:
    """Integer Arithmetic Instructions: div, truncating. By zero: unspecified, here all ones."""
    quotient = _magnitude(a, signed) // np.maximum(_magnitude(b, signed), b.dtype.type(1))
    if signed:
        quotient = _with_sign(quotient, _negative(a) != _negative(b))
    return np.where(b == 0, ~np.zeros_like(a), quotient)[()]


@_lanewise
def rem(a: np.ndarray, b: np.ndarray, *, width: int, signed: bool = False) -> np.ndarray:
    """Integer Arithmetic Instructions: rem, sign of the dividend. By zero: as `div`, all ones."""
    remainder = _magnitude(a, signed) % np.maximum(_magnitude(b, signed), b.dtype.type(1))
    if signed:
        remainder = _with_sign(remainder, _negative(a))
    return np.where(b == 0, ~np.zeros_like(a), remainder)[()]


def _negative(x: np.ndarray) -> np.ndarray:
    """The sign bit as a bool array."""
    return (x >> x.dtype.type(8 * x.dtype.itemsize - 1)) != 0


def _magnitude(x: np.ndarray, signed: bool) -> np.ndarray:
    """|x|, unsigned (so that the most negative value has one)."""
    return _with_sign(x, _negative(x)) if signed else x


def _with_sign(x: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Negate in two's complement if requested."""
    return np.where(negative, ~x + x.dtype.type(1), x)


@_lanewise
def clz(a: np.ndarray, *, width: int) -> np.ndarray:
    """Integer Arithmetic Instructions: clz, `width` for zero."""
    return (width - np.bitwise_count(_smeared(a)).astype(np.int64)).astype(np.uint32)


def _smeared(a: np.ndarray) -> np.ndarray:
    """Every bit below the most significant 1 set as well."""
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < 8 * a.dtype.itemsize:
            a = a | (a >> a.dtype.type(shift))
    return a


@_lanewise
def bfind(a: np.ndarray, *, width: int, signed: bool = False, shiftamt: bool = False) -> np.ndarray:
    """Integer Arithmetic Instructions: bfind{.shiftamt}; 0xffffffff where no bit is found."""
    if signed:
        a = np.where(_negative(a), ~a, a)
    position = np.bitwise_count(_smeared(a)).astype(np.int64) - 1
    if shiftamt:
        position = np.where(position < 0, position, width - 1 - position)
    return np.asarray(position).astype(np.uint32)[()]


@_lanewise
def fns(mask: np.ndarray, base: np.ndarray, offset: np.ndarray, *, width: int) -> np.ndarray:
    """Integer Arithmetic Instructions: fns, the n-th set bit from `base`; 0xffffffff if none."""
    mask, base, offset = np.broadcast_arrays(mask, base, offset)
    steps = _signed(offset, True).astype(np.int64)
    direction = np.where(steps < 0, -1, 1)
    left = np.maximum(np.abs(steps), 1)
    reach = np.where(steps == 0, 1, 32)  # offset 0 looks at the base bit alone
    found = np.full(mask.shape, 0xFFFFFFFF, dtype=np.uint32)
    for distance in range(32):
        position = base.astype(np.int64) + direction * distance
        inside = (position >= 0) & (position < 32) & (distance < reach)
        bit = mask >> np.where(inside, position, 0).astype(np.uint32) & np.uint32(1)
        left = left - (inside & (bit != 0))
        found = np.where(inside & (bit != 0) & (left == 0), position.astype(np.uint32), found)
    return found[()]


@_lanewise
def brev(a: np.ndarray, *, width: int) -> np.ndarray:
    """Integer Arithmetic Instructions: brev."""
    masks = {1: 0x5555555555555555, 2: 0x3333333333333333, 4: 0x0F0F0F0F0F0F0F0F}
    kind = a.dtype.type
    for shift, mask in masks.items():
        mask = kind(mask & ((1 << width) - 1))
        a = ((a & mask) << kind(shift)) | ((a >> kind(shift)) & mask)
    return np.asarray(a).byteswap()[()]


def _shifted_left(a: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """a << amount, 0 from the width on; `amount` may be any non-negative array."""
    width = 8 * a.dtype.itemsize
    inside = np.minimum(amount, width - 1).astype(a.dtype)
    return np.where(amount < width, a << inside, a.dtype.type(0))


def _shifted_right(a: np.ndarray, amount: np.ndarray, signed: bool) -> np.ndarray:
    """a >> amount, all sign bits (or 0) from the width on."""
    width = 8 * a.dtype.itemsize
    inside = np.minimum(amount, width - 1).astype(a.dtype)
    if signed:
        return (_signed(a, True) >> _signed(inside, True)).view(a.dtype)
    return np.where(amount < width, a >> inside, a.dtype.type(0))


@_lanewise
def shl(a: np.ndarray, amount: np.ndarray, *, width: int) -> np.ndarray:
    """Logic and Shift Instructions: shl; amounts above the width clamp to it."""
    return _shifted_left(a, amount)[()]


@_lanewise
def shr(a: np.ndarray, amount: np.ndarray, *, width: int, signed: bool = False) -> np.ndarray:
    """Logic and Shift Instructions: shr; amounts above the width clamp to it."""
    return _shifted_right(a, amount, signed)[()]


@_lanewise
def bfe(
    a: np.ndarray, start: np.ndarray, length: np.ndarray, *, width: int, signed: bool = False
) -> np.ndarray:
    """Integer Arithmetic Instructions: bfe; start and length are taken modulo 256."""
    start, length = ((v & v.dtype.type(0xFF)).astype(np.int64) for v in (start, length))
    top = np.maximum(width - start - length, 0)  # bits above the field that lie in the register
    aligned = _shifted_left(a, top)
    field = _shifted_right(aligned, np.minimum(top + start, 2 * width), signed)
    return np.where(length == 0, a.dtype.type(0), field)[()]


@_lanewise
def bfi(
    a: np.ndarray, b: np.ndarray, start: np.ndarray, length: np.ndarray, *, width: int
) -> np.ndarray:
    """Integer Arithmetic Instructions: bfi, insert `length` bits of a into b at `start`."""
    start, length = ((v & v.dtype.type(0xFF)).astype(np.int64) for v in (start, length))
    mask = _shifted_left(~_shifted_left(~np.zeros_like(a), length), start)
    return ((b & ~mask) | (_shifted_left(a, start) & mask))[()]


@_lanewise
def szext(
    a: np.ndarray, b: np.ndarray, *, width: int, signed: bool = False, wrap: bool = False
) -> np.ndarray:
    """Integer Arithmetic Instructions: szext.{clamp,wrap}.{s32,u32}."""
    bits = b & np.uint32(31) if wrap else np.minimum(b, np.uint32(32))
    unused = np.uint32(32) - bits
    extended = _shifted_right(_shifted_left(a, unused), unused, signed)
    return np.where(bits == 0, np.uint32(0), extended)[()]


@_lanewise
def bmsk(a: np.ndarray, b: np.ndarray, *, width: int, wrap: bool = False) -> np.ndarray:
    """Integer Arithmetic Instructions: bmsk.{clamp,wrap}: `b` ones from bit `a` up."""
    if wrap:
        a, b = a & np.uint32(31), b & np.uint32(31)
    ones = np.full_like(a, 0xFFFFFFFF)
    return _shifted_left(~_shifted_left(ones, b), a)[()]


_PRMT_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


@_lanewise
def prmt(
    a: np.ndarray, b: np.ndarray, selector: np.ndarray, *, width: int, mode: str = ""
) -> np.ndarray:
    """Data Movement and Conversion Instructions: prmt; bytes 0-3 are a's, 4-7 b's.

    Without a mode each nibble of the selector picks a byte; its top bit asks for the sign alone.
    """
    source = (b.astype(np.uint64) << np.uint64(32)) | a
    if mode:
        picks = np.array(_PRMT_MODES[mode], dtype=np.uint32)[selector & np.uint32(3)]
    else:
        picks = (selector[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(0xF)
    octets = np.asarray(source)[..., None].astype("<u8").view(np.uint8)
    if picks.ndim == 1:  # one selector for all lanes
        octets = octets[..., picks & np.uint32(7)]
    else:
        lanes = np.broadcast_shapes(octets.shape[:-1], picks.shape[:-1])
        octets, picks = np.broadcast_to(octets, (*lanes, 8)), np.broadcast_to(picks, (*lanes, 4))
        octets = np.take_along_axis(octets, picks & np.uint32(7), axis=-1)
    signs = np.where(octets >> 7, np.uint8(0xFF), np.uint8(0))
    octets = np.where(picks & np.uint32(8), signs, octets)
    return np.ascontiguousarray(octets).view("<u4")[..., 0]


def _packed_items(x: np.ndarray, count: int, signed: bool) -> list[np.ndarray]:
    """The `count` equal parts of a 32-bit word, low first, as int64."""
    size = 32 // count
    parts = ((x >> np.uint32(size * i)).astype(_UNSIGNED[size]) for i in range(count))
    return [_signed(p, signed).astype(np.int64) for p in parts]


@_lanewise
def dp4a(a: np.ndarray, b: np.ndarray, c: np.ndarray, *, width: int, signed: Signs) -> np.ndarray:
    """Integer Arithmetic Instructions: dp4a.atype.btype; `signed` tells each operand's type."""
    return _dot(zip(_packed_items(a, 4, signed[0]), _packed_items(b, 4, signed[1]), strict=True), c)


def _dot(pairs: Iterable[tuple[np.ndarray, np.ndarray]], addend: np.ndarray) -> np.ndarray:
    total = sum(x * y for x, y in pairs) + addend.astype(np.int64)
    return np.asarray(total).astype(np.uint32)[()]


@_lanewise
def dp2a(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, *, width: int, signed: Signs, high: bool
) -> np.ndarray:
    """Integer Arithmetic Instructions: dp2a.{lo,hi}.atype.btype: 16-bit by 8-bit products."""
    bytes_of_b = _packed_items(b, 4, signed[1])[2 if high else 0 :]
    return _dot(zip(_packed_items(a, 2, signed[0]), bytes_of_b, strict=False), c)
