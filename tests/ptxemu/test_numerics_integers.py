"""Integer instructions and conversions against the manual's pseudocode on Python ints."""

from fractions import Fraction
from math import ceil, floor, isnan, trunc

import numpy as np
import pytest

from ptxemu.numerics import conversions, integers
from ptxemu.numerics.formats import bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16

KIND = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


def operands(width, count=3, seed=8, small=()):
    """Edge values crossed, then random ones; the operands named in `small` are mostly below 80."""
    edges = [0, 1, 2, 31, 33, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    crossed = [x.ravel() for x in np.meshgrid(*[np.array(edges, dtype=np.uint64)] * count)]
    generator = np.random.default_rng(seed)
    random = generator.integers(0, 2**64, (count, 300), dtype=np.uint64)
    random[:, :150] >>= generator.integers(0, 64, (count, 150), dtype=np.uint64)
    for index in small:
        random[index, :] = generator.integers(0, 80, 300)
    mask = np.uint64((1 << width) - 1)
    joined = (np.concatenate(pair) & mask for pair in zip(crossed, random, strict=True))
    return [x.astype(KIND[width]) for x in joined]


def signed_value(x, width, signed=True):
    return x - (1 << width) if signed and x >> (width - 1) else x


def check(fn, reference, arrays, width, **options):
    """Array results against the reference on ints, and the int form of the call on a few."""
    lanes = list(zip(*(a.tolist() for a in arrays), strict=True))
    expected = [reference(*lane) for lane in lanes]
    got = fn(*arrays, width=width, **options)
    np.testing.assert_array_equal(np.asarray(got).astype(np.uint64), np.array(expected, np.uint64))
    for lane, value in list(zip(lanes, expected, strict=True))[::97]:
        scalar = fn(*lane, width=width, **options)
        assert type(scalar) is int
        assert scalar == value


@pytest.mark.parametrize("width", [16, 32, 64])
@pytest.mark.parametrize("signed", [False, True])
def test_products_and_quotients(width, signed):
    mask = (1 << width) - 1
    arrays = operands(width, 2)

    def value(x):
        return signed_value(x, width, signed)

    def quotient(a, b):
        if b == 0:
            return mask
        size = abs(value(a)) // abs(value(b))
        return (-size if (value(a) < 0) != (value(b) < 0) else size) & mask

    def remainder(a, b):
        size = abs(value(a)) % abs(value(b)) if b else 0
        return mask if b == 0 else (-size if value(a) < 0 else size) & mask

    check(
        integers.mul_hi,
        lambda a, b: value(a) * value(b) >> width & mask,
        arrays,
        width,
        signed=signed,
    )
    check(integers.div, quotient, arrays, width, signed=signed)
    check(integers.rem, remainder, arrays, width, signed=signed)
    check(
        integers.sad,
        lambda a, b, c: (c + abs(value(a) - value(b))) & mask,
        operands(width),
        width,
        signed=signed,
    )
    if width < 64:
        double = (1 << 2 * width) - 1
        check(
            integers.mul_wide,
            lambda a, b: value(a) * value(b) & double,
            arrays,
            width,
            signed=signed,
        )


@pytest.mark.parametrize("signed", [False, True])
def test_mul24(signed):
    def product(a, b):
        return signed_value(a & 0xFFFFFF, 24, signed) * signed_value(b & 0xFFFFFF, 24, signed)

    arrays, mask = operands(32, 2), 0xFFFFFFFF
    check(integers.mul24, lambda a, b: product(a, b) & mask, arrays, 32, signed=signed)
    check(
        integers.mul24,
        lambda a, b: product(a, b) >> 16 & mask,
        arrays,
        32,
        signed=signed,
        high=True,
    )


def test_saturating_and_extended_precision_sums():
    arrays = operands(32, 2)

    def clamp(x):
        return min(max(x, -(1 << 31)), (1 << 31) - 1) & 0xFFFFFFFF

    def number(x):
        return signed_value(x, 32)

    check(integers.add_sat, lambda a, b: clamp(number(a) + number(b)), arrays, 32)
    check(integers.sub_sat, lambda a, b: clamp(number(a) - number(b)), arrays, 32)
    for width in (32, 64):
        a, b, c = operands(width)
        carry = c & KIND[width](1)
        total, carry_out = integers.add_carry(a, b, carry, width=width)
        rest, borrow_out = integers.sub_borrow(a, b, carry, width=width)
        for lane in range(len(a)):
            x, y, z = int(a[lane]), int(b[lane]), int(carry[lane])
            assert int(carry_out[lane]) << width | int(total[lane]) == x + y + z
            assert int(rest[lane]) - (int(borrow_out[lane]) << width) == x - y - z
    assert integers.add_carry(0xFFFFFFFF, 0, 1) == (0, 1)


@pytest.mark.parametrize("width", [32, 64])
def test_counting(width):
    arrays, mask = operands(width, 1), (1 << width) - 1
    check(integers.popc, lambda a: a.bit_count(), arrays, width)
    check(integers.clz, lambda a: width - a.bit_length(), arrays, width)
    check(integers.brev, lambda a: int(f"{a:0{width}b}"[::-1], 2), arrays, width)
    for signed in (False, True):

        def top(a, signed=signed):
            return (a ^ mask if signed and a >> (width - 1) else a).bit_length() - 1

        check(integers.bfind, lambda a, t=top: t(a) & 0xFFFFFFFF, arrays, width, signed=signed)
        check(
            integers.bfind,
            lambda a, t=top: width - 1 - t(a) if t(a) >= 0 else 0xFFFFFFFF,
            arrays,
            width,
            signed=signed,
            shiftamt=True,
        )


def test_fns():
    def reference(mask, base, offset):
        offset = signed_value(offset, 32)
        positions = (
            [base] if offset == 0 else range(base, 32) if offset > 0 else range(base, -1, -1)
        )
        found = [p for p in positions if mask >> p & 1]
        rank = max(abs(offset), 1) - 1
        return found[rank] if rank < len(found) else 0xFFFFFFFF

    generator = np.random.default_rng(1)
    mask = generator.integers(0, 2**32, 500, dtype=np.uint32)
    base = generator.integers(0, 32, 500, dtype=np.uint32)
    offset = generator.integers(-20, 21, 500).astype(np.uint32)
    check(integers.fns, reference, [mask, base, offset], 32)
    assert [integers.fns(0xAAAAAAAA, b, o) for b, o in ((3, 1), (3, -1), (2, 1), (2, -1))] == [
        3,
        3,
        3,
        1,
    ]


@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("signed", [False, True])
def test_bit_fields(width, signed):
    def extract(a, start, length):
        start, length = start & 255, length & 255
        sign = a >> min(start + length - 1, width - 1) & 1 if signed and length else 0
        bits = (
            a >> (start + i) & 1 if i < length and start + i < width else sign for i in range(width)
        )
        return sum(bit << i for i, bit in enumerate(bits))

    def insert(a, b, start, length):
        for i in range(min(length & 255, max(width - (start & 255), 0))):
            position = (start & 255) + i
            b = b & ~(1 << position) | (a >> i & 1) << position
        return b

    arrays = operands(width, small=(1, 2))
    check(integers.bfe, extract, arrays, width, signed=signed)
    if not signed:
        check(integers.bfi, insert, [arrays[0], arrays[0][::-1].copy(), *arrays[1:]], width)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts(width):
    arrays, mask = operands(width, 2, small=(1,)), (1 << width) - 1
    check(integers.shl, lambda a, n: a << min(n, width) & mask, arrays, width)
    check(integers.shr, lambda a, n: a >> min(n, width), arrays, width)
    check(
        integers.shr,
        lambda a, n: signed_value(a, width) >> min(n, width) & mask,
        arrays,
        width,
        signed=True,
    )


@pytest.mark.parametrize("wrap", [False, True])
def test_funnel_shift_extension_and_mask(wrap):
    def amount(c):
        return c & 31 if wrap else min(c, 32)

    arrays, full = operands(32, small=(2,)), 0xFFFFFFFF
    check(
        integers.shf,
        lambda a, b, c: (b << 32 | a) << amount(c) >> 32 & full,
        arrays,
        32,
        left=True,
        wrap=wrap,
    )
    check(
        integers.shf,
        lambda a, b, c: (b << 32 | a) >> amount(c) & full,
        arrays,
        32,
        left=False,
        wrap=wrap,
    )

    def extend(a, b, signed):
        bits = amount(b)
        field = a & ((1 << bits) - 1)
        return (signed_value(field, bits) if signed and bits else field) & full

    for signed in (False, True):
        check(
            integers.szext,
            lambda a, b, s=signed: extend(a, b, s),
            operands(32, 2, small=(1,)),
            32,
            signed=signed,
            wrap=wrap,
        )

    def ones(a, b):
        if wrap:
            a, b = a & 31, b & 31
        return ((1 << min(b, 32)) - 1) << a & full if a < 32 else 0

    check(integers.bmsk, ones, operands(32, 2, small=(0, 1)), 32, wrap=wrap)


@pytest.mark.parametrize("lut", [0x00, 0xE8, 0x96, 0x3C, 0x1B, 0xFF])
def test_lop3(lut):
    def reference(a, b, c):
        rows = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
        return sum((lut >> row & 1) << i for i, row in enumerate(rows))

    check(integers.lop3, reference, [x[::4].copy() for x in operands(32)], 32, lut=lut)
    assert integers.lop3(np.uint32([1, 2]), 3, 4, lut=0).shape == (2,)


# the manual's table, selectors 0 to 3, most significant byte first
PRMT_TABLE = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


@pytest.mark.parametrize("mode", ["", *PRMT_TABLE])
def test_prmt(mode):
    def reference(a, b, selector):
        source = (b << 32 | a).to_bytes(8, "little")
        if mode:
            return int.from_bytes(
                bytes(source[int(i)] for i in PRMT_TABLE[mode][selector & 3]), "big"
            )
        result = 0
        for i in range(4):
            pick = selector >> 4 * i & 15
            byte = source[pick & 7]
            result |= (255 * (byte >> 7) if pick & 8 else byte) << 8 * i
        return result

    a, b, selector = operands(32)
    check(integers.prmt, reference, [a, b, selector], 32, mode=mode)
    one = integers.prmt(a, 7, 0x5410, mode=mode)  # a uniform selector takes a path of its own
    assert one.tolist() == [reference(x, 7, 0x5410) for x in a.tolist()]
    stacked = integers.prmt(np.stack([a, b]), b, selector, mode=mode)
    np.testing.assert_array_equal(stacked[0], integers.prmt(a, b, selector, mode=mode))


@pytest.mark.parametrize("signed", [(False, False), (False, True), (True, False), (True, True)])
def test_packed_dot_products(signed):
    def items(x, size, sign):
        return [signed_value(x >> i & ((1 << size) - 1), size, sign) for i in range(0, 32, size)]

    def four(a, b, c):
        pairs = zip(items(a, 8, signed[0]), items(b, 8, signed[1]), strict=True)
        return (c + sum(x * y for x, y in pairs)) & 0xFFFFFFFF

    def two(a, b, c, first):
        pairs = zip(items(a, 16, signed[0]), items(b, 8, signed[1])[first:], strict=False)
        return (c + sum(x * y for x, y in pairs)) & 0xFFFFFFFF

    arrays = operands(32)
    check(integers.dp4a, four, arrays, 32, signed=signed)
    check(integers.dp2a, lambda *t: two(*t, 0), arrays, 32, signed=signed)
    check(integers.dp2a, lambda *t: two(*t, 2), arrays, 32, signed=signed, high=True)


FLOATS = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.99, -0.99, 127.5, 128.0, -128.5, 255.5]
FLOATS += [2.0**31, -(2.0**31), 2.0**31 - 128, 2.0**32, 2.0**63, -(2.0**63), 2.0**64, 1e30, -1e30]
FLOATS += [float("inf"), -float("inf"), float("nan"), 2.0**-140]
INTEGRAL = {"rni": round, "rzi": trunc, "rmi": floor, "rpi": ceil}


