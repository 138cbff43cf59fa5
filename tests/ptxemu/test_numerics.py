"""Rounding in the hardest cases, for the functions of `numerics`: around every midpoint of a narrow
format, where two roundings differ from one, and at the threshold of .ftz.

`test_elementwise` tests the results of instructions.
"""

from __future__ import annotations

import zlib
from math import inf, nan

import numpy as np
import pytest

from lab.silicon.conformance.bounds import bounds_of, excess
from lab.silicon.conformance.exact_arithmetic import FORMATS, decode, encode, ieee, to_format
from ptxemu.numerics import approx, arith, formats

TINY = 2.0**-126


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


# (a, b, c, result of .rn): the f64 sum is an f32 midpoint, the exact sum is next to it
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
    assert arith.fma_f32(a, b, c) == expected == ieee("fma", "f32", "rn", (a, b, c))
    assert arith.fma_f32(-a, b, -c) == -expected
    lanes = np.ones((2, 32), dtype=np.float32)
    lanes[1, 5] = a  # one lane in need of repair among many
    got = arith.fma_f32(lanes, np.float32(b), c)
    assert got[1, 5] == expected
    assert got[0, 0] == ieee("fma", "f32", "rn", (1.0, b, c))


def test_bf16_fma_rounds_once():
    # (1 + 2^-4)^2 = 1 + 2^-3 + 2^-8 is a bf16 midpoint; the addend is below f64's last place
    a = formats.f32_to_bf16(np.float32(1 + 2.0**-4))
    for addend, expected in ((2.0**-100, 0x3F91), (-(2.0**-100), 0x3F90), (0.0, 0x3F90)):
        assert arith.fma_bf16(a, a, formats.f32_to_bf16(np.float32(addend))) == expected


def test_f64_to_sixteen_bits_rounds_once():
    # rounding to f32 first would give the midpoint and then round to even, away from these
    assert formats.f64_to_f16(1 + 2.0**-11 + 2.0**-40) == 0x3C01
    assert formats.f64_to_f16(1 + 3 * 2.0**-11 - 2.0**-40) == 0x3C01
    assert formats.f64_to_bf16(1 + 2.0**-8 + 2.0**-40) == 0x3F81
    assert formats.f64_to_bf16(1 + 2.0**-8 - 2.0**-40) == 0x3F80
    assert formats.f64_to_f16(2.0**-1000, "rp") == 1


# (a, b, c, rounding, kept): .ftz tests the result rounded with an unbounded exponent (H100)
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
    assert arith.div_f32(2 * TINY - 2.0**-149, 2.0, ftz=True) == 0


def test_payloads_of_f64_nans():
    """The second operand's NaN, made quiet, as on an H100; a narrower one supplies its upper
    bits."""
    first, second = np.array([0x7FF0000000000045, 0xFFF8000000000123], dtype=np.uint64).view("f8")
    for fn in (arith.add_f64, arith.mul_f64):
        assert np.asarray(fn(first, second)).view(np.uint64) == 0xFFF8000000000123
        assert np.asarray(fn(second, first)).view(np.uint64) == 0x7FF8000000000045
    assert np.asarray(arith.fma_f64(first, 1.0, second)).view(np.uint64) == 0xFFF8000000000123
    assert np.asarray(arith.fma_f64(1.0, first, second)).view(np.uint64) == 0x7FF8000000000045
    payload = np.array([0xFFFB4709AF8C68B7], dtype=np.uint64).view(np.float64)
    assert formats.f64_to_f16(payload) == 0xFED1
    assert formats.f64_to_bf16(payload) == 0xFFDA


