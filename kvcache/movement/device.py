"""Addresses of entries and accesses of raw memory (device code).

Kernels here take addresses, strides and sizes as 64-bit numbers in one table, not tensors: a pool
may be pinned memory of the host, and a launch costs the host less.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint16, Uint32

from kernelkit.device_table import DeviceTable
from kernelkit.words import vector_at

WORDS = {1: Uint8, 2: Uint16, 4: Uint32}  # bytes of an access -> type; wider ones are of Uint32


def numbers_of(table: DeviceTable, count: int) -> tuple:
    """The numbers of the table of a running kernel."""
    numbers = table.read()
    return tuple(numbers[0, index] for index in range(count))


@cute.jit
def number_at(table: Int64, index: Int32) -> Int64:
    """table[index] of int64."""
    return vector_at(table + Int64(index) * 8, Int64, 1)[0]


@cute.jit
def entry_of(table: Int64, index: Int32, entries: Int64) -> Int32:
    """The entry that a mapping names, -1 where it names none or one that the pool has not."""
    return checked_entry(number_at(table, index), entries)


@cute.jit
def checked_entry(number: Int64, entries: Int64) -> Int32:
    """An entry by number, -1 where the pool has none."""
    entry = Int32(-1)
    if number >= 0 and number < entries:
        entry = Int32(number)
    return entry


@cute.jit
def place_of(entry: Int32, rows: Int64) -> tuple:
    """(slot, row) of an entry, which is not negative."""
    slot = Uint32(entry) // Uint32(rows)
    return Int64(slot), Int64(Uint32(entry) - slot * Uint32(rows))


@cute.jit
def vector_type(size: cutlass.Constexpr[int]) -> tuple:
    """(type, how many) of an access of `size` bytes."""
    return WORDS[min(size, 4)], max(1, size // 4)


@cute.jit
def load_bytes(address: Int64, target: cute.Tensor) -> None:
    """Memory to registers, aligned to their size."""
    cute.autovec_copy(vector_at(address, target.element_type, cute.size(target)), target)


@cute.jit
def store_bytes(source: cute.Tensor, address: Int64) -> None:
    """Registers to memory, aligned to their size."""
    cute.autovec_copy(source, vector_at(address, source.element_type, cute.size(source)))


@cute.jit
def store_word(value: Any, address: Int64) -> None:
    """A number to memory, as wide as it is."""
    gWord = vector_at(address, type(value), 1)
    gWord[0] = value


@cute.jit
def bf16_pair(low: Float32, high: Float32) -> Uint32:
    """Both rounded to nearest, NaN to 0x7FFF."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def zeros(count: int, dtype: Any = Uint32) -> cute.Tensor:
    """Registers."""
    found = cute.make_rmem_tensor(count, dtype)
    found.fill(0)
    return found