@pytest.mark.parametrize("rounding", INTEGRAL)
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_float_to_int(rounding, kind):
    x = np.array(FLOATS, dtype=kind)
    for bits in (8, 16, 32, 64):
        for signed in (False, True):
            low = -(1 << (bits - 1)) if signed else 0
            high = (1 << (bits - signed)) - 1
            unordered = low if signed else 1 << (bits - 1)
            if kind is np.float32 and bits < 64:
                unordered = 0  # manual, "Integer Notes" of cvt
            expected = []
            for value in x.tolist():
                if isnan(value):
                    expected.append(unordered)
                elif np.isinf(value):
                    expected.append(high if value > 0 else low)
                else:
                    expected.append(min(max(INTEGRAL[rounding](value), low), high))
            got = conversions.float_to_int(x, bits, signed, rounding)
            assert got.dtype == np.dtype(f"{'i' if signed else 'u'}{bits // 8}")
            assert got.tolist() == expected
    if kind is np.float32:
        whole = conversions.round_f32(x, rounding)
        finite = np.isfinite(x)
        assert whole[finite].tolist() == [INTEGRAL[rounding](v) for v in x[finite].tolist()]
        assert conversions.round_f32(np.float32(-0.0), "rpi").view(np.uint32) == 0x80000000
    assert conversions.float_to_int(np.float32(2.0**-140), 32, True, "rpi", ftz=True) == 0


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("kind", ["i2", "u2", "i4", "u4", "i8", "u8"])
def test_int_to_float(kind, rounding):
    limits = np.iinfo(kind)
    generator = np.random.default_rng(11)
    values = generator.integers(limits.min, limits.max, 300, dtype=kind, endpoint=True)
    values[:150] >>= generator.integers(0, limits.bits, 150).astype(kind)
    edges = [limits.min, limits.max, 0, 1, 2049, 2051, 257, 259, 65519, 65520]
    edges += [2**24 + 1, 2**24 + 3, 2**40 + 2**16, 2**40 + 2**16 + 1, 2**53 + 1, 2**63 + 1025]
    values = np.concatenate([values, np.array([e for e in edges if e <= limits.max], dtype=kind)])
    for convert, decode, step_up, step_down in (
        (conversions.int_to_f32, np.float32, *neighbours(np.float32)),
        (conversions.int_to_f64, np.float64, *neighbours(np.float64)),
        (conversions.int_to_f16, f16_to_f32, *neighbours(np.float16)),
        (conversions.int_to_bf16, bf16_to_f32, bf16_up, bf16_down),
    ):
        for value, result in zip(values.tolist(), convert(values, rounding), strict=True):
            got = float(decode(result))
            assert_rounded(value, got, rounding, float(step_up(got)), float(step_down(got)))


