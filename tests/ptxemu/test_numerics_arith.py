"""f32, f16, bf16 and f64 arithmetic against rational arithmetic with one rounding."""

from fractions import Fraction
from math import inf, isinf, isnan, isqrt, nan

import numpy as np
import pytest

from ptxemu.numerics import arith, half
from ptxemu.numerics.formats import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16

ROUNDINGS = ["rn", "rz", "rm", "rp"]
PRECISION = {  # bits of the significand, lowest and highest exponent of a normal number
    "f32": (24, -126, 127),
    "f16": (11, -14, 15),
    "bf16": (8, -126, 127),
    "f64": (53, -1022, 1023),
}
TINY = 2.0**-126
SPECIALS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    inf,
    -inf,
    nan,
    2.0**-149,
    -(2.0**-149),
    TINY,
    -TINY,
    1 + 2.0**-23,
]
SPECIALS += [
    float(np.float32(3.4028235e38)),
    -float(np.float32(3.4028235e38)),
    1.5,
    TINY * (1 - 2.0**-23),
]


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def rounded(exact, form, rounding):
    """Round a Fraction to a format; exact zero is the caller's business."""
    precision, lowest, highest = PRECISION[form]
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    quantum = Fraction(2) ** (max(exponent, lowest) - precision + 1)
    whole, rest = divmod(size, quantum)
    outward = {"rz": False, "rm": exact < 0, "rp": exact > 0}.get(rounding)
    if rounding == "rn":
        outward = 2 * rest > quantum or (2 * rest == quantum and whole % 2 == 1)
    result = (whole + (1 if rest and outward else 0)) * quantum
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** highest
    if result > largest:
        result = inf if rounding == "rn" or outward else largest
    return float(result) if exact > 0 else -float(result)


def reference(a, b, c, form, rounding):
    """a * b + c of doubles, rounded once to `form`."""
    if not all(map(np.isfinite, (a, b, c))):
        if isinf(c) and not (isinf(a) or isinf(b) or isnan(a) or isnan(b)):
            return c
        with np.errstate(all="ignore"):
            return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact:
        return rounded(exact, form, rounding)
    product_sign, sign = np.signbit(a) ^ np.signbit(b), np.signbit(c)
    negative = sign if product_sign == sign else rounding == "rm"
    return -0.0 if negative else 0.0


def assert_same(got, expected, nan_bits, kind):
    expected = np.array(expected, dtype=np.float64).astype(np.dtype(kind.replace("u", "f")))
    bits = np.where(np.isnan(expected), nan_bits, expected.view(kind)).astype(kind)
    np.testing.assert_array_equal(np.asarray(got).view(kind), bits)


def f32_triples(seed=3):
    generator = np.random.default_rng(seed)
    special = np.array(SPECIALS, dtype=np.float32)
    crossed = [x.ravel() for x in np.meshgrid(special, special[[0, 1, 2, 4, 7, 11, 12]], special)]
    bits = generator.integers(0, 2**32, (3, 400), dtype=np.uint32)
    bits[:, :300] = (bits[:, :300] & 0x807FFFFF) | generator.integers(110, 144, (3, 300)) << 23
    bits[0, :150] &= 0xFFFFF000
    bits[1, :150] &= 0xFFFFF000
    random = bits.view(np.float32)
    cancelled = -(random[0].astype(np.float64) * random[1]).astype(np.float32)
    random[2, 150:250] = cancelled[150:250]
    return [np.concatenate(pair) for pair in zip(crossed, random, strict=True)]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_f32_fma_add_mul(rounding):
    a, b, c = f32_triples()
    triples = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    expected = [reference(x, y, z, "f32", rounding) for x, y, z in triples]
    assert_same(arith.fma_f32(a, b, c, rounding), expected, 0x7FFFFFFF, "u4")
    a, c, triples = a[::3], c[::3], triples[::3]
    expected = [reference(x, 1.0, z, "f32", rounding) for x, _, z in triples]
    assert_same(arith.add_f32(a, c, rounding), expected, 0x7FFFFFFF, "u4")
    assert_same(arith.sub_f32(a, -c, rounding), expected, 0x7FFFFFFF, "u4")
    zero = [np.copysign(0.0, x) * np.copysign(1.0, z) for x, _, z in triples]
    expected = [
        reference(x, z, zs, "f32", rounding) for (x, _, z), zs in zip(triples, zero, strict=True)
    ]
    assert_same(arith.mul_f32(a, c, rounding), expected, 0x7FFFFFFF, "u4")


