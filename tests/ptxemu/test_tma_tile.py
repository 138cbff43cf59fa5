"""TMA tiles compared with a loop over elements: loads, stores and reductions, in and out of
bounds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine import tensor_map
from ptxemu.machine.memory import GlobalMemory
from ptxemu.machine.tensor_map import decode, encode, gathering
from ptxemu.machine.tma_tile import (
    box_rows,
    combine,
    direct_load,
    gather_tile,
    load_tile,
    place_tile,
    reduce_tile,
    store_tile,
)
from ptxemu.native.library import library
from ptxemu.numerics.swizzle import BY_NAME
from tests.ptxemu import kernels

# name: (B, M, S, span, period), written out
TEXTBOOK = {
    "none": (0, 4, 3, 16, 1),
    "32B": (1, 4, 3, 32, 256),
    "64B": (2, 4, 3, 64, 512),
    "128B": (3, 4, 3, 128, 1024),
    "128B_ATOM_32B": (2, 5, 2, 128, 512),
}


def bit_by_bit(bits: int, base: int, shift: int, offset: int) -> int:
    for bit in range(base, base + bits):
        offset ^= (offset >> (bit + shift) & 1) << bit
    return offset


@pytest.mark.parametrize("name", TEXTBOOK)
def test_apply_is_the_textbook_definition(name):
    bits, base, shift, span, period = TEXTBOOK[name]
    swizzle = BY_NAME[name]
    assert (swizzle.span, swizzle.period) == (span, period)
    offsets = np.arange(8192)
    expected = [bit_by_bit(bits, base, shift, offset) for offset in range(8192)]
    np.testing.assert_array_equal(swizzle.apply(offsets), expected)
    assert swizzle.apply(8191) == expected[8191]


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
    """Yield the offset from BASE of each element of the box, dimension 0 fastest; None out of
    bounds."""
    size = tm.element_bits // 8
    steps = (size, *tm.strides)
    for place in itertools.product(*(range(side) for side in reversed(tm.box))):
        position = [c + p for c, p in zip(coords, reversed(place), strict=True)]
        if all(0 <= x < n for x, n in zip(position, tm.dims, strict=True)):
            yield tm.address - BASE + sum(x * s for x, s in zip(position, steps, strict=True))
        else:
            yield None


def make(rank, dtype="bf16", swizzle="none", inner=16):
    """A map over a tensor of odd sizes and padded strides, and a memory of exactly its size."""
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
        # a row shorter than the pattern's still occupies a whole row of it
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
    """Rows of 192 elements, not a multiple of the box's 128: a second dimension steps by 32 bytes,
    the minimum that the manual allows, and every box lies within its row."""
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


def _loads(tm, position, memory, smem, offset):
    """Whether machine code loads a box, which it does then."""
    direct = direct_load(tm, position, memory, len(smem), offset)
    if direct is not None:
        rows, nbytes = direct.rows
        np.testing.assert_array_equal(rows, box_rows(tm, position)[0])
        assert nbytes == box_rows(tm, position)[1]
        direct.run(smem.ctypes.data, offset)
    return direct is not None


@pytest.mark.skipif(library() is None, reason="llvmlite is not installed")
@pytest.mark.parametrize("swizzle", TEXTBOOK)
@pytest.mark.parametrize("dtype", ["u8", "bf16", "f32"])
def test_machine_code_loads_what_lies_inside(dtype, swizzle):
    rng = np.random.default_rng(len(swizzle))
    size = {"u8": 1, "bf16": 2, "f32": 4}[dtype]
    dims, box = (160 // size, 9, 5), (BY_NAME[swizzle].span // size, 3, 2)
    data = aligned_copy(rng.integers(0, 256, 5 * 11 * 192, dtype=np.uint8))
    tm = decode(encode(data.ctypes.data, dims, (192, 11 * 192), box, dtype, swizzle))
    memory, done = GlobalMemory([data]), 0
    for x, y, z, offset in itertools.product(
        (0, 16 // size, 144 // size), (0, 6, 7), (0, 3), (0, 0x480)
    ):
        smem, other = (np.full(4096, 0xAA, np.uint8) for _ in range(2))
        inside = x * size + BY_NAME[swizzle].span <= 160 and y <= 6
        assert _loads(tm, (x, y, z), memory, smem, offset) == inside
        place_tile(tm, load_tile(tm, (x, y, z), memory), other, offset)
        if inside:
            np.testing.assert_array_equal(smem, other)
            done += 1
        else:
            assert (smem == 0xAA).all()
    assert done


@pytest.mark.skipif(library() is None, reason="llvmlite is not installed")
def test_machine_code_leaves_other_loads_to_python():
    """Padding, rounding, named rows, memory that is not allowed, and the end of shared memory."""
    data, smem = aligned_copy(np.zeros(64 * 128, np.uint8)), np.zeros(1024, np.uint8)
    at = data.ctypes.data
    plain = decode(encode(at, (128, 64), (128,), (128, 8), "u8", "128B"))
    memory = GlobalMemory([data])
    assert _loads(plain, (0, 0), memory, smem, 0)
    assert not _loads(plain, (0, 0), memory, smem, 128)
    assert not _loads(plain, (0, 0), GlobalMemory([data[:4].copy()]), smem, 0)
    for tm, position in [
        (decode(encode(at, (128, 64), (128,), (128, 8), "16u4_align16b", "128B")), (0, 0)),
        (decode(encode(at, (32, 64), (128,), (32, 8), "tf32", "128B")), (0, 0)),
        (gathering(decode(encode(at, (128, 64), (128,), (128, 1), "u8", "128B"))),
         (0, 0, 1, 2, 3)),
    ]:  # fmt: skip
        assert not _loads(tm, position, memory, smem, 0)


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
    """The map's NaN is not rounded, unlike data loaded as tf32."""
    tm, memory = make(2, dtype)
    image = load_tile(replace(tm, nan_fill=True), (0, tm.dims[1] - 1), memory)
    plain = load_tile(tm, (0, tm.dims[1] - 1), memory)
    row = tm.row_bytes
    assert (image[:row] == plain[:row]).all()
    assert not plain[row:].any()
    assert (image[row:].view(f"<u{tm.element_bits // 8}") == outside).all()


