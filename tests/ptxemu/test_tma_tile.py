"""TMA tiles against a loop over elements: loads, stores and reductions, in and out of bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tensor_map import decode, encode
from ptxemu.machine.tma_tile import (
    combine,
    gather_tile,
    load_tile,
    place_tile,
    reduce_tile,
    store_tile,
)
from ptxemu.numerics.swizzle import BY_NAME

BASE = 0x7000_0000_0000


class FlatMemory:
    """A bounds-checked range of bytes at BASE."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def _index(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        index = (addresses - BASE)[:, None] + np.arange(nbytes)
        assert index.min() >= 0
        assert index.max() < self.data.size
        return index

    def read_rows(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        return self.data[self._index(addresses, nbytes)]

    def write_rows(self, addresses: np.ndarray, data: np.ndarray) -> None:
        self.data[self._index(addresses, data.shape[1])] = data


def elements(tm, coords):
    """Of each element of the box, dimension 0 fastest: its offset from BASE, None out of bounds."""
    size = tm.element_bits // 8
    steps = (size, *tm.strides)
    for place in itertools.product(*(range(side) for side in reversed(tm.box))):
        position = [c + p for c, p in zip(coords, reversed(place), strict=True)]
        if all(0 <= x < n for x, n in zip(position, tm.dims, strict=True)):
            yield tm.address - BASE + sum(x * s for x, s in zip(position, steps, strict=True))
        else:
            yield None


def make(rank, dtype="bf16", swizzle="none", inner=16):
    """A map over a tensor of odd sizes and padded strides, and a memory that just holds it."""
    size = {"u8": 1, "bf16": 2, "f16": 2, "f32": 4, "tf32": 4, "u32": 4}[dtype]
    dims = (37, 5, 4, 3, 3)[:rank]
    strides, step = [], -(-37 * size // 16) * 16 + 16
    for n in dims[1:]:
        strides.append(step)
        step = step * n + 16
    data = np.random.default_rng(rank).integers(0, 256, step, dtype=np.uint8)
    box = (inner // size, 3, 2, 2, 2)[:rank]
    return decode(encode(BASE, dims, tuple(strides), box, dtype, swizzle)), FlatMemory(data)


INSIDE = (1, 1, 2, 0, 1)
COORDS = [INSIDE, (-3, -1, -1, -1, -2), (35, 3, 3, 2, 2), (40, 0, 0, 0, 0), (0, 9, 0, 0, 0)]


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("start", COORDS)
@pytest.mark.parametrize("dtype", ["u8", "bf16", "f32"])
def test_load_and_store_touch_the_elements_in_bounds(rank, start, dtype):
    tm, memory = make(rank, dtype, inner=32)
    coords, size = start[:rank], tm.element_bits // 8
    image = load_tile(tm, coords, memory).reshape(-1, size)
    places = list(elements(tm, coords))
    zero = np.zeros(size, np.uint8)
    expected = [zero if at is None else memory.data[at : at + size] for at in places]
    np.testing.assert_array_equal(image, expected)

    fresh = np.random.default_rng(7).integers(0, 256, image.shape, dtype=np.uint8)
    after = memory.data.copy()
    for at, value in zip(places, fresh, strict=True):
        if at is not None:
            after[at : at + size] = value
    store_tile(tm, coords, fresh.reshape(-1), memory)
    np.testing.assert_array_equal(memory.data, after)


@pytest.mark.parametrize("swizzle", BY_NAME)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("offset", [0, 0x80, 0x480, 0x1380])
def test_place_swizzles_absolute_offsets_and_gather_inverts_it(swizzle, rank, offset):
    tm, memory = make(rank, swizzle=swizzle, inner=min(64, BY_NAME[swizzle].span))
    image = load_tile(tm, (0,) * rank, memory)
    smem = np.full(8192, 0xEE, np.uint8)
    place_tile(tm, image, smem, offset)
    expected = np.full(8192, 0xEE, np.uint8)
    row = tm.row_bytes
    for i, value in enumerate(image):
        # a row that is shorter than the pattern's still has a row of the pattern to itself
        place = offset + i // row * (BY_NAME[swizzle].span if swizzle != "none" else row) + i % row
        expected[BY_NAME[swizzle].apply(place)] = value
    np.testing.assert_array_equal(smem, expected)
    np.testing.assert_array_equal(gather_tile(tm, smem, offset), image)


@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_smem_address_is_checked(swizzle):
    tm, _ = make(2, swizzle=swizzle)
    image, smem = np.zeros(tm.box_bytes, np.uint8), np.zeros(1024, np.uint8)
    with pytest.raises(HardwareRefusal, match="0x40 not 128-byte aligned"):
        place_tile(tm, image, smem, 0x40)
    with pytest.raises(HardwareRefusal, match="limit is 0x400"):
        gather_tile(tm, smem, 0x400)


def test_instruction_and_map_must_agree_in_rank():
    tm, memory = make(3)
    with pytest.raises(HardwareRefusal, match="2-d TMA instruction on a 3-d tensor map"):
        load_tile(tm, (0, 0), memory)


@pytest.mark.parametrize(("dtype", "nbytes"), [("16u4_align16b", 8), ("16u6_align16b", 12)])
def test_unpacked_chunks_have_padding_up_to_16_bytes(dtype, nbytes):
    pitch = 16 * nbytes  # of 4 rows of 256 elements
    data = np.random.default_rng(0).integers(0, 256, 4 * pitch, dtype=np.uint8)
    tm = decode(encode(BASE, (256, 4), (pitch,), (128, 2), dtype))
    image = load_tile(tm, (128, 3), FlatMemory(data)).reshape(2, 8, 16)
    np.testing.assert_array_equal(image[0, :, :nbytes].reshape(-1), data[3 * pitch + pitch // 2 :])
    assert not image[1].any()
    assert not image[:, :, nbytes:].any()
    with pytest.raises(HardwareRefusal, match="coordinate 0 is 64"):
        load_tile(tm, (64, 0), FlatMemory(data))
    with pytest.raises(UnsupportedPtx, match=f"padded type {dtype.upper()}"):
        store_tile(tm, (0, 0), image.reshape(-1), FlatMemory(data))


def test_unpacked_chunks_of_windows_that_overlap():
    """Rows of 192 elements, not a multiple of the 128 that a box has: a second dimension steps by
    32 bytes, the least that the manual allows, and every box lies within its row."""
    rows = np.random.default_rng(0).integers(0, 256, (5, 96), dtype=np.uint8)
    dims, strides, box = (128, 5, 2), (96, 32), (128, 2, 1)
    tm = decode(encode(BASE, dims, strides, box, "16u4_align16b"))
    for row, window in itertools.product(range(5), range(2)):
        image = load_tile(tm, (0, row, window), FlatMemory(rows.reshape(-1)))
        expected = np.zeros((2, 64), np.uint8)
        taken = rows[row : row + 2, 32 * window : 32 * window + 64]
        expected[: len(taken)] = taken
        chunks = image.reshape(2, 8, 16)
        np.testing.assert_array_equal(chunks[:, :, :8].reshape(2, 64), expected)
        assert not chunks[:, :, 8:].any()
    with pytest.raises(HardwareRefusal, match="stride of dimension 2 is 16 bytes"):
        encode(BASE, dims, (96, 16), box, "16u4_align16b")
    with pytest.raises(HardwareRefusal, match="of dimension 192, must be 128 of a multiple of 128"):
        encode(BASE, (192, 5), (96,), box[:2], "16u4_align16b")


def test_packed_fp4_coordinates_count_elements():
    data = np.arange(256, dtype=np.uint8)  # 4 rows of 128 elements
    tm = decode(encode(BASE, (128, 4), (64,), (32, 2), "16u4_align8b", "none"))
    image = load_tile(tm, (34, 2), FlatMemory(data)).reshape(2, 16)
    np.testing.assert_array_equal(image[0], np.arange(2 * 64 + 17, 2 * 64 + 33))
    with pytest.raises(HardwareRefusal, match="multiple of 2"):
        load_tile(tm, (1, 0), FlatMemory(data))


def test_tf32_map_rounds_loads_to_nearest_even():
    one = 0x3F800000
    bits = [one | 0x1000, one | 0x3000, one | 0x1001, 0x3FFFF000, 0x7F800000, 0xFF800001, 0, 0]
    rounded = [one, one | 0x4000, one | 0x2000, 0x40000000, 0x7F800000, 0x7FFFE000, 0, 0]
    tm = decode(encode(BASE, (8,), (), (8,), "tf32", "none"))
    image = load_tile(tm, (0,), FlatMemory(np.array(bits, np.uint32).view(np.uint8)))
    np.testing.assert_array_equal(image.view(np.uint32), np.array(rounded, np.uint32))


def test_reduce_tile_adds_in_bounds_only():
    tm, memory = make(2, "f32", inner=64)
    floats = memory.data.view(np.float32)
    floats[:] = np.random.default_rng(0).standard_normal(floats.size)
    before = floats.copy()
    reduce_tile(tm, (30, 3), np.full(48, 0.5, np.float32).view(np.uint8), memory, "add")
    changed = {at // 4 for at in elements(tm, (30, 3)) if at is not None}
    expected = [x + np.float32(0.5 * (i in changed)) for i, x in enumerate(before)]
    np.testing.assert_array_equal(floats, np.array(expected, np.float32))
    with pytest.raises(UnsupportedPtx, match=r"\.min on a tensor map of f32"):
        reduce_tile(tm, (0, 0), np.zeros(192, np.uint8), memory, "min")


@pytest.mark.parametrize(
    ("op", "dtype", "numpy_type", "old", "new", "expected"),
    [
        ("add", "u32", np.uint32, [2**32 - 1, 5], [2, 3], [1, 8]),
        ("min", "s32", np.int32, [-5, 7], [3, -9], [-5, -9]),
        ("max", "u32", np.uint32, [1, 2**31], [2**32 - 1, 0], [2**32 - 1, 2**31]),
        ("xor", "u64", np.uint64, [5, 2**63], [3, 1], [6, 2**63 + 1]),
        ("add", "f32", np.float32, [1.5, -2], [0.25, 2], [1.75, 0]),
        ("add", "f16", np.float16, [1, 2048], [0.5, 1], [1.5, 2048]),  # a tie to even
        ("max", "f16", np.float16, [1, np.nan], [0.5, 4], [1, 4]),
        ("min", "bf16", np.uint16, [0x3F80, 0xBF80], [0x4000, 0x3F80], [0x3F80, 0xBF80]),
        ("add", "bf16", np.uint16, [0x3F80, 0x4380], [0x3F80, 0x3F80], [0x4000, 0x4380]),
    ],
)
def test_combine(op, dtype, numpy_type, old, new, expected):
    raw_old, raw_new = (np.array(x, numpy_type).view(np.uint8) for x in (old, new))
    result = combine(op, dtype, raw_old, raw_new).view(numpy_type)
    np.testing.assert_array_equal(result, np.array(expected, numpy_type))


def test_combine_refuses_what_the_instruction_lacks():
    with pytest.raises(UnsupportedPtx):
        combine("max", "f32", np.zeros(4, np.uint8), np.zeros(4, np.uint8))
    with pytest.raises(UnsupportedPtx):
        combine("and", "f16", np.zeros(4, np.uint8), np.zeros(4, np.uint8))


@pytest.mark.parametrize(("dtype", "outside"), [("f16", 0x7FF7), ("tf32", 0x7FF77FF7)])
def test_what_is_out_of_bounds_can_be_nan(dtype, outside):
    """The map's NaN is not rounded, as what is loaded as tf32 is."""
    tm, memory = make(2, dtype)
    image = load_tile(replace(tm, nan_fill=True), (0, tm.dims[1] - 1), memory)
    plain = load_tile(tm, (0, tm.dims[1] - 1), memory)
    row = tm.row_bytes
    assert (image[:row] == plain[:row]).all()
    assert not plain[row:].any()
    assert (image[row:].view(f"<u{tm.element_bits // 8}") == outside).all()
