"""Codecs against slow references: exhaustive over codes, and at and beside every midpoint."""

import numpy as np
import pytest

from ptxemu.numerics import formats
from ptxemu.numerics.formats import E2M1, E2M3, E3M2, E4M3, E5M2

MINIFLOATS = {"e4m3": E4M3, "e5m2": E5M2, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}
# (largest value, smallest positive value) of the OCP formats, and the f32 value of a few codes
KNOWN = {
    "e4m3": (448.0, 2.0**-9, {0x38: 1.0, 0x08: 2.0**-6, 0x81: -(2.0**-9)}),
    "e5m2": (57344.0, 2.0**-16, {0x3C: 1.0, 0x04: 2.0**-14, 0x7C: np.inf}),
    "e3m2": (28.0, 0.0625, {0x0C: 1.0, 0x2C: -1.0}),
    "e2m3": (7.5, 0.125, {0x08: 1.0, 0x28: -1.0}),
    "e2m1": (6.0, 0.5, {0x02: 1.0, 0x0A: -1.0}),
}
SPECIAL_BITS = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def f32(bits):
    return np.asarray(bits, dtype=np.uint32).view(np.float32)


def decode(name, codes):
    return getattr(formats, f"{name}_to_f32")(codes)


def encode(name, values, **flags):
    return getattr(formats, f"f32_to_{name}")(values, **flags)


def random_f32(count, seed=1):
    return f32(np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32))


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloat_known_values(name):
    largest, smallest, codes = KNOWN[name]
    form = MINIFLOATS[name]
    assert decode(name, np.uint8(form.largest)) == largest
    assert decode(name, np.uint8(1)) == smallest
    for code, value in codes.items():
        assert decode(name, np.uint8(code)) == value


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloat_rounds_to_nearest_even_and_saturates(name):
    form = MINIFLOATS[name]
    magnitudes = decode(name, np.arange(form.largest + 1, dtype=np.uint8)).astype(np.float64)
    assert np.all(np.diff(magnitudes) > 0)
    middles = ((magnitudes[:-1] + magnitudes[1:]) / 2).astype(np.float32)
    near = [magnitudes.astype(np.float32), middles]
    near += [np.nextafter(x, np.float32(side)) for x in near for side in (0, np.inf)]
    values = np.concatenate([*near, f32(SPECIAL_BITS[:6]), random_f32(4000)])
    values = np.concatenate([values, -values])
    values = values[~np.isnan(values)]
    got = encode(name, values)

    distance = np.abs(np.minimum(np.abs(values), magnitudes[-1])[:, None] - magnitudes)
    nearest = np.argmin(distance, axis=1)
    tie = distance[np.arange(len(values)), np.minimum(nearest + 1, form.largest)]
    tie = (tie == distance.min(axis=1)) & (nearest < form.largest)
    expected = nearest + (tie & (nearest % 2 == 1))
    signs = np.signbit(values).astype(int) << form.sign_bit
    np.testing.assert_array_equal(got, expected | signs)
    np.testing.assert_array_equal(
        encode(name, values, relu=True), np.where(np.signbit(values), 0, expected)
    )


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloat_nan_and_round_trip(name):
    form = MINIFLOATS[name]
    codes = np.arange(1 << (form.sign_bit + 1), dtype=np.uint8)
    values = decode(name, codes)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(encode(name, values)[finite], codes[finite])
    nans = f32([0x7FC00000, 0xFFC00001, 0x7F800001])
    assert set(encode(name, nans)) == {form.nan}  # NaN, or positive MAX_NORM where there is none
    assert set(encode(name, nans, relu=True)) == {form.nan}
    np.testing.assert_array_equal(formats.minifloat_to_f16(codes, name), formats.f32_to_f16(values))
    relu = formats.minifloat_to_f16(codes, name, relu=True)
    np.testing.assert_array_equal(
        relu[~np.isnan(values)],
        formats.f32_to_f16(np.where(np.signbit(values), np.float32(0), values))[~np.isnan(values)],
    )


def sixteen_bit_steps(decoder, infinity):
    """Every non-negative finite code, its value and the next one's (2^k for infinity)."""
    codes = np.arange(infinity, dtype=np.uint16)
    low = decoder(codes).astype(np.float64)
    high = np.append(low[1:], 2 * low[-1] - low[-2])
    return codes, low, high


@pytest.mark.parametrize(("name", "infinity"), [("f16", 0x7C00), ("bf16", 0x7F80)])
def test_sixteen_bits_every_interval_and_rounding(name, infinity):
    codes, low, high = sixteen_bit_steps(lambda c: decode(name, c), infinity)
    middle = ((low + high) / 2).astype(np.float32)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    nearest_even = codes + (codes & 1)
    for values, nearest in ((middle, nearest_even), (below, codes), (above, codes + 1)):
        for sign, flip in ((np.float32(1), 0), (np.float32(-1), 0x8000)):
            x = values * sign
            expected = {
                "rn": nearest,
                "rz": codes,
                "rm": codes + bool(flip),
                "rp": codes + (not flip),
            }
            for rounding, code in expected.items():
                np.testing.assert_array_equal(encode(name, x, rounding=rounding), code | flip)
            clamped = np.minimum(nearest, infinity - 1)
            np.testing.assert_array_equal(encode(name, x, satfinite=True), clamped | flip)
            relu = np.zeros_like(codes) if flip else nearest
            np.testing.assert_array_equal(encode(name, x, relu=True), relu)