# (a, b, c, result of .rn): the f64 sum falls on an f32 midpoint, the exact sum beside it
DOUBLE_ROUNDING = [
    (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80, 1 + 2.0**-11 + 2.0**-23),
    (1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-80), 1 + 2.0**-11),
    (1.5 * 2.0**-75, 2.0**-75, TINY / 2 + 2.0**-149, TINY / 2 + 2 * 2.0**-149),
    (2.0**-75, 2.0**-75, TINY / 2 + 2.0**-149, TINY / 2 + 2 * 2.0**-149),
    (2.0**-75, 2.0**-75, TINY / 2, TINY / 2),
    (2.0**-75 * (1 + 2.0**-23), 2.0**-75, TINY / 2, TINY / 2 + 2.0**-149),
    (2.0**-75 * (1 - 2.0**-24), 2.0**-75, TINY / 2 + 2.0**-149, TINY / 2 + 2.0**-149),
    (2.0**52, 2.0**52, 2.0**81, 2.0**104 + 2.0**81),
    (2.0**127, 2.0, -(2.0**103), inf),
    (2.0**64 * (1 - 2.0**-24), 2.0**64, 2.0**103 * (1 - 2.0**-24), (1 - 2.0**-24) * 2.0**128),
]


@pytest.mark.parametrize(("a", "b", "c", "expected"), DOUBLE_ROUNDING)
def test_f32_fma_rounds_once(a, b, c, expected):
    assert float(np.float32(c)) == c
    assert arith.fma_f32(a, b, c) == expected == reference(a, b, c, "f32", "rn")
    assert arith.fma_f32(-a, b, -c) == -expected
    lanes = np.ones((2, 32), dtype=np.float32)
    lanes[1, 5] = a  # one lane in need of repair among many
    got = arith.fma_f32(lanes, np.float32(b), c)
    assert got[1, 5] == expected
    assert got[0, 0] == reference(1.0, b, c, "f32", "rn")


def test_f32_modifiers():
    x = np.array([2.0, -1.0, 0.5, nan, -inf, inf], dtype=np.float32)
    np.testing.assert_array_equal(arith.mul_f32(x, 1.0, sat=True), [1, 0, 0.5, 0, 0, 1])
    assert not np.any(np.signbit(arith.mul_f32(x, 1.0, sat=True)))
    small = np.float32(2.0**-127)
    assert arith.add_f32(small, small) == TINY
    assert arith.add_f32(small, small, ftz=True) == 0
    assert np.signbit(arith.mul_f32(-small, 1.0, ftz=True))
    assert arith.fma_f32(small, 2.0**30, 1.0, ftz=True) == 1


# (a, b, c, rounding, kept): .ftz looks at the result rounded with an unbounded exponent (H100)
FLUSHES = [
    (1 - 2.0**-24, TINY, 0.0, "rn", False),
    (1 - 2.0**-24, TINY, 0.0, "rp", False),
    (-TINY, TINY, TINY, "rn", True),
    (-TINY, TINY, TINY, "rp", True),
    (-TINY, TINY, TINY, "rz", False),
    (-TINY, TINY, TINY, "rm", False),
    (TINY, TINY, -TINY, "rm", True),
    (TINY, TINY, -TINY, "rp", False),
]


@pytest.mark.parametrize(("a", "b", "c", "rounding", "kept"), FLUSHES)
def test_f32_ftz_threshold(a, b, c, rounding, kept):
    got = arith.fma_f32(a, b, c, rounding, ftz=True)
    assert abs(got) == (TINY if kept else 0)
    if c == 0:
        assert arith.mul_f32(a, b, rounding, ftz=True) == got


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_f32_division_and_root(rounding):
    a, b, _ = f32_triples(5)
    a, b = a[::2], b[::2]
    quotients, roots = [], []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        if np.isfinite(x) and np.isfinite(y) and x and y:
            quotients.append(rounded(Fraction(x) / Fraction(y), "f32", rounding))
        else:
            quotients.append(float(np.float64(x) / np.float64(y)))
        roots.append(exact_root(x, rounding))
    assert_same(arith.div_f32(a, b, rounding), quotients, 0x7FFFFFFF, "u4")
    assert_same(arith.sqrt_f32(a, rounding), roots, 0x7FFFFFFF, "u4")
    np.testing.assert_array_equal(arith.rcp_f32(b, rounding), arith.div_f32(1.0, b, rounding))
    assert arith.div_f32(2 * TINY - 2.0**-149, 2.0, ftz=True) == 0  # as on H100


