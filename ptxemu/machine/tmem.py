"""Tensor memory of one CTA: its cells, its allocator, and who may reach which lanes.

128 lanes by 512 columns of 32 bits, kept as [column, lane] so that a column's lanes are contiguous.
A TMEM address is lane << 16 | column.
Sources: PTX ISA, tcgen05 "Tensor Memory addressing", "allocation", "data movement shapes" and
"data path layout organization"; CUTLASS cute/atom/copy_traits_sm100.hpp for the register maps of
16x64b and 16x32bx2, whose figures the manual gives only as pictures. Where A lies for M = 64 say
both the manual ("Data Path Layout Organization", Layout F: the lanes of D) and CUTLASS
(cute/atom/mma_traits_sm100_frag.hpp, tmem_frg_1sm, NonInterleaved).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.native.library import aligned
from ptxemu.numerics.formats import TENSOR_COLUMNS

LANES = 128
QUARTER = 32  # lanes that one warp of a warpgroup reaches
SHIFTED_COLUMNS = 8  # of tcgen05.shift
POISON = 0xFFFFFFFF  # NaN as f32 and as two f16
UPPER_POISON = np.uint32(0xFFFF0000)  # above a 16-bit element, where no value is defined
_ALLOCATION_SIZES = (32, 64, 128, 256, 512)
_MAX_REGISTERS = 128


class _Shape(NamedTuple):
    """A data movement shape: register r of thread t holds (lane(t, r), column(t, r))."""

    registers_per_num: int
    lanes: int  # 32: all of a warp's lanes; 16: either half of them
    lane: Callable[[np.ndarray, np.ndarray], np.ndarray]
    column: Callable[[np.ndarray, np.ndarray], np.ndarray]


# 16x32bx2 is two 16x32b blocks: threads 16..31 continue at the immediate's column offset.
SHAPES: dict[str, _Shape] = {
    "32x32b": _Shape(1, 32, lambda t, r: t, lambda t, r: r),
    "16x64b": _Shape(1, 16, lambda t, r: t // 4 + 8 * (t % 2), lambda t, r: t // 2 % 2 + 2 * r),
    "16x128b": _Shape(2, 16, lambda t, r: t // 4 + 8 * (r % 2), lambda t, r: t % 4 + 4 * (r // 2)),
    "16x256b": _Shape(
        4,
        16,
        lambda t, r: t // 4 + 8 * (r // 2 % 2),
        lambda t, r: r % 2 + 2 * (t % 4) + 8 * (r // 4),
    ),
    "16x32bx2": _Shape(1, 16, lambda t, r: t % 16, lambda t, r: r),
}


Move = tuple[str, int, bool, int]  # shape, repeat count, 16-bit packing, columns between halves


@dataclass(eq=False, slots=True)
class PendingLoad:
    """A tcgen05.ld that has been issued: `out`, uint32 [register, thread], is filled later."""

    address: int
    move: Move
    out: np.ndarray


class Tmem:
    """Tensor memory of one CTA.

    cells: uint32 (512 columns, 128 lanes), poisoned until written.
    allocations: base to size.

    Freed columns keep their cells until they are allocated again. An access to freed columns is
    only reported to `find(check, message)`, since accesses may come after the deallocation: the
    last MMA in NVIDIA's fmha_bwd.py, and the other warps' loads in its
    mixed_input_fmha_prefill_d256.py.
    """

    def __init__(self, find: Callable[[str, str], None] = lambda check, message: None) -> None:
        self.cells = self._new_cells()
        self.cells_at = self.cells.ctypes.data
        self.allocations: dict[int, int] = {}
        self._find = find
        self._allocated = 0  # bit c: column c belongs to an allocation
        self.columns = np.zeros(TENSOR_COLUMNS, np.bool_)  # the same
        self._freed = 0  # bit c: column c did, and has not been allocated again
        self._may_allocate = True

    @staticmethod
    def _new_cells() -> np.ndarray:
        cells = aligned(4 * TENSOR_COLUMNS * LANES).view(np.uint32)
        cells[:] = POISON
        return cells.reshape(TENSOR_COLUMNS, LANES)

    def try_alloc(self, columns: int) -> int | None:
        """tcgen05.alloc: base column of the lowest free range, or None while there is none."""
        _require_allocation_size(columns)
        if not self._may_allocate:
            raise HardwareRefusal("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        for base in range(0, TENSOR_COLUMNS - columns + 1, _ALLOCATION_SIZES[0]):
            mask = columns_of(base, columns)
            if not self._allocated & mask:
                self._allocated |= mask
                self.columns[base : base + columns] = True
                self._freed &= ~mask
                self.cells[base : base + columns] = POISON
                self.allocations[base] = columns
                return base
        return None

    def _listed(self) -> str:
        return ", ".join(f"{n} at {c:#x}" for c, n in self.allocations.items()) or "nothing"

    def dealloc(self, address: int, columns: int) -> None:
        """tcgen05.dealloc: give back a whole allocation."""
        _require_allocation_size(columns)
        if self.allocations.get(address) != columns:
            raise HardwareRefusal(
                f"tcgen05.dealloc of {columns} columns at {address:#x}; allocated: {self._listed()}"
            )
        del self.allocations[address]
        self._allocated &= ~columns_of(address, columns)
        self.columns[address : address + columns] = False
        self._freed |= columns_of(address, columns)

    def relinquish(self) -> None:
        """tcgen05.relinquish_alloc_permit: any later alloc of this CTA is refused."""
        self._may_allocate = False

    def holds(self, column: int, count: int) -> bool:
        """Whether these columns are allocated."""
        return not columns_of(column, count) & ~self._allocated

    def check(self, column: int, count: int = 1) -> None:
        """Raise HardwareRefusal unless columns column .. column + count - 1 have been allocated."""
        self.require(columns_of(column, count))

    def require(self, mask: int) -> None:
        """Raise HardwareRefusal unless the columns whose bits are set have been allocated."""
        missing = mask & ~self._allocated
        if not missing:
            return
        never = missing & ~self._freed
        if never:
            column = (never & -never).bit_length() - 1
            raise HardwareRefusal(
                f"TMEM not allocated: column {column:#x}; allocated columns: {self._listed()}"
            )
        self._find("tmem", "tensor memory is accessed after its deallocation")

    def require_access(self, move: Move, address: int, warp_in_group: int) -> None:
        """Refuse a bad address when an access is issued; its data is moved later."""
        self.require(_rectangle(move, address, warp_in_group)[0])

    def load_to(self, out: np.ndarray, move: Move, address: int, warp_in_group: int) -> None:
        """tcgen05.ld to `out`, uint32 (registers, 32)."""
        mask, columns, lanes = _rectangle(move, address, warp_in_group)
        if lanes is None:
            shape, num, packed, half_split = move
            out[:] = self.load(
                shape, num, address, warp_in_group, pack16=packed, half_split=half_split
            )
            return
        self.require(mask)
        out[:] = self.cells[columns, lanes]

    def store_from(self, rows: np.ndarray, move: Move, address: int, warp_in_group: int) -> None:
        """tcgen05.st of `rows`, uint32 (registers, 32)."""
        mask, columns, lanes = _rectangle(move, address, warp_in_group)
        if lanes is None:
            shape, num, unpack, half_split = move
            self.store(
                shape, num, address, warp_in_group, rows, unpack16=unpack, half_split=half_split
            )
            return
        self.require(mask)
        self.cells[columns, lanes] = rows

    def load(
        self,
        shape: str,
        num: int,
        address: int,
        warp_in_group: int,
        *,
        pack16: bool = False,
        half_split: int = 0,
    ) -> np.ndarray:
        """tcgen05.ld: return uint32 (registers, 32), the last axis the thread.

        Args:
            shape: of the access.
            num: the N of .xN.
            address: lane 32 * warp_in_group or 0 (+ 16 for shapes of 16 lanes), and the column.
            warp_in_group: number of the warp, which selects its lanes.
            pack16: whether a register holds the low halves of two columns.
            half_split: columns from the first to the second half of 16x32bx2.
        """
        column = address & 0xFFFF
        if shape == "32x32b" and not pack16:
            lane = _require_lane(shape, address, warp_in_group)
            self.require(columns_of(column, _require_num(shape, num)))
            return self.cells[column : column + num, lane : lane + 32].copy()
        index = self._index(shape, num, address, warp_in_group, pack16, half_split)
        flat = self.cells.reshape(-1)
        if not pack16:
            return flat.take(index)
        return flat.take(index) & 0xFFFF | flat.take(index + LANES) << 16

    def store(
        self,
        shape: str,
        num: int,
        address: int,
        warp_in_group: int,
        registers: np.ndarray,
        *,
        unpack16: bool = False,
        half_split: int = 0,
    ) -> None:
        """tcgen05.st of `registers`, uint32 (registers, 32): the inverse of `load`.

        unpack16: each register's halves go to two columns' low halves.
        """
        column = address & 0xFFFF
        if shape == "32x32b" and not unpack16:
            lane = _require_lane(shape, address, warp_in_group)
            self.require(columns_of(column, _require_num(shape, num)))
            self.cells[column : column + num, lane : lane + 32] = registers
            return
        index = self._index(shape, num, address, warp_in_group, unpack16, half_split)
        flat = self.cells.reshape(-1)
        if not unpack16:
            flat[index] = registers
            return
        flat[index] = registers & 0xFFFF | UPPER_POISON
        flat[index + LANES] = registers >> 16 | UPPER_POISON

    def _index(
        self, shape: str, num: int, address: int, warp_in_group: int, packed: bool, half_split: int
    ) -> np.ndarray:
        """Flat cell of each register and thread (the even one of a packed pair), checked."""
        lane = _require_lane(shape, address, warp_in_group)
        _require_num(shape, num)
        index, columns = register_map(shape, num, packed, half_split)
        column = address & 0xFFFF
        self.require(columns << column)
        return index + (column * LANES + lane)

    def accumulator(self, address: int, m: int, n: int, cta_group: int) -> np.ndarray:
        """Return this CTA's part of a D matrix, as a view of the cells that reads as (n, rows).

        The view reshaped to (n, rows) in C order is D transposed. Its shape depends on M:
        (n, 128): M = 128, or 256 for a pair.
        (n, 4, 16): M = 64.
        (2, n / 2, 64): M = 128 for a pair.
        (4, n / 4, 32): M = 128 with `cta_group` 4, which is the layout of M = 32 with
        tcgen05.mma.ws.
        16-bit elements are the low halves of their cells.
        """
        lane, column = address >> 16, address & 0xFFFF
        rows = m // cta_group
        if lane not in ((0, 16) if m == 64 else (0,)):
            raise HardwareRefusal(f"D of M={m} at TMEM lane {lane}")
        columns = n if rows == 128 or cta_group == 1 else n // cta_group
        self.check(column, columns)
        cells = self.cells[column : column + columns]
        if rows == 128:
            return cells
        if cta_group == 1:
            return cells.reshape(n, 4, 32)[:, :, lane : lane + 16]
        return cells.reshape(columns, cta_group, rows).transpose(1, 0, 2)

    def operand_image(self, address: int, m: int, cta_group: int, nbytes: int) -> np.ndarray:
        """An A operand's bytes, uint8 (rows of one CTA, nbytes), K packed along the columns.

        Of M = 128 by a pair both halves of the lanes hold the CTA's 64 rows (CUTLASS, `Duplicated`
        of `tmem_frg_2sm`); raises UnsupportedPtx where they differ.
        """
        copies = self.operand_copies(address, m, cta_group, nbytes)
        if len(copies) > 1 and (copies[0] != copies[1]).any():
            column = address & 0xFFFF
            raise UnsupportedPtx(f"A in TMEM column {column:#x} differs between the lanes' halves")
        return copies[0]

    def operand_copies(self, address: int, m: int, cta_group: int, nbytes: int) -> np.ndarray:
        """Return the bytes of an operand for each part of the lanes that has all rows.

        The result is uint8 (parts, rows, nbytes). With tcgen05.mma.ws each part of N is
        multiplied with the A in its lanes.
        """
        lanes = operand_lanes(address >> 16, m, cta_group)
        column, columns = address & 0xFFFF, nbytes // 4
        self.check(column, columns)
        rows = np.ascontiguousarray(self.cells[column : column + columns].T)
        if lanes.size < LANES:
            rows = rows[lanes[0]]
        return rows.view(np.uint8).reshape(*lanes.shape, nbytes)

    def shift_operand(self, address: int, m: int, cta_group: int, nbytes: int) -> None:
        """tcgen05.mma.ashift: replace each row of A by the next one, except the last of each
        quarter.

        Both copies of A are shifted for M = 128 by a pair (CUTLASS
        primitives/tcgen05/1cta_mma_a_from_tmem.py; the manual has it for M = 128 and 256).
        """
        if m < LANES:
            raise HardwareRefusal(f".ashift of M={m}, must be 128 or 256")
        column = address & 0xFFFF
        quarters = self.cells[column : column + nbytes // 4].reshape(-1, LANES // QUARTER, QUARTER)
        quarters[:, :, :-1] = quarters[:, :, 1:]

    def shift_rows(self, address: int) -> None:
        """tcgen05.shift.down: the same of 32 bytes of the quarter of the lanes at `address`."""
        lane, column = address >> 16, address & 0xFFFF
        self.check(column, SHIFTED_COLUMNS)
        quarter = self.cells[column : column + SHIFTED_COLUMNS, lane : lane + QUARTER]
        quarter[:, :-1] = quarter[:, 1:]


@lru_cache(maxsize=4096)
def _rectangle(
    move: Move, address: int, warp_in_group: int
) -> tuple[int, slice | None, slice | None]:
    """Return the mask of the columns of an access, and its columns and lanes if it moves all of
    these cells as they are. Raises HardwareRefusal for a bad address."""
    shape, num, packed, half_split = move
    column, lane = address & 0xFFFF, _require_lane(shape, address, warp_in_group)
    _require_num(shape, num)
    if shape == "32x32b" and not packed:
        return columns_of(column, num), slice(column, column + num), slice(lane, lane + 32)
    return register_map(shape, num, packed, half_split)[1] << column, None, None


@lru_cache(maxsize=64)
def operand_lanes(lane: int, m: int, cta_group: int) -> np.ndarray:
    """The lanes of an A operand at `lane`, intp [copy, row]: of M = 64 the 16 lanes of each quarter
    that D has, too, of M = 128 by a pair all lanes, for two copies."""
    if lane not in ((0, 16) if m == 64 else (0,)):
        raise HardwareRefusal(f"A of M={m} at TMEM lane {lane}")
    lanes = np.arange(LANES, dtype=np.intp)
    if m == 64:
        return lanes.reshape(-1, QUARTER)[:, lane : lane + 16].reshape(1, -1)
    return lanes.reshape(-1, m // cta_group)


def require_shifted(address: int) -> None:
    """Check the address of tcgen05.shift against the rule of PTX ISA."""
    lane = address >> 16
    if lane % QUARTER or lane >= LANES:
        raise HardwareRefusal(f"tcgen05.shift at TMEM lane {lane}, must be 0, 32, 64 or 96")


def columns_of(column: int, count: int) -> int:
    """The bits of so many columns from the first one on."""
    return (1 << count) - 1 << column


def _require_allocation_size(columns: int) -> None:
    if columns not in _ALLOCATION_SIZES:
        raise HardwareRefusal(
            f"TMEM allocation of {columns} columns, must be one of {_ALLOCATION_SIZES}"
        )


def _require_lane(shape: str, address: int, warp_in_group: int) -> int:
    """Return the first lane of the access, in the warp's quarter; quarter 0 of an address means
    that one.

    Kernels right on hardware leave the quarter to the warp (DeepGEMM's epilogues with 32x32b and
    16x256b, CUTLASS's primitives/tcgen05/1cta_mma_a_from_tmem.py). Any other quarter is refused.
    """
    lane, first = address >> 16, 32 * warp_in_group
    quarter, inner = lane & ~31, lane & 31
    if quarter not in (0, first) or inner not in (0, 32 - SHAPES[shape].lanes):
        raise HardwareRefusal(
            f"tcgen05.ld/st.{shape} at TMEM lane {lane}, warp {warp_in_group} of its group reaches"
            f" lanes {first} to {first + 31}"
        )
    return first + inner


def _require_num(shape: str, num: int) -> int:
    limit = _MAX_REGISTERS // SHAPES[shape].registers_per_num
    if num & num - 1 or not 1 <= num <= limit:
        raise HardwareRefusal(f"tcgen05.ld/st.{shape}.x{num}, must be a power of two up to {limit}")
    return num


@lru_cache(maxsize=256)
def register_map(shape: str, num: int, packed: bool, half_split: int) -> tuple[np.ndarray, int]:
    """Flat cells, intp (registers, 32), and the mask of columns, both relative to the address."""
    spec = SHAPES[shape]
    thread = np.arange(32, dtype=np.intp)[None, :]
    register = np.arange(num * spec.registers_per_num, dtype=np.intp)[:, None]
    width = 2 if packed else 1
    column = width * spec.column(thread, register)
    if shape == "16x32bx2":
        column = column + half_split * (thread // 16)
    index = column * LANES + spec.lane(thread, register)
    used = sum(1 << c for c in {int(c) + i for c in column.flat for i in range(width)})
    return np.broadcast_to(index, (register.size, 32)).copy(), used