@pytest.mark.parametrize("form", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_narrow_formats_at_and_beside_every_midpoint(form):
    codes = np.arange(1 << FORMATS[form].bits, dtype=np.uint8)
    values = getattr(formats, f"{form}_to_f32")(codes)
    np.testing.assert_array_equal(values, decode(form, codes.tolist()))
    np.testing.assert_array_equal(
        formats.minifloat_to_f16(codes, form), formats.f32_to_f16(values.astype(np.float32))
    )
    magnitudes = np.unique(np.abs(values[np.isfinite(values)])).astype(np.float32)
    assert magnitudes[-1] == FORMATS[form].largest
    near = [magnitudes, (magnitudes[:-1] + magnitudes[1:]) / 2, np.float32([500, 1e9, inf])]
    near += [np.nextafter(x, np.float32(side)) for x in near for side in (0, inf)]
    x = np.concatenate([*near, *(-part for part in near)])
    rounded = [to_format(value, form, satfinite=True) for value in x.tolist()]
    narrow = getattr(formats, f"f32_to_{form}")
    np.testing.assert_array_equal(narrow(x), encode(form, rounded))
    positive = [value if value > 0 else 0.0 for value in rounded]
    np.testing.assert_array_equal(narrow(x, relu=True), encode(form, positive))


@pytest.mark.parametrize(("name", "infinity"), [("f16", 0x7C00), ("bf16", 0x7F80)])
def test_sixteen_bits_at_and_beside_every_midpoint(name, infinity):
    narrow, widen = getattr(formats, f"f32_to_{name}"), getattr(formats, f"{name}_to_f32")
    codes = np.arange(infinity, dtype=np.uint16)
    low = widen(codes).astype(np.float64)
    high = np.append(low[1:], 2 * low[-1] - low[-2])  # 2^k for infinity
    middle = ((low + high) / 2).astype(np.float32)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    nearest_even = codes + (codes & 1)
    for values, nearest in ((middle, nearest_even), (below, codes), (above, codes + 1)):
        for sign, flip in ((np.float32(1), 0), (np.float32(-1), 0x8000)):
            x = values * sign
            up = {"rn": nearest - codes, "rz": 0, "rm": bool(flip), "rp": not flip}
            for rounding, step in up.items():
                np.testing.assert_array_equal(narrow(x, rounding=rounding), codes + step | flip)
            clamped = np.minimum(nearest, infinity - 1)
            np.testing.assert_array_equal(narrow(x, satfinite=True), clamped | flip)
            relu = np.zeros_like(codes) if flip else nearest
            np.testing.assert_array_equal(narrow(x, relu=True), relu)


@pytest.mark.parametrize(("name", "infinity"), [("f16", 0x7C00), ("bf16", 0x7F80)])
@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_sixteen_bits_there_and_back(name, infinity, rounding):
    codes = np.arange(65536, dtype=np.uint16)
    nan = (codes & 0x7FFF) > infinity
    narrow, values = getattr(formats, f"f32_to_{name}"), getattr(formats, f"{name}_to_f32")(codes)
    canonical = np.where(nan, 0x7FFF, codes)
    np.testing.assert_array_equal(narrow(values, rounding=rounding), canonical)
    for flags in ({"relu": True}, {"satfinite": True}):
        assert np.all(narrow(values[nan], rounding=rounding, **flags) == 0x7FFF)
    top = narrow(np.float32(np.inf), rounding=rounding, satfinite=True)
    assert top == infinity - 1


def test_scalars_and_shapes():
    assert formats.f32_to_bf16(1.5) == 0x3FC0
    assert formats.f32_to_e2m1(-6.0) == 0xF
    assert formats.bf16_to_f32(np.full((2, 3, 4), 0x3F80, np.uint16)).shape == (2, 3, 4)
    assert formats.f32_to_e4m3(np.ones((2, 3, 4), np.float32)).shape == (2, 3, 4)


SUB = 2.0**-130  # an f32 subnormal


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def sweep(low, high, count=50_001, seed=4):
    """A dense sweep and as many random points of [low, high], as f32."""
    random = np.random.default_rng(seed).uniform(low, high, count)
    return np.concatenate([np.linspace(low, high, count), random]).astype(np.float32)


def all_exponents(count=50_001):
    """Positive finite f32 values of every exponent."""
    bits = np.random.default_rng(6).integers(1, 0x7F800000, count, dtype=np.uint32)
    return bits.view(np.float32)


SPECIAL = {
    "ex2": [(-inf, 0.0), (-0.0, 1.0), (0.0, 1.0), (inf, inf), (-SUB, 1.0), (128.0, inf)],
    "lg2": [(-inf, nan), (-1.0, nan), (-0.0, -inf), (0.0, -inf), (inf, inf), (1.0, 0.0)],
    "rcp": [(-inf, -0.0), (-0.0, -inf), (0.0, inf), (inf, 0.0), (SUB, inf), (4.0, 0.25)],
    "rsqrt": [(-inf, nan), (-1.0, nan), (-0.0, -inf), (0.0, inf), (inf, 0.0), (SUB, 2.0**65)],
    "sqrt": [(-inf, nan), (-1.0, nan), (-0.0, -0.0), (0.0, 0.0), (inf, inf), (SUB, 2.0**-65)],
    "sin": [(-inf, nan), (-0.0, -0.0), (0.0, 0.0), (inf, nan), (SUB, SUB), (-SUB, -SUB)],
    "cos": [(-inf, nan), (-0.0, 1.0), (0.0, 1.0), (inf, nan), (SUB, 1.0)],
    "tanh": [(-inf, -1.0), (-0.0, -0.0), (0.0, 0.0), (inf, 1.0), (SUB, SUB), (-SUB, -SUB)],
}
FLUSHED = {
    "ex2": [(-126.0, 2.0**-126), (-126 - 2.0**-17, 0.0), (-149.0, 0.0), (SUB, 1.0)],
    "lg2": [(-SUB, -inf), (SUB, -inf)],
    "rcp": [(-SUB, -inf), (SUB, inf), (2.0**127, 0.0), (-(2.0**127), -0.0)],
    "rsqrt": [(-SUB, -inf), (SUB, inf)],
    "sqrt": [(-SUB, -0.0), (SUB, 0.0)],
    "sin": [(-SUB, -0.0), (SUB, 0.0)],
    "cos": [(-SUB, 1.0), (SUB, 1.0)],
}


def check_table(name, table, **flags):
    fn = getattr(approx, f"{name}_approx")
    inputs, expected = np.array([*table, (nan, nan)], dtype=np.float32).T
    bits = np.where(np.isnan(expected), np.uint32(0x7FFFFFFF), expected.copy().view(np.uint32))
    np.testing.assert_array_equal(fn(inputs, **flags).view(np.uint32), bits)
    scalars = [np.asarray(fn(x, **flags)).view(np.uint32) for x in inputs.tolist()]
    np.testing.assert_array_equal(scalars, bits)


@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name):
    check_table(name, SPECIAL[name])


