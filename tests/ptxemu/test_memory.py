"""Global memory by host address: ranges, rights, alignment, rows."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.errors import OutOfBounds
from ptxemu.machine.memory import GlobalMemory, as_range


def start(array: np.ndarray) -> int:
    return array.ctypes.data


def test_elements_and_rows() -> None:
    data = np.arange(64, dtype=np.uint32)
    memory = GlobalMemory([data])
    memory.store(start(data) + 8, 4, 77)
    assert memory.load(start(data) + 8, 4) == data[2] == 77
    addresses = np.array([start(data) + 16 * k for k in (3, 0, 5)], np.uint64)
    np.testing.assert_array_equal(
        memory.gather(addresses, 4, 2).T, data[[[12, 13], [0, 1], [20, 21]]]
    )
    memory.scatter(addresses, 4, np.array([[1, 2, 3]], np.uint32))
    assert data[[12, 0, 20]].tolist() == [1, 2, 3]
    rows = memory.read_rows(addresses.astype(np.int64) + 4, 12)
    np.testing.assert_array_equal(
        rows.view(np.uint32), data[[[13, 14, 15], [1, 2, 3], [21, 22, 23]]]
    )
    memory.write_rows(addresses.astype(np.int64)[:1] + 1, np.array([[9, 9, 9]], np.uint8))
    assert data[12] == 0x09090901


def test_the_last_lane_wins_where_lanes_write_one_place() -> None:
    data = np.zeros(4, np.uint32)
    GlobalMemory([data]).scatter(
        np.full(3, start(data), np.uint64), 4, np.array([[5, 6, 7]], np.uint32)
    )
    assert data[0] == 7


def test_every_range_is_checked_on_its_own() -> None:
    whole = np.zeros(64, np.uint32)
    memory = GlobalMemory([(start(whole), 64), (start(whole) + 128, 64)])
    inside = np.array([start(whole), start(whole) + 188], np.uint64)
    assert memory.gather(inside, 4, 1).tolist() == [[0, 0]]
    for wrong in (start(whole) + 64, start(whole) + 124, start(whole) + 192):
        with pytest.raises(OutOfBounds, match=f"{wrong:#x}"):
            memory.load(wrong, 4)
        with pytest.raises(OutOfBounds):
            memory.gather(np.array([start(whole), wrong], np.uint64), 4, 1)
    with pytest.raises(OutOfBounds):
        memory.check(start(whole) + 32, start(whole) + 160, False)


def test_neighbouring_ranges_join() -> None:
    whole = np.zeros(64, np.uint32)
    memory = GlobalMemory([(start(whole) + 128, 128), (start(whole), 128)])
    memory.check(start(whole) + 100, start(whole) + 200, True)


def test_read_only_ranges_are_not_written() -> None:
    data = np.zeros(8, np.uint32)
    data.setflags(write=False)
    memory = GlobalMemory([data])
    assert memory.load(start(data), 4) == 0
    with pytest.raises(OutOfBounds, match="write to 4 bytes"):
        memory.store(start(data), 4, 1)


def test_allocations_made_later_are_found_without_a_list() -> None:
    memory = GlobalMemory(None)
    for _ in range(3):
        fresh = np.ones(1 << 20, np.uint8)
        assert memory.load(start(fresh), 1) == 1
    for wild in (0x40, 0x1000_0000_0000_0000 - 16):
        with pytest.raises(OutOfBounds):
            memory.load(wild, 4)


def test_views_give_the_range_of_what_they_see() -> None:
    base = np.zeros(64, np.uint32)
    low, high, writable = as_range(base[8:16])
    assert low <= start(base) + 32
    assert high >= start(base) + 64
    assert writable
    assert as_range((4096, 16)) == (4096, 4112, True)