def exact_root(x, rounding):
    """sqrt of an f32 by integers: many good bits and a sticky one, enough for any rounding."""
    if not (np.isfinite(x) and x > 0):
        return float(np.sqrt(np.float64(x)))
    scaled = int(Fraction(x) * 2**300)
    root = isqrt(scaled)
    sticky = Fraction(1, 4) if root * root != scaled else 0
    return rounded((root + sticky) / Fraction(2) ** 150, "f32", rounding)


def minmax_reference(op, a, b, propagate):
    if (isnan(a) and isnan(b)) or (propagate and (isnan(a) or isnan(b))):
        return nan
    if isnan(a) or isnan(b):
        return b if isnan(a) else a
    if a == b == 0:
        negative = [np.signbit(a), np.signbit(b)]
        return -0.0 if (any(negative) if op == "min" else all(negative)) else 0.0
    return min(a, b) if op == "min" else max(a, b)


@pytest.mark.parametrize("op", ["min", "max"])
@pytest.mark.parametrize("propagate", [False, True])
def test_minmax(op, propagate):
    a, b = (x.ravel() for x in np.meshgrid(*[np.array(SPECIALS, dtype=np.float32)] * 2))
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    expected = [minmax_reference(op, x, y, propagate) for x, y in pairs]
    assert_same(arith.minmax_f32(op, a, b, nan=propagate), expected, 0x7FFFFFFF, "u4")
    third = np.float32(0.75)
    three = [minmax_reference(op, x, 0.75, propagate) for x in expected]
    assert_same(arith.minmax_f32(op, a, b, third, nan=propagate), three, 0x7FFFFFFF, "u4")
    signs = np.signbit(a) ^ np.signbit(b)
    sizes = [minmax_reference(op, abs(x), abs(y), propagate) for x, y in pairs]
    signed = np.where(signs, -np.array(sizes), sizes)
    got = arith.minmax_f32(op, a, b, nan=propagate, xorsign_abs=True)
    assert_same(got, signed, 0x7FFFFFFF, "u4")
    halves = [f32_to_bf16(a), f32_to_bf16(b)]
    by_value = arith.minmax_f32(op, bf16_to_f32(halves[0]), bf16_to_f32(halves[1]), nan=propagate)
    np.testing.assert_array_equal(
        half.minmax_bf16(op, *halves, nan=propagate), f32_to_bf16(by_value)
    )


def test_minmax_ftz_scalars_and_negative_nan_sign():
    assert arith.max_f32(-1.0, 2.0) == 2
    assert arith.min_f32(2.0**-130, 1.0, ftz=True) == 0
    assert half.minmax_f16("min", 0x05A2, 0xFE01, xorsign_abs=True) == 0x85A2  # as on H100
    for fn in (arith.neg_f32, arith.abs_f32):
        assert np.asarray(fn(np.float32(nan))).view(np.uint32) == 0x7FFFFFFF
    assert arith.neg_f32(0.0).view(np.uint32) == 0x80000000
    assert arith.abs_f32(-(2.0**-140), ftz=True) == 0


def sixteen_bit_triples(count, seed):
    generator = np.random.default_rng(seed)
    special = np.array(
        [0, 0x8000, 1, 0x3C00, 0x3F80, 0x7BFF, 0x7C00, 0xFC00, 0x7E00, 0x7F80, 0x0400]
    )
    crossed = [x.ravel() for x in np.meshgrid(special, special, special)]
    random = generator.integers(0, 65536, (3, count))
    return [np.concatenate(p).astype(np.uint16) for p in zip(crossed, random, strict=True)]


CODECS = {"f16": (f16_to_f32, f32_to_f16), "bf16": (bf16_to_f32, f32_to_bf16)}


