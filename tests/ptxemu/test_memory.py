"""Global memory by host address: ranges, rights, alignment, rows."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from ptxemu.check.global_memory import GlobalShadow, Piece
from ptxemu.errors import HardwareRefusal, OutOfBounds, UnsupportedPtx
from ptxemu.inspect import Inspect, Watch
from ptxemu.machine.memory import Block, Fixed, GlobalMemory, Stray, as_addresses, as_range
from ptxemu.options import Options
from tests.ptxemu import kernels, test_taint
from tests.ptxemu.kernels import kernel


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


def test_ranges_that_overlap_join_and_those_that_touch_do_not() -> None:
    whole = np.zeros(64, np.uint32)
    memory = GlobalMemory([(start(whole) + 128, 128), (start(whole), 129)])
    memory.check(start(whole) + 100, start(whole) + 200, True)
    memory = GlobalMemory([(start(whole) + 128, 128), (start(whole), 128)])
    memory.check(start(whole) + 120, start(whole) + 128, True)
    memory.check(start(whole) + 128, start(whole) + 136, True)
    with pytest.raises(OutOfBounds, match="across the end of an allocation of 128"):
        memory.check(start(whole) + 124, start(whole) + 132, True)


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


# -- memory that was not passed to the kernel, if that is reported ------------------------------


class Program:
    """A program that knows one block of 64 bytes, and after a search another."""

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
    """On hardware a read past the requested size harms nothing; a write is still wrong."""
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
    """A plain launch reaches the whole process, except parts that it could only break."""
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


MIB = 1 << 20


def test_a_read_of_two_allocations_is_remembered_where_they_are():
    """Lanes of one instruction may read gigabytes apart; nothing is stored for the range
    between."""
    starts = np.array([3 * MIB - 8, 5 << 32, 3 * MIB - 8 + 16])
    piece, shadow = Piece(starts, 16, 0, mark=None), GlobalShadow(grain=4)
    shadow.read(piece, by=None, on_race=None)
    assert sorted(shadow.reads) == [2, 3, (5 << 32) // MIB]
    assert all(found is piece for reads in shadow.reads.values() for found in reads)


STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32"
INIT = (
    "mov.u32 %r0, %tid.x; mov.u32 %r1, dynamic; mad.lo.u32 %r2, %r0, 4, %r1;"
    "setp.eq.u32 %p0, %r0, 0; @%p0 mbarrier.init.shared.b64 [%r1], 1;"
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128;"
)


def launched(body: str, threads: int, **options: object) -> ptxemu.LaunchReport:
    source = kernel(INIT + body, before=".extern .shared .align 1024 .b8 dynamic[];\n")
    how = Options(limit=None, **options)
    return ptxemu.load(source).launch(
        grid=(1, 1, 1), block=(threads, 1, 1), smem_bytes=4096, params=[], options=how
    )


@pytest.mark.parametrize("step", [4, 0], ids=["each its own place", "two places"])
def test_a_watch_sees_what_each_lane_stores(step):
    where = f"and.b32 %r4, %r0, {31 if step else 1}; mad.lo.u32 %r4, %r4, 4, %r1;"
    report = launched(
        f"bar.warp.sync -1; add.u32 %r3, %r0, 100; {where} {STORE} [%r4+512], %r3, [%r1];",
        32,
        inspect=Inspect(quiet=True, keep=32, watches=(Watch("shared", 1024 + 512, 128),)),
    )
    (writes,) = report.inspection.histories().values()
    places = [write.first - write.low for write in writes]
    values = [w.value[at : at + 4].view(np.uint32)[0] for w, at in zip(writes, places, strict=True)]
    assert values == list(np.arange(100, 132))


@pytest.mark.parametrize("flip", [0, 1, 31], ids=["in order", "in pairs", "backwards"])
@pytest.mark.parametrize("phases", [1, 2])
def test_lanes_store_a_row(flip, phases):
    """Lane k stores to word k ^ flip; the barrier awaits the 128 bytes in so many phases."""
    out = np.zeros(32, np.uint32)
    wait = "mbarrier.try_wait.parity.shared.b64 %p1, [%r1],"
    announced = INIT.replace("128;", f"{128 // phases};")
    second = (
        "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 64;"
        f"bar.warp.sync -1; NEXT: {wait} 1; @!%p1 bra NEXT;"
    )
    source = kernel(
        f"{announced} ld.param.u64 %rd1, [d]; mul.wide.u32 %rd2, %r0, 4; add.u64 %rd2, %rd1, %rd2;"
        f"bar.warp.sync -1; add.u32 %r3, %r0, 100; xor.b32 %r4, %r0, {flip};"
        f"mad.lo.u32 %r4, %r4, 4, %r1; {STORE} [%r4+512], %r3, [%r1];"
        f"WAIT: {wait} 0; @!%p1 bra WAIT; {second * (phases - 1)}"
        "ld.shared.u32 %r5, [%r2+512]; st.global.u32 [%rd2], %r5;",
        ".param .u64 d",
        kernels.DYNAMIC,
    )
    report = kernels.launch(source, out, smem_bytes=4096)
    np.testing.assert_array_equal(out, 100 + (np.arange(32) ^ flip))
    assert report.bytes["st.async"] == 128


def test_findings_come_in_the_order_of_the_lanes():
    """The mbarrier has not been seen to be initialised, and lanes 20 and 25 race with ordinary
    stores."""
    races = "".join(
        f"setp.eq.u32 %p3, %r0, {thread}; @%p3 st.shared.u32 [%r1+{512 + 4 * lane}], %r0;"
        for thread, lane in ((9, 20), (10, 25))
    )
    store = f"setp.lt.u32 %p2, %r0, 32; @%p2 bra END; {STORE} [%r2+{512 - 128}], %r0, [%r1]; END:"
    found = [finding.check for finding in launched(races + store, 64, check=True).findings]
    assert found[:2] == ["mbarrier", "race"]


# ldmatrix of bytes and of packed elements: the byte of shared memory that each lane gets, written
# out lane by lane; and refusals.

_BITS = {"b8": 8, "b8x16.b6x16_p32": 6, "b8x16.b4x16_p64": 4}


def load(opcode: str, registers: int, image: np.ndarray, pitch: int = 16) -> np.ndarray:
    """Return uint8 [register, lane, byte]. image: the bytes of shared memory; lane t addresses
    those from t * pitch."""
    out = np.zeros((registers, 32), np.uint32)
    names = ", ".join(f"%r{8 + k}" for k in range(registers))
    words = image.view(np.uint32)
    text = kernels.kernel(
        f"""ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; mov.u32 %r0, %tid.x;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2;
        mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1;
        {
            "".join(
                f"ld.global.b32 %r3, [%rd0+{k}]; st.shared.b32 [%r2+{k}], %r3;"
                for k in range(0, image.nbytes, 128)
            )
        }
        bar.warp.sync -1; mad.lo.u32 %r4, %r0, {pitch}, %r1;
        {opcode} {{{names}}}, [%r4];
        {"".join(f"st.global.b32 [%rd1+{128 * k}], %r{8 + k};" for k in range(registers))}""",
        ".param .u64 a, .param .u64 b",
        kernels.DYNAMIC,
    )
    kernels.launch(text, words, out, smem_bytes=image.nbytes)
    return out.view(np.uint8).reshape(registers, 32, 4)


def element(row: np.ndarray, index: int, bits: int) -> int:
    """Return an element of a 16-byte row, lowest bits first."""
    whole = int.from_bytes(row.tobytes(), "little")
    return whole >> bits * index & ((1 << bits) - 1)


@pytest.mark.parametrize("type_", ["b8x16.b6x16_p32", "b8x16.b4x16_p64"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_packed_elements_become_bytes(count: int, type_: str) -> None:
    image = np.random.default_rng(count).integers(0, 256, (32, 16)).astype(np.uint8)
    found = load(f"ldmatrix.sync.aligned.m8n16.x{count}.shared.{type_}", count, image.ravel())
    for register, lane, k in product(range(count), range(32), range(4)):
        row = image[8 * register + lane // 4]
        assert found[register, lane, k] == element(row, 4 * (lane % 4) + k, _BITS[type_])


@pytest.mark.parametrize("type_", _BITS)
@pytest.mark.parametrize("count", [1, 2])
def test_columns_of_sixteen_rows(count: int, type_: str) -> None:
    image = np.random.default_rng(count).integers(0, 256, (32, 16)).astype(np.uint8)
    opcode = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{type_}"
    found = load(opcode, 2 * count, image.ravel())
    for register, lane, k in product(range(2 * count), range(32), range(4)):
        row = image[16 * (register // 2) + 4 * (lane % 4) + k]
        expected = element(row, lane // 4 + 8 * (register % 2), _BITS[type_])
        assert found[register, lane, k] == expected


@pytest.mark.parametrize(("opcode", "registers"), [
    ("ldmatrix.sync.aligned.m16n16.x1.shared.b8", 2),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", 1),
    ("ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8", 4),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8", 1),
    ("ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64", 1),
    ("ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64", 1),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b8x16.b4x16_p64", 1),
])  # fmt: skip
def test_forms_that_there_are_not_are_refused_by_name(opcode: str, registers: int) -> None:
    with pytest.raises(UnsupportedPtx, match="ldmatrix") as caught:
        load(opcode, registers, np.zeros(512, np.uint8))
    assert caught.value.line
    assert opcode in caught.value.text


@pytest.mark.parametrize(("opcode", "rows"), [
    ("m8n16.x1.shared.b8x16.b4x16_p64", range(7, 8)),
    ("m8n16.x1.shared.b8x16.b6x16_p32", range(7, 8)),
    ("m16n16.x1.trans.shared.b8", range(12, 16)),
])  # fmt: skip
def test_undefined_rows_reach_their_lanes_only(opcode: str, rows: range) -> None:
    """All rows except `rows` are written. They reach a lane of row 7, or of the last four rows: 28
    + 3 = 31."""
    body = f"""shl.b32 %r4, %r0, 4; add.u32 %r4, %r4, %r1;
        setp.lt.u32 %p0, %r0, {rows[0]}; setp.gt.or.u32 %p0, %r0, {rows[-1]}, %p0;
        @%p0 st.shared.v4.b32 [%r4], {{%r0, %r0, %r0, %r0}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.{opcode} {{%r10{", %r11" if "m16" in opcode else ""}}}, [%r4];
        and.b32 %r5, %r0, 3; setp.COMPARED.u32 %p1, %r0, 31;
        @%p1 st.global.b32 [%rd1], %r10;"""
    for stored, expected in (("eq", True), ("lt", True)):
        report, _ = test_taint.launch(test_taint.lines(body.replace("COMPARED", stored)))
        assert bool(test_taint.found(report)) is expected
    others = body.replace("setp.COMPARED.u32 %p1, %r0, 31", "setp.lt.u32 %p1, %r0, 28")
    if "m16" in opcode:
        others = body.replace("setp.COMPARED.u32 %p1, %r0, 31", "setp.ne.u32 %p1, %r5, 3")
    assert not test_taint.found(test_taint.launch(test_taint.lines(others))[0])


def test_a_row_has_to_be_aligned() -> None:
    with pytest.raises(HardwareRefusal, match="aligned"):
        load("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", 2, np.zeros(512, np.uint8), pitch=8)
