"""Inputs of conformance programs: random bits and the edges of each type, the same on any machine.

The random numbers are splitmix64's, not a library's, so that results recorded on a GPU years ago
can be compared with an emulation of today.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np

from lab.silicon.conformance.exact_arithmetic import FORMATS

EDGES = 32  # of each type; two operands meet in all 32 x 32 pairs
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def random_words(seed: str, count: int) -> np.ndarray:
    """uint64 [count] from a name."""
    start = np.uint64(zlib.crc32(seed.encode()) << 32 | zlib.crc32(seed[::-1].encode()))
    with np.errstate(over="ignore"):
        x = start + _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def random_bytes(seed: str, count: int) -> np.ndarray:
    """uint8 [count]."""
    return random_words(seed, -(-count // 8)).view(np.uint8)[:count].copy()


def below(seed: str, count: int, limit: int) -> np.ndarray:
    """int64 [count] in [0, limit)."""
    return ((random_words(seed, count) >> np.uint64(11)) % np.uint64(limit)).astype(np.int64)


# -- edges ---------------------------------------------------------------------------------

PACKED = {f"{base}x2": (base, 2) for base in ("f16", "bf16", "f32", "e4m3", "e5m2")}
PACKED |= {"u8x4": ("u8", 4), "u16x2": ("u16", 2), "s16x2": ("s16", 2)}


def _float_edges(name: str) -> list[int]:
    """Zeros, infinities, NaNs, the ends of both ranges, halves, ties, powers that limit others."""
    bits, mantissa, *_ = FORMATS[name]
    exponent = bits - 1 - mantissa
    bias = (1 << exponent - 1) - 1
    infinity = ((1 << exponent) - 1) << mantissa
    one = bias << mantissa

    def power(n: int) -> int:
        return max(min(bias + n, (1 << exponent) - 2), 1) << mantissa

    half_way = 1 << mantissa - 1
    positive = [0, 1, (1 << mantissa) - 1, 1 << mantissa, infinity - 1, infinity]
    positive += [one, one + 1, one - 1, power(-1), one + half_way, power(1) + (half_way >> 1)]
    positive += [power(mantissa), power(-mantissa - 1), power(31)]
    negative = [x | 1 << bits - 1 for x in positive[:14]]
    return [*positive, *negative, infinity + 1, infinity | half_way | 5, (1 << bits) - 1]


def _int_edges(bits: int) -> list[int]:
    top = 1 << bits - 1
    values = [0, 1, 2, 3, 7, 8, 15, 16, 24, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x5A5A]
    values += [top, top - 1, top + 1, top >> 1, -1, -2, -3, -7, -31, -128, -129, 1 << bits // 2]
    return [value & (1 << bits) - 1 for value in values]


def edges(kind: str) -> np.ndarray:
    """The 32 edges of a type as uint64 bit patterns."""
    if kind in PACKED:
        base, count = PACKED[kind]
        part, width = edges(base), _width(base)
        out = np.zeros(EDGES, np.uint64)
        for k in range(count):
            out |= np.roll(part, 5 * k) << np.uint64(k * width)
        return out
    values = _float_edges(kind) if kind in FORMATS else _int_edges(_width(kind))
    if len(values) != EDGES:
        raise ValueError(f"{kind} has {len(values)} edges")
    return np.array(values, np.uint64)


def _width(kind: str) -> int:
    return FORMATS[kind].bits if kind in FORMATS else int(kind[1:])


def width(kind: str) -> int:
    """Bits of one element of a kind: a type, or a type with a limit such as 'u32<64'."""
    kind = kind.split("<")[0].removesuffix("!0")
    if kind in PACKED:
        base, count = PACKED[kind]
        return count * _width(base)
    return _width(kind)


def _moderate(kind: str, seed: str, count: int) -> np.ndarray:
    """Numbers that meet: integers of few bits, floats with exponents near zero."""
    words = random_words(seed, count)
    if kind in PACKED:
        base, parts = PACKED[kind]
        out = np.zeros(count, np.uint64)
        for k in range(parts):
            out |= _moderate(base, f"{seed} {k}", count) << np.uint64(k * _width(base))
        return out
    bits = _width(kind)
    if kind not in FORMATS:
        size = (words >> np.uint64(58)) % np.uint64(bits) + np.uint64(1)
        value = words & (np.uint64(1) << size) - np.uint64(1)
        negative = words >> np.uint64(57) & np.uint64(1)
        mask = np.uint64((1 << bits) - 1)
        return np.where(negative, ~value + np.uint64(1), value) & mask
    mantissa = FORMATS[kind].mantissa
    exponent = bits - 1 - mantissa
    bias = (1 << exponent - 1) - 1
    # exponents near zero, and as far away as the ranges of narrower formats end
    near, far = min(6, bias - 1), min(160, bias - 1)
    power = np.where(
        words >> np.uint64(63),
        below(f"near {seed}", count, 2 * near + 1) - near,
        below(f"far {seed}", count, 2 * far + 1) - far,
    ).astype(np.uint64) + np.uint64(bias)
    sign = words >> np.uint64(55) & np.uint64(1)
    # a mantissa that ends somewhere: sums and products that are exact, and the ties of every
    # narrower format, some of them missed by one
    size = np.uint64(mantissa) - below(f"size {seed}", count, mantissa + 1).astype(np.uint64)
    fraction = words & ~((np.uint64(1) << size) - np.uint64(1))
    fraction += words >> np.uint64(53) & np.uint64(1)
    fraction &= np.uint64((1 << mantissa) - 1)
    return sign << np.uint64(bits - 1) | power << np.uint64(mantissa) | fraction


def _barely_subnormal(kind: str, place: int, values: np.ndarray) -> np.ndarray:
    """Factors whose product is so near the smallest normal number that rounding decides."""
    base, parts = PACKED.get(kind, (kind, 1))
    if base not in FORMATS:
        return values[:EDGES]
    bits, mantissa, *_ = FORMATS[base]
    exponent = bits - 1 - mantissa
    step = np.arange(EDGES, dtype=np.uint64) % np.uint64(16) + np.uint64(1)
    one = np.uint64(((1 << exponent - 1) - 1) << mantissa)
    factor = one - np.uint64(2) * step if place == 0 else np.uint64(1 << mantissa) + step
    return sum(factor << np.uint64(k * bits) for k in range(parts))


@lru_cache(maxsize=64)
def operands(kinds: tuple[str, ...], seed: str, count: int) -> list[np.ndarray]:
    """Return an array of bit patterns per operand, in unsigned integers of its width.

    A quarter are edges; of 4,096, the first two operands have them in all pairs. The rest are
    random bits or moderate values in equal parts. All operands are shuffled in the same
    order. A kind 'u32<64' is a u32 below 64; 'u32!0' is nonzero. The arrays are shared and
    must not be changed.
    """
    order = np.argsort(random_words(f"order {seed}", count), kind="stable")
    out = []
    for place, kind in enumerate(kinds):
        base, _, limit = kind.removesuffix("!0").partition("<")
        name = f"{seed} {place} {base}"
        values = random_words(f"bits {name}", count) & np.uint64((1 << width(base)) - 1)
        mixed = random_words(f"which {name}", count) & np.uint64(1)
        values = np.where(mixed, values, _moderate(base, f"moderate {name}", count))
        number = np.arange(count // 4)
        pairs = place < 2 and count // 4 >= EDGES**2
        index = number >> 5 * place & 31
        if not pairs:
            index = below(f"edge {name}", count // 4, EDGES)
        values[: count // 4] = edges(base)[index]
        if place < 2 and count >= 4 * EDGES:
            values[count // 4 : count // 4 + EDGES] = _barely_subnormal(base, place, values)
        if limit:
            values %= np.uint64(int(limit))
        if kind.endswith("!0"):
            values[values == 0] = 3
        out.append(values[order].astype(f"u{max(width(base), 16) // 8}"))
        out[-1].setflags(write=False)
    return out
