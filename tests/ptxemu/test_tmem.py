"""Tensor memory: allocator rules, register maps of the data movement shapes, D and A layouts."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.tmem import POISON, Tmem


def full_tmem() -> Tmem:
    """All columns allocated; the cell at (column c, lane l) holds l << 16 | c, its own address."""
    tmem = Tmem()
    tmem.try_alloc(512)
    tmem.cells[:] = np.arange(512)[:, None] | np.arange(128)[None, :] << 16
    return tmem


def test_alloc_takes_the_lowest_free_columns():
    tmem = Tmem()
    assert tmem.try_alloc(128) == 0
    assert tmem.try_alloc(256) == 128
    assert tmem.try_alloc(256) is None
    assert tmem.try_alloc(32) == 384
    tmem.dealloc(0, 128)
    assert tmem.try_alloc(64) == 0
    assert tmem.allocations == {0: 64, 128: 256, 384: 32}


@pytest.mark.parametrize("columns", [0, 16, 48, 96, 1024])
def test_alloc_sizes(columns):
    with pytest.raises(HardwareRefusal, match=f"{columns} columns"):
        Tmem().try_alloc(columns)


def test_dealloc_must_match():
    tmem = full_tmem()
    with pytest.raises(HardwareRefusal, match="256 columns at 0x0; allocated: 512 at 0x0"):
        tmem.dealloc(0, 256)
    with pytest.raises(HardwareRefusal, match="at 0x20"):
        tmem.dealloc(32, 512)
    tmem.dealloc(0, 512)
    with pytest.raises(HardwareRefusal, match="nothing"):
        tmem.dealloc(0, 512)


def test_freed_columns_keep_their_cells_until_allocated_again():
    findings = []
    tmem = Tmem(lambda *finding: findings.append(finding))
    tmem.try_alloc(64)
    tmem.store("32x32b", 1, 5, 0, np.full((1, 32), 7, np.uint32))
    assert not findings
    tmem.dealloc(0, 64)
    assert (tmem.load("32x32b", 1, 5, 0) == 7).all()
    assert [check for check, _ in findings] == ["tmem"]
    tmem.try_alloc(64)
    assert (tmem.cells == POISON).all()


def test_no_alloc_after_relinquish():
    tmem = Tmem()
    tmem.try_alloc(32)
    tmem.relinquish()
    with pytest.raises(HardwareRefusal, match="relinquish"):
        tmem.try_alloc(32)
    tmem.dealloc(0, 32)


def test_columns_must_be_allocated():
    tmem = Tmem()
    tmem.try_alloc(64)
    tmem.check(0, 64)
    tmem.load("32x32b", 32, 32, 0)
    for access in (
        lambda: tmem.check(64),
        lambda: tmem.check(0, 65),
        lambda: tmem.load("32x32b", 64, 32, 0),
        lambda: tmem.store("32x32b", 1, 64, 0, np.zeros((1, 32), np.uint32)),
        lambda: tmem.load("16x256b", 8, 8, 0),
        lambda: tmem.load("16x32bx2", 1, 0, 0, half_split=64),
        lambda: tmem.accumulator(0, 128, 128, 1),
        lambda: tmem.operand_image(60, 128, 1, 32),
    ):
        with pytest.raises(HardwareRefusal, match="TMEM not allocated: column 0x40"):
            access()
    with pytest.raises(HardwareRefusal, match="column 0x200"):
        full_tmem().load("32x32b", 4, 510, 0)


# The cell of register r of thread t relative to the address: (lane, column).
FORMULAS = {
    "32x32b": (1, lambda t, r: (t, r)),
    "16x64b": (1, lambda t, r: (t // 4 + (8 if t % 2 else 0), 2 * r + t % 4 // 2)),
    "16x128b": (2, lambda t, r: (t // 4 + (8 if r % 2 else 0), 4 * (r // 2) + t % 4)),
    "16x256b": (4, lambda t, r: (t // 4 + 8 * (r % 4 // 2), 8 * (r // 4) + 2 * (t % 4) + r % 2)),
    "16x32bx2": (1, lambda t, r: (t % 16, r + (100 if t >= 16 else 0))),
}
CASES = [
    (shape, num, warp, half)
    for shape in FORMULAS
    for num in (1, 2, 8, 16)
    for warp, half in ((0, 0), (3, 0), (2, 16))
    if not (shape == "32x32b" and half)
]


@pytest.mark.parametrize(("shape", "num", "warp", "half"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_load_and_store_follow_the_register_map(shape, num, warp, half, packed):
    per_num, cell = FORMULAS[shape]
    tmem, base = full_tmem(), 24
    address = (32 * warp + half) << 16 | base
    registers = tmem.load(shape, num, address, warp, pack16=packed, half_split=100)
    assert registers.shape == (num * per_num, 32)
    assert registers.dtype == np.uint32

    written = np.random.default_rng(0).integers(0, 2**32, registers.shape, dtype=np.uint32)
    expected_cells = tmem.cells.copy()
    for r in range(num * per_num):
        for t in range(32):
            lane, column = cell(t, r)
            lane += 32 * warp + half
            if not packed:
                assert registers[r, t] == lane << 16 | base + column
                expected_cells[base + column, lane] = written[r, t]
                continue
            split = 100 if shape == "16x32bx2" and t >= 16 else 0
            even = base + split + 2 * (column - split)
            assert registers[r, t] == even + 1 << 16 | even
            expected_cells[even, lane] = 0xFFFF0000 | written[r, t] & 0xFFFF
            expected_cells[even + 1, lane] = 0xFFFF0000 | written[r, t] >> 16

    tmem.store(shape, num, address, warp, written, unpack16=packed, half_split=100)
    np.testing.assert_array_equal(tmem.cells, expected_cells)
    again = tmem.load(shape, num, address, warp, pack16=packed, half_split=100)
    np.testing.assert_array_equal(again, written)


def test_load_returns_a_copy():
    tmem = full_tmem()
    registers = tmem.load("32x32b", 2, 0, 0)
    tmem.cells[:] = 0
    assert registers[1, 31] == 31 << 16 | 1


@pytest.mark.parametrize(
    ("shape", "lane", "warp"),
    [("32x32b", 32, 0), ("32x32b", 16, 0), ("16x64b", 8, 0), ("16x256b", 48, 2), ("16x128b", 8, 3)],
)
def test_a_warp_reaches_its_own_lanes_only(shape, lane, warp):
    with pytest.raises(HardwareRefusal, match=f"lane {lane}, warp {warp} .* {32 * warp} to"):
        full_tmem().load(shape, 1, lane << 16, warp)


@pytest.mark.parametrize(("shape", "inner"), [("32x32b", 0), ("16x256b", 0), ("16x256b", 16)])
def test_an_address_in_the_first_quarter_means_the_warps_own(shape, inner):
    tmem = full_tmem()
    own = tmem.load(shape, 2, (96 + inner) << 16, 3)
    np.testing.assert_array_equal(tmem.load(shape, 2, inner << 16, 3), own)


@pytest.mark.parametrize(
    ("shape", "num"), [("32x32b", 256), ("32x32b", 3), ("16x128b", 128), ("16x256b", 64)]
)
def test_num_is_limited(shape, num):
    with pytest.raises(HardwareRefusal, match=f"x{num}"):
        full_tmem().load(shape, num, 0, 0)


# m, n, CTAs, the address, and (lane, column) of an element of D
ACCUMULATORS = [
    (128, 40, 1, 8, lambda r, n: (r, 8 + n)),
    (256, 40, 2, 8, lambda r, n: (r, 8 + n)),
    (64, 24, 1, 4, lambda r, n: (r // 16 * 32 + r % 16, 4 + n)),
    (64, 24, 1, 16 << 16 | 4, lambda r, n: (r // 16 * 32 + r % 16 + 16, 4 + n)),
    (128, 32, 2, 0, lambda r, n: (r + n // 16 * 64, n % 16)),
]


@pytest.mark.parametrize(("m", "n", "ctas", "address", "cell"), ACCUMULATORS)
def test_where_an_accumulator_is(m, n, ctas, address, cell):
    found = full_tmem().accumulator(address, m, n, ctas).reshape(n, -1).T
    assert found.shape == (m // ctas, n)
    for r, k in np.ndindex(found.shape):
        assert (found[r, k] >> 16, found[r, k] & 0xFFFF) == cell(r, k)


def test_accumulator_is_a_view():
    tmem = full_tmem()
    for m, cta_group in ((128, 1), (64, 1), (128, 2)):
        assert np.shares_memory(tmem.accumulator(0, m, 32, cta_group), tmem.cells)
    with pytest.raises(HardwareRefusal, match="M=128 at TMEM lane 16"):
        tmem.accumulator(16 << 16, 128, 32, 1)


def test_operand_image_packs_k_along_columns():
    image = full_tmem().operand_image(8, 128, 1, 32)
    assert image.shape == (128, 32)
    words = image.view(np.uint32)
    assert all(words[r, c] == r << 16 | 8 + c for r in range(128) for c in range(8))
    half = full_tmem().operand_image(16 << 16 | 8, 64, 1, 32).view(np.uint32)
    assert [word >> 16 for word in half[::16, 0]] == [16, 48, 80, 112]
    with pytest.raises(HardwareRefusal, match="A of M=64 at TMEM lane 8"):
        full_tmem().operand_image(8 << 16, 64, 1, 32)


def test_a_shift_moves_31_rows_of_a_quarter():
    tmem = full_tmem()
    before = tmem.cells.copy()
    tmem.shift_rows(64 << 16 | 20)
    expected = before.copy()
    expected[20:28, 64:95] = before[20:28, 65:96]
    assert (tmem.cells == expected).all()
    with pytest.raises(HardwareRefusal, match="not allocated"):
        Tmem().shift_rows(0)