@pytest.mark.parametrize(("name", "infinity"), [("f16", 0x7C00), ("bf16", 0x7F80)])
@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_sixteen_bits_round_trip_nan_infinity(name, infinity, rounding):
    codes = np.arange(65536, dtype=np.uint16)
    nan = (codes & 0x7FFF) > infinity
    got = encode(name, decode(name, codes), rounding=rounding)
    np.testing.assert_array_equal(got, np.where(nan, 0x7FFF, codes))
    for flags in ({"relu": True}, {"satfinite": True}):
        assert np.all(encode(name, decode(name, codes[nan]), rounding=rounding, **flags) == 0x7FFF)
    top = encode(name, np.float32(np.inf), rounding=rounding, satfinite=True)
    assert top == infinity - 1


def test_decoders_accept_scalars_and_shapes():
    assert formats.f32_to_bf16(1.5) == 0x3FC0
    assert formats.f32_to_e2m1(-6.0) == 0xF
    assert formats.bf16_to_f32(np.full((2, 3, 4), 0x3F80, np.uint16)).shape == (2, 3, 4)
    assert formats.f32_to_e4m3(np.ones((2, 3, 4), np.float32)).shape == (2, 3, 4)


@pytest.mark.parametrize("rounding", ["rna", "rn", "rz"])
def test_tf32(rounding):
    x = np.concatenate([random_f32(20000), f32(SPECIAL_BITS[:6]), f32([0x3F801000, 0x3F803000])])
    x = x[~np.isnan(x)]
    code = formats.f32_to_tf32(x, rounding)
    assert not np.any(code & 0x1FFF)
    bits = x.view(np.uint32).astype(np.int64)
    low = bits & 0x1FFF
    up = {"rz": low < 0, "rna": low >= 0x1000, "rn": low + (bits >> 13 & 1) > 0x1000}[rounding]
    up &= np.isfinite(x)
    np.testing.assert_array_equal(code, (bits - low + up * 0x2000).astype(np.uint32))
    top = formats.f32_to_tf32(f32([0x7F800000, 0xFF7FFFFF]), rounding, satfinite=True)
    np.testing.assert_array_equal(top, [0x7F7FE000, 0xFF7FE000])
    assert formats.f32_to_tf32(np.float32(-1), rounding, relu=True) == 0
    # H100, and the instructions that ptxas emits for sm_100a: .rna only truncates a NaN
    expected = 0xFFC12000 if rounding == "rna" else 0x7FFFE000
    assert formats.f32_to_tf32(f32(0xFFC12345), rounding) == expected
    assert formats.tf32_to_f32(np.uint32(0x3F801FFF)) == 1.0


@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_ue8m0(rounding):
    fields = np.arange(255, dtype=np.uint32) << 23
    for mantissa in (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF):
        x = f32(fields | mantissa)
        exact = x.astype(np.float64)
        with np.errstate(divide="ignore"):
            logarithm = np.log2(exact)
        power = np.floor(logarithm) if rounding == "rz" else np.ceil(logarithm)
        code = np.clip(power + 127, 0, 255)
        np.testing.assert_array_equal(formats.f32_to_ue8m0(x, rounding), code)
        np.testing.assert_array_equal(formats.f32_to_ue8m0(-x, rounding), code)
        saturated = formats.f32_to_ue8m0(x, rounding, satfinite=True)
        np.testing.assert_array_equal(saturated, np.minimum(code, 254))
    assert formats.f32_to_ue8m0(np.inf, rounding) == 0xFF
    assert formats.f32_to_ue8m0(-np.inf, rounding, satfinite=True) == 0xFE
    assert formats.f32_to_ue8m0(np.nan, rounding, satfinite=True) == 0xFF
    codes = np.arange(255, dtype=np.uint8)
    values = formats.ue8m0_to_f32(codes)
    np.testing.assert_array_equal(values, 2.0 ** (codes.astype(np.float64) - 127))
    np.testing.assert_array_equal(formats.bf16_to_f32(formats.ue8m0_to_bf16(codes)), values)
    assert formats.ue8m0_to_bf16(np.uint8(255)) == 0x7FFF


def test_s2f6():
    codes = np.arange(256, dtype=np.uint8)
    values = formats.s2f6_to_f32(codes)
    assert (values.min(), values.max(), values[1]) == (-2.0, 127 / 64, 1 / 64)
    np.testing.assert_array_equal(formats.f32_to_s2f6(values), codes)
    np.testing.assert_array_equal(
        formats.f32_to_s2f6(np.float32([0.5 / 64, 1.5 / 64, 9, -9, np.nan])), [0, 2, 127, 128, 127]
    )
    assert formats.f32_to_s2f6(np.float32(-1), relu=True) == 0


def test_f64_to_sixteen_bits_rounds_once():
    # one f32 rounding first would land on the midpoint and then round to even, away from these
    just_above_tie = 1 + 2.0**-11 + 2.0**-40
    just_below_tie = 1 + 3 * 2.0**-11 - 2.0**-40
    assert formats.f64_to_f16(just_above_tie) == 0x3C01
    assert formats.f64_to_f16(just_below_tie) == 0x3C01
    assert formats.f64_to_bf16(1 + 2.0**-8 + 2.0**-40) == 0x3F81
    assert formats.f64_to_bf16(1 + 2.0**-8 - 2.0**-40) == 0x3F80
    assert formats.f64_to_f16(2.0**-1000, "rp") == 1
    payload = np.array([0xFFFB4709AF8C68B7], dtype=np.uint64).view(np.float64)  # as on H100
    assert formats.f64_to_f16(payload) == 0xFED1
    assert formats.f64_to_bf16(payload) == 0xFFDA
