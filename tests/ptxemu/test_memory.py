"""Global memory by host address: ranges, rights, alignment, rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ptxemu.errors import OutOfBounds
from ptxemu.machine.memory import Block, Fixed, GlobalMemory, Stray, as_addresses, as_range


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


# -- what nobody gave to the kernel, where somebody is told ------------------------------------


class Program:
    """Knows one block of 64 bytes, and after a look another."""

    def __init__(self) -> None:
        self.buffer = np.arange(1024, dtype=np.uint8)
        self.start = self.buffer.ctypes.data + -self.buffer.ctypes.data % 128 + 128
        self.offset = self.start - self.buffer.ctypes.data
        self.looks = 0

    def known(self) -> list[Block]:
        return [Block(self.start, self.start + 50, self.start + 64)]

    def look(self) -> list[Block]:
        self.looks += 1
        return [*self.known(), Block(self.start + 256, self.start + 320, self.start + 320)]

    def look_at_frozen(self) -> list[Block]:
        return [*self.look(), Block(self.start + 512, self.start + 576, self.start + 576)]


@pytest.fixture
def told() -> tuple[GlobalMemory, Program, list[Stray]]:
    program, strays = Program(), []
    memory = GlobalMemory(None, program)
    memory.tell(strays.append)
    return memory, program, strays


def test_reads_beside_it_are_poison(told) -> None:
    memory, program, strays = told
    start, at = program.start, program.offset
    assert memory.load(start, 4) == int(program.buffer[at : at + 4].view(np.uint32)[0])
    assert memory.load(start + 64, 4) == 0xFFFF_FFFF
    found = memory.gather(np.array([start, start + 64, 0x40, 1 << 63], np.uint64), 4, 2)
    assert found[:, 0].tobytes() == program.buffer[at : at + 8].tobytes()
    assert (found[:, 1:] == 0xFFFF_FFFF).all()
    rows = memory.read_rows(np.array([start - 16, start + 16], np.int64), 16)
    assert (rows[0] == 0xFF).all()
    assert rows[1].tobytes() == program.buffer[at + 16 : at + 32].tobytes()
    lows = [start + 64, start + 64, 0x40, -(1 << 63), start - 16]
    assert [stray.low for stray in strays] == lows


def test_writes_beside_it_do_not_happen(told) -> None:
    memory, program, strays = told
    start, at = program.start, program.offset
    before = program.buffer.copy()
    memory.store(start + 64, 4, 7)
    memory.store(start + 48, 4, 7)
    memory.scatter(np.array([start - 4, start + 52], np.uint64), 4, np.array([[7, 7]], np.uint32))
    view, index = memory.place(0x1000, 8, 2, True)
    view[index : index + 2] = 7
    assert (program.buffer == before).all()
    assert len(strays) == 5
    memory.write_rows(np.array([start, start + 64], np.int64), np.full((2, 16), 9, np.uint8))
    before[at : at + 16] = 9
    assert (program.buffer == before).all()
    assert all(stray.write for stray in strays)


def test_a_block_ends_where_what_was_asked_for_ends(told) -> None:
    """On hardware nobody is harmed by a read behind it, and a write is still wrong."""
    memory, program, strays = told
    start, at = program.start, program.offset
    assert memory.load(start + 48, 4) == int(program.buffer[at + 48 : at + 52].view(np.uint32)[0])
    assert not memory.check(start + 48, start + 52, True)
    assert memory.check(start + 56, start + 64, False)
    assert not memory.check(start + 56, start + 65, False)
    assert [stray.slack for stray in strays] == [True, True, True, False]
    unchecked = GlobalMemory(None, program)
    unchecked.store(start + 56, 8, 3)
    with pytest.raises(OutOfBounds, match="in no allocation: 14 bytes behind one of 50"):
        unchecked.store(start + 64, 8, 3)


def test_a_look_is_taken_where_something_is_missing_and_once(told) -> None:
    memory, program, strays = told
    memory.load(program.start, 4)
    assert program.looks == 0
    assert memory.check(program.start + 256, program.start + 260, True)
    assert not strays
    assert program.looks == 1
    assert memory.check(program.start + 512, program.start + 516, True), "a closer look finds it"
    for _ in range(5):
        memory.load(program.start + 128, 4)
    assert program.looks == 5, "one look for each, and one at what is frozen, of the last two"
    assert len(strays) == 5


@pytest.mark.parametrize(
    ("low", "size", "write", "words"),
    [
        (-8, 8, False, "read of 8 bytes at {:#x}, in no allocation: 8 before one of 50 bytes"),
        (48, 4, True, "across the end of an allocation of 50 bytes"),
        (50, 1, True, "right behind the end of an allocation of 50 bytes, in what its block"),
        (60, 4, True, "10 bytes behind the end of an allocation of 50 bytes, in what its block"),
        (64, 4, True, "in no allocation: 14 bytes behind one of 50 bytes"),
        (248, 8, True, "in no allocation: 8 before one of 64 bytes"),
    ],
)
def test_it_is_said_what_lies_there(told, low: int, size: int, write: bool, words: str) -> None:
    memory, program, strays = told
    memory.check(program.start + low, program.start + low + size, write)
    assert words.format(program.start + low) in strays[0].words()


def test_what_is_mapped_for_reading_is_not_written(tmp_path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    mapped = np.memmap(path, np.uint8, "r")
    start = mapped.ctypes.data
    memory = GlobalMemory(None, Fixed([(start, start + 4096, True)]))
    assert memory.load(start, 4) == 0
    with pytest.raises(OutOfBounds, match="cannot be written"):
        memory.store(start, 4, 1)


def test_addresses_of_nothing_are_not_believed() -> None:
    memory = GlobalMemory([(0x1000, 64), (0x7FFF_FFFF_0000, 64)])
    for address in (0x1000, 0x7FFF_FFFF_0000):
        with pytest.raises(OutOfBounds):
            memory.store(address, 4, 1)


def test_libraries_and_the_stack_are_not_written() -> None:
    """A plain launch reaches the whole process, but what it could only break."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    code = {fields[-1] for fields in lines if "x" in fields[1] and fields[-1].startswith("/")}
    data = next(f for f in lines if f[-1] in code and f[1].startswith("rw"))
    stack = next(f for f in lines if f[-1] == "[stack]")
    memory = GlobalMemory(None)
    for fields in (data, stack):
        start = int(fields[0].split("-")[0], 16)
        assert memory.check(start, start + 4, False)
        with pytest.raises(OutOfBounds, match="write"):
            memory.check(start, start + 4, True)


def test_addresses_of_the_upper_half() -> None:
    wild = [0, (1 << 64) - 1, 1 << 63, 1 << 70]
    assert as_addresses(wild).tolist() == [0, -1, -(1 << 63), 0]