@pytest.mark.parametrize("name", FLUSHED)
def test_special_values_with_ftz(name):
    check_table(name, FLUSHED[name], ftz=True)


OPCODES = [
    f"{name}.approx{ftz}.f32" for name in SPECIAL for ftz in ("", ".ftz")[: 1 + (name in FLUSHED)]
]
OPCODES += ["div.full.f32", "div.full.ftz.f32", "div.approx.f32"]
OPCODES += ["ex2.approx.f16", "ex2.approx.ftz.bf16", "tanh.approx.f16", "tanh.approx.bf16"]


@pytest.mark.parametrize("opcode", OPCODES)
def test_bounds_of_the_manual(opcode):
    """Every code of 16 bits, otherwise numbers of every exponent and many from one period."""
    name, how, *_, form = opcode.split(".")
    flags = {"ftz": True} if "ftz" in opcode and form == "f32" else {}
    if form == "f32":
        fn = getattr(approx, f"{name}_{how}")
        values = np.concatenate([all_exponents(), -all_exponents(), sweep(-4, 4), sweep(-151, 129)])
        operands = [values, values[::-1].copy()] if name == "div" else [values]
        codes = [x.view(np.uint32) for x in operands]
    else:
        fn = getattr(approx, f"{name}_{how}_{form}")
        operands = codes = [np.arange(65536, dtype=np.uint16)]
    found = np.asarray(fn(*operands, **flags))
    for bound in bounds_of(opcode):
        error = excess(opcode, bound, codes, found.view(codes[0].dtype))
        assert error.max() <= 1, (error.max(), operands[0][error.argmax()])


def test_powers_of_two_are_exact():
    whole = np.arange(-149, 128, dtype=np.float32)
    powers = np.ldexp(np.float32(1), whole.astype(int))
    np.testing.assert_array_equal(approx.ex2_approx(whole), powers)
    np.testing.assert_array_equal(approx.lg2_approx(powers), whole)


def test_a_quotient_beyond_the_range_of_its_divisor():
    """The result is zero from 2^126 on; infinity is an exception."""
    got = approx.div_approx(np.float32([1, -1, inf, nan, 0]), np.float32(2.0**127))
    np.testing.assert_array_equal(got.view(np.uint32), [0, 1 << 31, 0x7FFFFFFF, 0x7FFFFFFF, 0])
    assert approx.div_approx(1.0, np.float32(2.0**126)) == 2.0**-126
    assert approx.div_approx(1.0, inf) == 0


# CRC-32 of the results on `probe`: any difference between machines shows here
FINGERPRINTS = {
    "ex2": 0xF5F3B3DD,
    "lg2": 0x1E007F52,
    "rcp": 0xB44A0F14,
    "rsqrt": 0xE5067525,
    "sqrt": 0x627C6F10,
    "sin": 0x67FB8361,
    "cos": 0x34C31E31,
    "tanh": 0xCA88750F,
}


def probe():
    bits = np.arange(0, 2**32, 65_521, dtype=np.uint32)
    return bits.view(np.float32)


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_same_bits_everywhere(name):
    result = getattr(approx, f"{name}_approx")(probe())
    assert zlib.crc32(result.astype("<f4").tobytes()) == FINGERPRINTS[name]