@pytest.mark.parametrize("form", CODECS)
def test_sixteen_bit_arithmetic(form):
    decode, encode = CODECS[form]
    codes = sixteen_bit_triples(1200, 9)
    a, b, c = (decode(x).astype(float).tolist() for x in codes)

    def check(name, expected, *operands):
        code = encode(np.array(expected, dtype=np.float32))
        np.testing.assert_array_equal(getattr(half, f"{name}_{form}")(*operands), code)

    check("fma", [reference(*t, form, "rn") for t in zip(a, b, c, strict=True)], *codes)
    sums = [reference(x, 1.0, z, form, "rn") for x, z in zip(a, c, strict=True)]
    check("add", sums, codes[0], codes[2])
    zeros = [np.copysign(0.0, x) * np.copysign(1.0, y) for x, y in zip(a, b, strict=True)]
    products = [reference(*t, form, "rn") for t in zip(a, b, zeros, strict=True)]
    check("mul", products, codes[0], codes[1])
    sub = getattr(half, f"sub_{form}")(codes[0], codes[2] ^ 0x8000)
    np.testing.assert_array_equal(sub, getattr(half, f"add_{form}")(codes[0], codes[2]))


def test_bf16_fma_rounds_once():
    # (1 + 2^-4)^2 = 1 + 2^-3 + 2^-8 is a bf16 midpoint; the addend is below f64's last place
    a = f32_to_bf16(np.float32(1 + 2.0**-4))
    for addend, expected in ((2.0**-100, 0x3F91), (-(2.0**-100), 0x3F90), (0.0, 0x3F90)):
        assert half.fma_bf16(a, a, f32_to_bf16(np.float32(addend))) == expected


def test_sixteen_bit_modifiers_and_packing():
    one, minus, nan16 = 0x3C00, 0xBC00, 0x7FFF
    assert half.fma_f16(one, minus, 0, relu=True) == 0
    assert half.fma_f16(nan16, one, 0, relu=True) == nan16
    assert half.add_f16(one, one, sat=True) == one
    assert half.add_f16(nan16, one, sat=True) == 0
    assert half.mul_f16(0x8200, one, ftz=True) == 0x8000
    assert half.fma_bf16(0x3F80, 0xBF80, 0, relu=True) == 0
    words = np.array([0x3C004000, 0xBC003800], dtype=np.uint32)
    got = half.packed(half.add_f16, words, 0x3C003C00)
    np.testing.assert_array_equal(got, [0x40004200, 0x00003E00])
    assert half.packed(half.neg_f16, np.uint32(0x3C007E00)) == 0xBC007FFF
    assert [half.abs_bf16(0xBF80), half.neg_bf16(0x3F80), half.abs_f16(0xFC00)] == [
        0x3F80,
        0xBF80,
        0x7C00,
    ]


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_f64(rounding):
    generator = np.random.default_rng(2)
    bits = generator.integers(0, 2**64, (3, 150), dtype=np.uint64)
    bits[:, :100] = (bits[:, :100] & 0x800FFFFFFFFFFFFF) | generator.integers(
        1000, 1046, (3, 100), dtype=np.uint64
    ) << np.uint64(52)
    a, b, c = bits.view(np.float64)
    a[-6:], c[-6:] = [0.0, -0.0, 1e308, 1e-308, inf, 1.0], [0.0, 0.0, 1e308, -1e-308, -inf, -1.0]
    keep = ~(np.isnan(a) | np.isnan(b) | np.isnan(c))
    a, b, c = a[keep], b[keep], c[keep]
    triples = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    default = 0xFFF8000000000000
    expected = [reference(*t, "f64", rounding) for t in triples]
    assert_same(arith.fma_f64(a, b, c, rounding), expected, default, "u8")
    expected = [reference(x, 1.0, z, "f64", rounding) for x, _, z in triples]
    assert_same(arith.add_f64(a, c, rounding), expected, default, "u8")
    zeros = [np.copysign(0.0, x) * np.copysign(1.0, y) for x, y, _ in triples]
    expected = [
        reference(x, y, z, "f64", rounding) for (x, y, _), z in zip(triples, zeros, strict=True)
    ]
    assert_same(arith.mul_f64(a, b, rounding), expected, default, "u8")


def test_f64_nan_payload_order():
    first, second = np.array([0x7FF0000000000045, 0xFFF8000000000123], dtype=np.uint64).view("f8")
    for fn in (arith.add_f64, arith.mul_f64):  # H100: the second operand's NaN, made quiet
        assert np.asarray(fn(first, second)).view(np.uint64) == 0xFFF8000000000123
        assert np.asarray(fn(second, first)).view(np.uint64) == 0x7FF8000000000045
    assert np.asarray(arith.fma_f64(first, 1.0, second)).view(np.uint64) == 0xFFF8000000000123
    assert np.asarray(arith.fma_f64(1.0, first, second)).view(np.uint64) == 0x7FF8000000000045
