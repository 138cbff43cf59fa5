"""Addresses of entries and accesses of raw memory (device code).

Kernels here take addresses, strides and sizes by name in one table (`kvcache.movement.config`), not
tensors: a pool may be pinned memory of the host, and a launch costs the host less.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from kernelkit.device.words import vector_at
from kvcache.layouts.records import Record
from kvcache.movement.config import Entries

WORDS = {1: Uint8, 2: Uint16, 4: Uint32}  # bytes of an access -> type; wider ones are of Uint32


@dataclass(frozen=True)
class SlotRow:
    """Slot and row of an entry: its slot of the pool, and its row of the slot."""

    slot: Int64
    row: Int64


@dataclass(frozen=True)
class EntryAddress:
    """The addresses of an entry's data and scales; of a record without scales both are equal."""

    data: Int64
    scales: Int64


@cute.jit
def int64_at(table: Int64, index: Int32) -> Int64:
    """Element `index` of an int64 table, given by its address."""
    return vector_at(table + Int64(index) * 8, Int64, 1)[0]


@cute.jit
def int32_at(table: Int64, index: Int32) -> Int32:
    """Element `index` of an int32 table, given by its address."""
    return vector_at(table + Int64(index) * 4, Int32, 1)[0]


@cute.jit
def entry_of(table: Int64, index: Int32, entries: Int64) -> Int32:
    """The entry that an int64 table names, -1 where it names none or one that the pool has not."""
    return checked_entry(int64_at(table, index), entries)


@cute.jit
def checked_entry(number: Int64, entries: Int64) -> Int32:
    """The number of an entry, -1 where the pool does not have it."""
    entry = Int32(-1)
    if number >= 0 and number < entries:
        entry = Int32(number)
    return entry


@cute.jit
def slot_row(entry: Int32, rows: Int64) -> SlotRow:
    """The slot and row of an entry that is not negative; rows: of a slot."""
    slot = Uint32(entry) // Uint32(rows)
    return SlotRow(Int64(slot), Int64(Uint32(entry) - slot * Uint32(rows)))


@cute.jit
def entry_address(
    record: cutlass.Constexpr[Record], entries: Entries, entry: Int32
) -> EntryAddress:
    """Return the addresses of an entry's data and scales; of entry 0 for a negative number."""
    place = slot_row(cutlass.max(entry, Int32(0)), entries.rows)
    data = entries.data + place.slot * entries.slot_stride + place.row * record.data_bytes
    scales = data
    if cutlass.const_expr(record.scale_bytes > 0):
        scales = entries.scales + place.slot * entries.slot_stride + place.row * record.scale_bytes
    return EntryAddress(data, scales)


def vector_type(nbytes: int) -> tuple[type, int]:
    """The type and the number of elements of an access of so many bytes."""
    return WORDS[min(nbytes, 4)], max(1, nbytes // 4)


@cute.jit
def load_bytes(address: Int64, target: cute.Tensor) -> None:
    """Load a fragment in one access, aligned to its size."""
    cute.autovec_copy(vector_at(address, target.element_type, cute.size(target)), target)


@cute.jit
def store_bytes(source: cute.Tensor, address: Int64) -> None:
    """Store a fragment in one access, aligned to its size."""
    cute.autovec_copy(source, vector_at(address, source.element_type, cute.size(source)))


@cute.jit
def store_word(value: Any, address: Int64) -> None:
    """Store a number, as wide as its type."""
    gWord = vector_at(address, type(value), 1)
    gWord[0] = value


@cute.jit
def bf16_pair(low: Float32, high: Float32) -> Uint32:
    """Two numbers in bf16 in a word, rounded to nearest, a NaN to 0x7FFF."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def zeros(count: int, dtype: Any = Uint32) -> cute.Tensor:
    """A fragment of zeros in registers."""
    found = cute.make_rmem_tensor(count, dtype)
    found.fill(0)
    return found