# tile::gather4 and tile::scatter4: four rows with separate coordinates, inside and outside the
# tensor, swizzled and not; and conditions on the tensor map.

ROWS, COLUMNS = 40, 96  # of the tensor, of 16-bit elements
WIDTH = 64  # of the box: 128 bytes
BYTES = 4 * 2 * WIDTH
GATHER = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    " [%r1], [%rd0, {%r10, %r11, %r12, %r13, %r14}], [%r1+4096];"
)
SCATTER = (
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
    " [%rd0, {%r10, %r11, %r12, %r13, %r14}], [%r1];"
)
CHOSEN = [(0, 3, 3, 39, 0), (32, 7, 1, 0, 2), (64, 5, 6, 7, 8), (0, 40, 2, -1, 9)]


def encoded(tensor: np.ndarray, box: tuple[int, ...] = (WIDTH, 1), swizzle: str = "none") -> bytes:
    rows = len(tensor)
    sides = (COLUMNS, rows) if len(box) == 2 else (COLUMNS, rows // 2, 2)
    strides = (2 * COLUMNS,) if len(box) == 2 else (2 * COLUMNS, COLUMNS * rows)
    address = tensor.ctypes.data
    return bytes(tensor_map.encode(address, sides, strides, box, "u16", swizzle))


def launch(
    body: str, tensor: np.ndarray, other: np.ndarray, coordinates: tuple[int, ...], map_: bytes,
    **how: object,
) -> ptxemu.LaunchReport:  # fmt: skip
    """A warp whose lane 0 executes `body`, while all lanes copy the box's shared memory from or to
    `other`. %rd0: the map, %r1: shared memory, %r10 to %r14: coordinates."""
    values = "".join(f"mov.b32 %r{10 + k}, {x};" for k, x in enumerate(coordinates))
    text = kernels.kernel(
        f"""mov.u64 %rd0, map; cvta.param.u64 %rd0, %rd0; ld.param.u64 %rd1, [b];
        mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd1, %rd1, %rd2; setp.eq.u32 %p0, %r0, 0;
        {values}
        {body}""",
        ".param .align 64 .b8 map[128], .param .u64 b",
        kernels.DYNAMIC,
    )
    params = [map_, *kernels.pointers(other)]
    return kernels.launch(
        text, params=params, memory=[tensor, other], smem_bytes=8192, check=True, **how
    )


def gather(load: str = GATHER) -> str:
    copies = "".join(
        f"ld.shared.b32 %r3, [%r2+{k}]; st.global.b32 [%rd1+{k}], %r3;"
        for k in range(0, BYTES, 128)
    )
    return f"""@%p0 mbarrier.init.shared.b64 [%r1+4096], 1;
        fence.mbarrier_init.release.cluster; bar.warp.sync -1;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+4096], {BYTES};
        @%p0 {load}
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+4096], 0;
        @!%p1 bra W;
        {copies}"""


def swizzled(image: np.ndarray) -> np.ndarray:
    """Permute 16-byte chunks of 128-byte rows: chunk c of row r is at c ^ r."""
    chunks = image.view(np.uint8).reshape(4, 8, 16)
    return np.stack([chunks[r, np.arange(8) ^ r] for r in range(4)]).reshape(-1)


def box_of(tensor: np.ndarray, coordinates: tuple[int, ...]) -> np.ndarray:
    """[row, column] of the loaded box, zero outside the tensor."""
    column, *rows = coordinates
    image = np.zeros((4, WIDTH), np.uint16)
    for k, row in enumerate(rows):
        if 0 <= row < ROWS:
            part = tensor[row, column : column + WIDTH]
            image[k, : len(part)] = part
    return image


def numbered() -> np.ndarray:
    return aligned_copy(np.arange(1, ROWS * COLUMNS + 1).astype(np.uint16)).reshape(ROWS, COLUMNS)


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize("coordinates", CHOSEN)
def test_four_rows_are_loaded(coordinates: tuple[int, ...], swizzle: str, policy: str) -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    map_ = encoded(tensor, swizzle=swizzle)
    report = launch(gather(), tensor, out, coordinates, map_, policy=policy)
    image = box_of(tensor, coordinates)
    expected = swizzled(image) if swizzle == "128B" else image.reshape(-1).view(np.uint8)
    assert (out == expected).all()
    assert not report.findings


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("swizzle", ["none", "128B"])
@pytest.mark.parametrize("coordinates", [(0, 3, 4, 39, 0), (64, 5, 6, 7, 8), (32, 40, 2, 1, 9)])
def test_four_rows_are_stored(coordinates: tuple[int, ...], swizzle: str, policy: str) -> None:
    tensor = aligned_copy(np.zeros(ROWS * COLUMNS, np.uint16)).reshape(ROWS, COLUMNS)
    image = np.arange(1, 4 * WIDTH + 1).astype(np.uint16).reshape(4, WIDTH)
    source = aligned_copy(
        swizzled(image) if swizzle == "128B" else image.reshape(-1).view(np.uint8)
    )
    copies = "".join(
        f"ld.global.b32 %r3, [%rd1+{k}]; st.shared.b32 [%r2+{k}], %r3;"
        for k in range(0, BYTES, 128)
    )
    body = f"""{copies} fence.proxy.async; bar.warp.sync -1;
        @%p0 {SCATTER}
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""
    map_ = encoded(tensor, swizzle=swizzle)
    report = launch(body, tensor, source, coordinates, map_, policy=policy)
    expected = np.zeros_like(tensor)
    column, *rows = coordinates
    for k, row in enumerate(rows):
        if row < ROWS:
            expected[row, column : column + WIDTH] = image[k, : COLUMNS - column]
    assert (tensor == expected).all()
    assert not report.findings


def test_without_a_wait_the_load_is_a_race() -> None:
    """The checker tracks the shared memory of all four rows that the load writes."""
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    body = gather()
    start = body.index("W:")
    unwaited = body[:start] + body[body.index("bra W;") + len("bra W;") :]
    report = launch(unwaited, tensor, out, CHOSEN[0], encoded(tensor))
    assert any(finding.check == "race" for finding in report.findings)


# Two CTAs gather at their own rows, or rank 1 gathers for both. Bytes of a pair complete at rank 0.
TO_CLUSTER = GATHER.replace("shared::cta", "shared::cluster").replace("[%r1+4096]", "[%r9]")
MEET = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def gather_in_cluster(suffix: str, operands: str, issues: str, waits: str, nbytes: int) -> str:
    """Lane 0 loads in the CTAs of predicate `issues` and waits in those of `waits`; %p4: rank 0,
    %p5: rank 1, %p6: both."""
    load = TO_CLUSTER.replace("::bytes", f"::bytes{suffix}", 1).replace("];", f"]{operands};")
    copies = "".join(
        f"ld.shared.b32 %r3, [%r2+{k}]; st.global.b32 [%rd1+{k}], %r3;"
        for k in range(0, BYTES, 128)
    )
    return f"""mov.u32 %r8, %cluster_ctarank; mad.wide.u32 %rd1, %r8, {BYTES}, %rd1;
        setp.eq.and.u32 %p4, %r8, 0, %p0; setp.eq.and.u32 %p5, %r8, 1, %p0;
        setp.lt.and.u32 %p6, %r8, 2, %p0; add.u32 %r11, %r11, %r8;
        add.u32 %r9, %r1, 4096; and.b32 %r9, %r9, 0xFEFFFFFF; mov.b16 %h0, 3; mov.b64 %rd3, 0;
        @%p6 mbarrier.init.shared.b64 [%r1+4096], 1;
        fence.mbarrier_init.release.cluster; {MEET}
        @%{waits} mbarrier.arrive.expect_tx.shared.b64 _, [%r1+4096], {nbytes};
        {MEET}
        @%{issues} {load}
        @!%{waits} bra CAME;
        W: mbarrier.try_wait.parity.shared.b64 %p1, [%r1+4096], 0;
        @!%p1 bra W;
        CAME: {MEET}
        {copies}"""


IN_CLUSTER = {
    "a pair": ((".cta_group::2", "", "p6", "p4", 2 * BYTES), (0, 1)),
    "a pair, L2": ((".cta_group::2.L2::cache_hint", ", %rd3", "p6", "p4", 2 * BYTES), (0, 1)),
    "multicast": ((".multicast::cluster", ", %h0", "p5", "p6", BYTES), (1, 1)),
    "multicast of a pair": (
        (".multicast::cluster.cta_group::2", ", %h0", "p5", "p4", 2 * BYTES), (1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("form", IN_CLUSTER)
def test_four_rows_come_to_a_cluster(form: str, policy: str) -> None:
    """The barrier counts whole boxes, rows out of bounds included."""
    program, firsts = IN_CLUSTER[form]
    tensor, out = numbered(), aligned_copy(np.zeros(2 * BYTES, np.uint8))
    body, map_ = gather_in_cluster(*program), encoded(tensor, swizzle="128B")
    report = launch(
        body, tensor, out, (32, 3, -1, 40, 39), map_, policy=policy, grid=(2,), cluster=(2,)
    )
    expected = [swizzled(box_of(tensor, (32, 3 + first, -1, 40, 39))) for first in firsts]
    assert (out == np.concatenate(expected)).all()
    assert not report.findings


def test_two_boxes_of_four_rows_are_a_swizzle_atom() -> None:
    """A box that begins 512 bytes behind the atom has the swizzle of rows 4 to 7."""
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    body = gather().replace(f"{GATHER}", GATHER.replace("[%r1]", "[%r7]"), 1)
    body = "add.u32 %r7, %r1, 512; add.u32 %r2, %r2, 512; " + body
    launch(body, tensor, out, CHOSEN[0], encoded(tensor, swizzle="128B"))
    chunks = box_of(tensor, CHOSEN[0]).view(np.uint8).reshape(4, 8, 16)
    rows = [chunks[r, np.arange(8) ^ (4 + r)] for r in range(4)]
    assert (out == np.concatenate(rows).reshape(-1)).all()


def test_columns_have_to_start_at_16_bytes() -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    with pytest.raises(HardwareRefusal, match="multiple of 16 bytes"):
        launch(gather(), tensor, out, (3, 0, 1, 2, 3), encoded(tensor))


@pytest.mark.parametrize("box", [(WIDTH, 4), (WIDTH, 1, 1)])
def test_the_map_has_two_dimensions_and_a_box_of_one_row(box: tuple[int, ...]) -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    with pytest.raises(HardwareRefusal, match="rank") as caught:
        launch(gather(), tensor, out, CHOSEN[0], encoded(tensor, box))
    assert caught.value.line


@pytest.mark.parametrize("changed", [
    GATHER.replace(", %r14}", "}"),
    GATHER.replace("2d", "3d"),
    GATHER.replace("gather4", "scatter4"),
    SCATTER.replace("scatter4", "gather4"),
    GATHER.replace("::gather4", ""),
    GATHER.replace("tile::gather4", "im2col"),
])  # fmt: skip
def test_forms_that_there_are_not_are_refused_by_name(changed: str) -> None:
    tensor, out = numbered(), aligned_copy(np.zeros(BYTES, np.uint8))
    with pytest.raises(UnsupportedPtx, match=r"bulk\.tensor") as caught:
        launch(gather(changed), tensor, out, CHOSEN[0], encoded(tensor))
    assert caught.value.line
