"""The approximations: the manual's special values and error bounds, the same bits everywhere."""

import zlib
from math import inf, nan

import numpy as np
import pytest

from ptxemu.numerics import approx
from ptxemu.numerics.formats import bf16_to_f32, f16_to_f32

SUB = 2.0**-130  # an f32 subnormal


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def sweep(low, high, count=200_001, seed=4):
    """A dense sweep and as many random points of [low, high], as f32."""
    random = np.random.default_rng(seed).uniform(low, high, count)
    return np.concatenate([np.linspace(low, high, count), random]).astype(np.float32)


def all_exponents(count=200_001):
    """Positive finite f32 values of every exponent."""
    bits = np.random.default_rng(6).integers(1, 0x7F800000, count, dtype=np.uint32)
    return bits.view(np.float32)


def worst_ulp(got, exact):
    """Largest distance from the correctly rounded result, in its last places."""
    right = exact.astype(np.float32)
    keep = np.isfinite(right)
    assert np.array_equal(np.isinf(got), ~keep)
    error = np.abs(got[keep].astype(np.float64) - right[keep])
    return np.max(error / np.spacing(np.abs(right[keep])).astype(np.float64))


def worst_relative(got, exact):
    keep = exact != 0
    return float(np.max(np.abs(got[keep] - exact[keep]) / np.abs(exact[keep])))


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


@pytest.mark.parametrize("ftz", [False, True])
def test_ex2_bound_is_2_ulp(ftz):
    x = np.concatenate([sweep(-151, 129), sweep(-1, 1)])
    exact = np.exp2(x.astype(np.longdouble))
    got = approx.ex2_approx(x, ftz=ftz)
    if ftz:
        assert np.array_equal(got == 0, x < -126)
        got, exact = got[x >= -126], exact[x >= -126]
    assert worst_ulp(got, exact) <= 1
    whole = np.arange(-149, 128, dtype=np.float32)
    powers = np.ldexp(np.float32(1), whole.astype(int))
    np.testing.assert_array_equal(approx.ex2_approx(whole), powers)


def test_lg2_bound():
    x = np.concatenate([all_exponents(), sweep(0.4, 2.5), np.float32([1 - 2.0**-24, 1 + 2.0**-23])])
    exact = np.log2(x.astype(np.longdouble))
    got = approx.lg2_approx(x)
    inner = (x > 0.5) & (x < 2)
    assert np.max(np.abs(got - exact)[inner]) <= 2.0**-22
    assert worst_relative(got[~inner], exact[~inner]) <= 2.0**-22
    powers = np.ldexp(np.float32(1), np.arange(-149, 128))
    np.testing.assert_array_equal(approx.lg2_approx(powers), np.arange(-149, 128))


def test_rcp_sqrt_rsqrt_bounds():
    x = all_exponents()
    wide = x.astype(np.longdouble)
    assert worst_ulp(approx.rcp_approx(x), 1 / wide) == 0  # manual: 1 ulp
    assert worst_ulp(approx.sqrt_approx(x), np.sqrt(wide)) == 0  # manual: 2^-23 relative
    assert worst_relative(approx.rsqrt_approx(x), 1 / np.sqrt(wide)) <= 2.0**-22.9


def test_sin_cos_bound():
    x = sweep(-np.pi, np.pi)
    wide = x.astype(np.longdouble)
    assert np.max(np.abs(approx.sin_approx(x) - np.sin(wide))) <= 2.0**-20.5
    assert np.max(np.abs(approx.cos_approx(x) - np.cos(wide))) <= 2.0**-20.5
    large = sweep(-1e5, 1e5)
    assert (
        np.max(np.abs(approx.sin_approx(large) - np.sin(large.astype(np.longdouble)))) <= 2.0**-20.5
    )
    assert np.all(np.abs(approx.cos_approx(all_exponents())) <= 1)


def test_tanh_bound():
    x = np.concatenate([sweep(-12, 12), all_exponents(), -all_exponents()])
    assert worst_relative(approx.tanh_approx(x), np.tanh(x.astype(np.longdouble))) <= 2.0**-11


def test_division():
    a, b = all_exponents(), all_exponents()[::-1]
    exact = a.astype(np.longdouble) / b
    assert worst_ulp(approx.div_full(a, b), exact) == 0  # manual: 2 ulp
    inside = b <= 2.0**126
    np.testing.assert_array_equal(approx.div_approx(a, b)[inside], approx.div_full(a, b)[inside])
    big = np.float32(2.0**127)
    got = approx.div_approx(np.float32([1, -1, inf, nan, 0]), big)
    np.testing.assert_array_equal(got.view(np.uint32), [0, 1 << 31, 0x7FFFFFFF, 0x7FFFFFFF, 0])
    assert approx.div_approx(1.0, np.float32(2.0**126)) == 2.0**-126
    assert approx.div_approx(1.0, inf) == 0
    assert approx.div_full(2.0**-120, 2.0**20, ftz=True) == 0


def test_half_precision_bounds():
    codes = np.arange(65536, dtype=np.uint16)
    for decode, ex2, tanh, relative, absolute in (
        (f16_to_f32, approx.ex2_approx_f16, approx.tanh_approx_f16, 2.0**-9.9, 2.0**-10.987),
        (bf16_to_f32, approx.ex2_approx_bf16, approx.tanh_approx_bf16, 2.0**-7, 2.0**-8),
    ):
        x = decode(codes)
        unordered = np.isnan(x)
        powers, tanhs = decode(ex2(codes)), decode(tanh(codes))
        assert set(ex2(codes[unordered])) == set(tanh(codes[unordered])) == {0x7FFF}
        exact = np.exp2(x.astype(np.float64))
        lowest = 2.0**-14 if decode is f16_to_f32 else 2.0**-126
        normal = (exact >= lowest) & np.isfinite(powers) & ~unordered
        assert worst_relative(powers[normal], exact[normal]) <= relative
        error = np.abs(tanhs - np.tanh(x.astype(np.float64)))[~unordered]
        assert np.max(error) <= absolute
    assert approx.ex2_approx_f16(0xFC00) == 0
    assert approx.ex2_approx_bf16(np.uint16(0xC300)) == 0  # 2^-128 is flushed


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


@pytest.mark.parametrize("name", ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"])
def test_same_bits_everywhere(name):
    result = getattr(approx, f"{name}_approx")(probe())
    assert zlib.crc32(result.astype("<f4").tobytes()) == FINGERPRINTS[name]
