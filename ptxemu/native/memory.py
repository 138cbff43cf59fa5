"""Primitives of loads and stores: to memory with one address per lane, and to tensor memory.

The context of a warp (`Context`) says where its memories are and what of them may be accessed. A
primitive does an access only if all of it is in order; else it ends the segment with 1 and has done
nothing, and Python does the access, refuses it, or tells whoever listens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from ptxemu.native.accesses import kind
from ptxemu.native.ir import BITS, LANES, Body, Key, row_bytes

SIZES, COUNTS = (1, 2, 4, 8), (1, 2, 4, 8)
_OFFSET = 0xFFFFFF  # of a shared address; above it is the rank in the cluster
# fields of a context
_SHARED, _SIZE, _REFUSES, _TABLE, _CELLS, _ALLOCATED, _LANE, _NOTES = range(8)
# fields of the table: bytes moved, then the ranges
_LOADED, _STORED, _TENSOR_LOADED, _TENSOR_STORED, _WINDOWS = range(5)
_MOVED = ("ld.global", "st.global", "tmem.ld", "tmem.st")
WINDOWS = 8
_TENSOR_COLUMNS, _TENSOR_LANES = 512, 128
_OF_WINDOW = 3  # first address, end, whether it may be written


class Table:
    """Table of one launch.

    It has the ranges of global memory that were recently found to be allowed, and the
    number of bytes that primitives have moved.
    """

    def __init__(self) -> None:
        self._fields = np.zeros(_WINDOWS + _OF_WINDOW * WINDOWS, np.int64)
        self.address = self._fields.ctypes.data
        self._ranges: list[tuple[int, int, bool]] = []  # the oldest first

    def remember(self, low: int, high: int, writable: bool) -> None:
        found = low, high, writable
        if found not in self._ranges:
            self._ranges = [*self._ranges[-WINDOWS + 1 :], found]
            flat = [field for each in self._ranges for field in each]
            self._fields[_WINDOWS : _WINDOWS + len(flat)] = flat

    def forget(self) -> None:
        """All ranges."""
        self._ranges = []
        self._fields[_WINDOWS:] = 0

    @property
    def moved(self) -> dict[str, int]:
        """Bytes by kind, where there are any."""
        counts = zip(_MOVED, self._fields[:_WINDOWS].tolist(), strict=True)
        return {name: count for name, count in counts if count}


class Context:
    """Context of one warp for primitives.

    smem: address of shared memory.
    cells: address of tensor memory, uint32 (512 columns, 128 lanes).
    allocated: address of a bool for each of these columns, whether it is allocated.
    size: number of bytes of shared memory that belong to the CTA.
    table: ranges of global memory.
    lane: first lane of the warp in tensor memory.
    refuses: whether every access is left to Python.
    notes: address for notes about memory accesses, or 0.
    """

    def __init__(
        self,
        smem: int,
        cells: int,
        allocated: int,
        size: int,
        table: Table,
        lane: int,
        *,
        refuses: bool,
    ) -> None:
        fields = smem, size, refuses, table.address, cells, allocated, lane, 0
        self._fields = (ctypes.c_int64 * len(fields))(*fields)
        self.address = ctypes.addressof(self._fields)

    def note_at(self, notes: int) -> None:
        self._fields[_NOTES] = notes


@dataclass(frozen=True)
class Access:
    """A load or store of `count` elements of `size` bytes by each lane. Operands: the first of the
    rows of data, the addresses, the active lanes."""

    store: bool
    space: str  # "shared" or "global"
    size: int
    count: int

    @property
    def key(self) -> Key:
        name = "store" if self.store else "load"
        return f"{name}_vector {self.space} {self.size} {self.count}", ()

    @property
    def dtype(self) -> str:
        """Type of the rows, such as U32."""
        return f"U{max(8 * self.size, 16)}"

    def build(self, b: Body) -> None:
        wide = "i32" if self.space == "shared" else "i64"
        lanes = f"<{LANES} x {wide}>"
        address = b.do(f"load {lanes}, ptr {b.place(1)}, align 64")
        mask = b.load(b.place(2), "BOOL")
        if self.space == "shared":
            address = b.do(f"and {lanes} {address}, {_all(wide, _OFFSET)}")
        self._leave_unless_fit(b, address, mask, wide)
        self._note(b)
        if self.space == "global":
            self._count(b, mask)
        if self.size < 4:  # no instruction gathers or scatters such
            self._by_lane(b)
            return
        base = f"ptr {_pointer(b, _SHARED)}" if wide == "i32" else "ptr null"
        first = b.do(f"getelementptr i8, {base}, {lanes} {address}")
        for row in range(self.count):
            where = b.do(f"getelementptr i8, <{LANES} x ptr> {first}, i64 {row * self.size}")
            self._move(b, where, mask, row)

    def _leave_unless_fit(self, b: Body, address: str, mask: str, wide: str) -> None:
        """All active lanes are aligned and within bounds."""
        lanes, nbytes = f"<{LANES} x {wide}>", self.size * self.count
        zero = b.do(f"select <{LANES} x i1> {mask}, {lanes} {address}, {lanes} zeroinitializer")
        all_ = b.reduce("or", wide, zero)
        bad = b.do(f"icmp ne {wide} {b.do(f'and {wide} {all_}, {nbytes - 1}')}, 0")
        refuses = b.do(f"icmp ne i64 {b.context(_REFUSES)}, 0")
        bad = b.do(f"or i1 {bad}, {refuses}")
        top = b.reduce("umax", wide, zero)
        if wide == "i32":
            end = b.do(f"add i64 {b.do(f'zext i32 {top} to i64')}, {nbytes}")
            outside = b.do(f"icmp ugt i64 {end}, {b.context(_SIZE)}")
        else:
            ones = f"<{LANES} x i1> {mask}, {lanes} {address}, {lanes} {_all(wide, -1)}"
            low = b.reduce("umin", wide, b.do(f"select {ones}"))
            inside = self._in_a_window(b, low, b.do(f"add i64 {top}, {nbytes}"))
            outside = b.do(f"xor i1 {inside}, true")
        b.leave_if(b.do(f"or i1 {bad}, {outside}"))

    def _note(self, b: Body) -> None:
        """Note the access if the launch is recorded; leave it to Python if there is no room for a
        note."""
        notes = b.context(_NOTES)
        with b.only_if(b.do(f"icmp ne i64 {notes}, 0")):
            name = f'@"accesses.note_{self.space}"'
            b.declared.add(f"declare i64 {name}(ptr, ptr, ptr, i64)")
            what = kind(self.space, self.store, self.size * self.count)
            where = (
                f"ptr {b.do(f'inttoptr i64 {notes} to ptr')}, ptr {b.place(1)}, ptr {b.place(2)}"
            )
            full = b.do(f"call i64 {name}({where}, i64 {what})")
            b.leave_if(b.do(f"icmp ne i64 {full}, 0"))

    def _in_a_window(self, b: Body, low: str, end: str) -> str:
        table, found = _pointer(b, _TABLE), "false"
        for window in range(WINDOWS):
            start = _WINDOWS + _OF_WINDOW * window
            first, last, writable = (_field(b, table, start + k) for k in range(_OF_WINDOW))
            fits = b.do(f"icmp uge i64 {low}, {first}")
            fits = b.do(f"and i1 {fits}, {b.do(f'icmp ule i64 {end}, {last}')}")
            if self.store:
                fits = b.do(f"and i1 {fits}, {b.do(f'icmp ne i64 {writable}, 0')}")
            found = b.do(f"or i1 {found}, {fits}")
        return found

    def _by_lane(self, b: Body) -> None:
        rows, element = b.place(0), f"i{8 * self.size}"
        step, wide = row_bytes(self.dtype), f"i{BITS[self.dtype]}"
        with b.loop(LANES) as lane:
            places = [
                b.do(f"getelementptr i8, ptr {rows}, i64 {step * row}") for row in range(self.count)
            ]
            places = [b.do(f"getelementptr {wide}, ptr {p}, i64 {lane}") for p in places]
            if not self.store:
                b.lines += [f"  store {wide} 0, ptr {place}" for place in places]
            active = b.do(f"load i8, ptr {b.do(f'getelementptr i8, ptr {b.place(2)}, i64 {lane}')}")
            with b.only_if(b.do(f"icmp ne i8 {active}, 0")):
                first = self._of_lane(b, lane)
                for row, place in enumerate(places):
                    where = b.do(f"getelementptr i8, ptr {first}, i64 {row * self.size}")
                    self._move_one(b, where, place, element, wide)

    def _of_lane(self, b: Body, lane: str) -> str:
        """Return a pointer to the elements of a lane."""
        if self.space == "global":
            place = b.do(f"getelementptr i64, ptr {b.place(1)}, i64 {lane}")
            return b.do(f"inttoptr i64 {b.do(f'load i64, ptr {place}')} to ptr")
        address = b.do(f"load i32, ptr {b.do(f'getelementptr i32, ptr {b.place(1)}, i64 {lane}')}")
        offset = b.do(f"and i32 {address}, {_OFFSET}")
        return b.do(f"getelementptr i8, ptr {_pointer(b, _SHARED)}, i32 {offset}")

    def _move_one(self, b: Body, where: str, place: str, element: str, wide: str) -> None:
        source, target = (place, where) if self.store else (where, place)
        types = (wide, element) if self.store else (element, wide)
        value = b.do(f"load {types[0]}, ptr {source}")
        if types[0] != types[1]:
            value = b.do(f"{'trunc' if self.store else 'zext'} {types[0]} {value} to {types[1]}")
        b.lines.append(f"  store {types[1]} {value}, ptr {target}")

    def _move(self, b: Body, where: str, mask: str, row: int) -> None:
        element, lanes = f"i{8 * self.size}", f"<{LANES} x i{8 * self.size}>"
        place = b.do(f"getelementptr i8, ptr {b.place(0)}, i64 {row * row_bytes(self.dtype)}")
        end = f"<{LANES} x ptr> {where}, i32 {self.size}, <{LANES} x i1> {mask}"
        types = f"<{LANES} x ptr>, i32, <{LANES} x i1>"
        if self.store:
            name = f"llvm.masked.scatter.v32{element}.v32p0"
            b.declared.add(f"declare void @{name}({lanes}, {types})")
            value = b.load(place, self.dtype)
            b.lines.append(f"  call void @{name}({lanes} {value}, {end})")
            return
        name = f"llvm.masked.gather.v32{element}.v32p0"
        b.declared.add(f"declare {lanes} @{name}({types}, {lanes})")
        value = b.do(f"call {lanes} @{name}({end}, {lanes} zeroinitializer)")
        b.store(value, place, self.dtype)

    def _count(self, b: Body, mask: str) -> None:
        bits = b.do(f"bitcast <{LANES} x i1> {mask} to i32")
        b.declared.add("declare i32 @llvm.ctpop.i32(i32)")
        active = b.do(f"zext i32 {b.do(f'call i32 @llvm.ctpop.i32(i32 {bits})')} to i64")
        nbytes = b.do(f"mul i64 {active}, {self.size * self.count}")
        _moved(b, _STORED if self.store else _LOADED, nbytes)


@dataclass(frozen=True)
class TensorAccess:
    """tcgen05.ld or .st of `count` registers in the shape 32x32b. Operands: the first of the rows
    of registers, the address, which is that of the first lane."""

    store: bool
    count: int
    dtype = "U32"

    @property
    def key(self) -> Key:
        return f"tmem_{'store' if self.store else 'load'} {self.count}", ()

    def build(self, b: Body) -> None:
        address = b.do(f"load i32, ptr {b.place(1)}")
        column = b.do(f"zext i32 {b.do(f'and i32 {address}, 65535')} to i64")
        self._leave_unless_fit(b, address, column)
        cell = b.do(f"mul i64 {column}, {_TENSOR_LANES}")
        cell = b.do(f"add i64 {cell}, {b.context(_LANE)}")
        cells = b.do(f"getelementptr i32, ptr {_pointer(b, _CELLS)}, i64 {cell}")
        rows = b.place(0)
        with b.loop(self.count) as row:
            cell = b.do(f"mul i64 {row}, {_TENSOR_LANES}")
            cell = b.do(f"getelementptr i32, ptr {cells}, i64 {cell}")
            register = b.do(f"getelementptr <{LANES} x i32>, ptr {rows}, i64 {row}")
            source, target = (register, cell) if self.store else (cell, register)
            b.store(b.load(source, "U32"), target, "U32")
        _moved(b, _TENSOR_STORED if self.store else _TENSOR_LOADED, str(4 * LANES * self.count))

    def _leave_unless_fit(self, b: Body, address: str, column: str) -> None:
        """The lane is the warp's first one, or 0, and the columns are allocated."""
        lane = b.do(f"zext i32 {b.do(f'lshr i32 {address}, 16')} to i64")
        own = b.do(f"icmp eq i64 {lane}, {b.context(_LANE)}")
        right = b.do(f"or i1 {own}, {b.do(f'icmp eq i64 {lane}, 0')}")
        inside = b.do(f"icmp ule i64 {column}, {_TENSOR_COLUMNS - self.count}")
        told = b.do(f"icmp eq i64 {b.context(_REFUSES)}, 0")
        right = b.do(f"and i1 {right}, {b.do(f'and i1 {inside}, {told}')}")
        b.leave_if(b.do(f"xor i1 {right}, true"))
        lanes = f"<{self.count} x i8>"
        first = b.do(f"getelementptr i8, ptr {_pointer(b, _ALLOCATED)}, i64 {column}")
        flags = b.do(f"load {lanes}, ptr {first}, align 1")
        name = f"llvm.vector.reduce.and.v{self.count}i8"
        b.declared.add(f"declare i8 @{name}({lanes})")
        all_ = b.do(f"call i8 @{name}({lanes} {flags})")
        b.leave_if(b.do(f"icmp eq i8 {all_}, 0"))


def _moved(b: Body, field: int, nbytes: str) -> None:
    """Count bytes."""
    place = b.do(f"getelementptr i8, ptr {_pointer(b, _TABLE)}, i64 {8 * field}")
    total = b.do(f"add i64 {b.do(f'load i64, ptr {place}')}, {nbytes}")
    b.lines.append(f"  store i64 {total}, ptr {place}")


def _all(type_: str, value: int) -> str:
    return "<" + ", ".join([f"{type_} {value}"] * LANES) + ">"


def _pointer(b: Body, field: int) -> str:
    return b.do(f"inttoptr i64 {b.context(field)} to ptr")


def _field(b: Body, table: str, number: int) -> str:
    return b.do(f"load i64, ptr {b.do(f'getelementptr i8, ptr {table}, i64 {8 * number}')}")


_ALL: tuple[Access | TensorAccess, ...] = (
    *(
        Access(store, space, size, count)
        for store in (False, True)
        for space in ("shared", "global")
        for size in SIZES
        for count in COUNTS
    ),
    *(TensorAccess(store, 1 << k) for store in (False, True) for k in range(8)),
)
ACCESSES = {access.key: access for access in _ALL}