def neighbours(kind):
    """The next value of a float type above and below a value."""
    return (
        lambda v: np.nextafter(kind(v), kind(np.inf)),
        lambda v: np.nextafter(kind(v), kind(-np.inf)),
    )


def bf16_up(value):
    code = int(f32_to_bf16(np.float32(value)))
    return bf16_to_f32(np.uint16(code + 1 if value >= 0 else code - 1))


def bf16_down(value):
    return -bf16_up(-value) if value else -bf16_up(0.0)


def assert_rounded(exact, got, rounding, above, below):
    """`got` is the rounding of an integer, judged by its neighbours (f16 may overflow)."""
    if np.isinf(got):
        largest = 65504 if rounding != "rn" else 65519
        assert (exact > largest) if got > 0 else (exact < -largest)
        assert rounding in ("rn", "rp" if got > 0 else "rm")
        return
    error = Fraction(exact) - Fraction(got)
    if rounding == "rn":
        if np.isfinite(above):
            assert 2 * error <= Fraction(above) - Fraction(got)
        if np.isfinite(below):
            assert 2 * -error <= Fraction(got) - Fraction(below)
    else:
        up = rounding == "rp" or (rounding == "rz" and exact < 0)
        assert error <= 0 if up else error >= 0
        limit = below if up else above
        if np.isfinite(limit):
            assert abs(error) < abs(Fraction(limit) - Fraction(got))


def test_saturate_int():
    words = np.array([-200, -1, 0, 127, 128, 70000], dtype=np.int32)
    assert conversions.saturate_int(words, 8, True).tolist() == [-128, -1, 0, 127, 127, 127]
    assert conversions.saturate_int(words, 16, False).tolist() == [0, 0, 0, 127, 128, 65535]
    top = np.array([2**32 - 1], dtype=np.uint32)
    assert conversions.saturate_int(top, 32, True).tolist() == [2**31 - 1]
    assert f32_to_f16(conversions.int_to_f32(np.int32(-3))) == 0xC200
