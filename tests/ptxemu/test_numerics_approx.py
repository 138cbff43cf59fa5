"""The approximations: the manual's special values and error bounds, the same bits everywhere."""

import zlib
from math import inf, nan

import numpy as np
import pytest

from lab.silicon.conformance.bounds import bounds_of, excess
from ptxemu.numerics import approx

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
    """On every code of 16 bits, else on numbers of every exponent and many of one turn."""
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
    """2^126 and more: zero, of which infinity is none."""
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
