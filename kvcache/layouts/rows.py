"""Location of the entries, or the tail, of one layer in a pool, for kernels and references.

A pool is a uint8 tensor [slots, slot_bytes]. Entry `slot * rows + row` has its data bytes at
`data_offset + row * data_bytes` of the slot and its scale bytes at
`scale_offset + row * scale_bytes`. A mapping is an int64 tensor of such numbers, NO_ENTRY for none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernelkit.call.tensors import require_memory, require_rank, require_types
from kernelkit.plan.dtypes import FP32_BYTES
from kvcache.checks import require, set_whole
from kvcache.layouts.layout import Tail
from kvcache.layouts.records import TMA_ALIGN, Record

NO_ENTRY = -1  # of a mapping: writes nothing, reads zeros
MAX_ENTRIES = (1 << 31) - 1  # kernels split the number of an entry in 32 bits


@dataclass(frozen=True)
class Rows:
    """`rows` entries of `record` in every slot of `pool`; offsets are bytes within a slot."""

    pool: torch.Tensor
    data_offset: int
    scale_offset: int
    rows: int
    record: Record

    def __post_init__(self) -> None:
        set_whole(self, "data_offset", "scale_offset", "rows")

    @property
    def entries(self) -> int:
        """Number of entries in all slots, the exclusive bound of a mapping's numbers."""
        return len(self.pool) * self.rows

    @cached_property
    def alone(self) -> Rows:
        """View of the pool that holds these entries and no others.

        Rows of two layers then differ by their address alone, so that one tape serves both.
        For records without scales; raises TypeError or ValueError as `check` does.
        """
        self.check(align=1)
        if self.record.scale_bytes:
            raise ValueError(f"rows of {self.record.name}: scales are stored apart from the data")
        end = self.data_offset + self.rows * self.record.data_bytes
        return Rows(self.pool[:, self.data_offset : end], 0, 0, self.rows, self.record)

    @property
    def data_rows(self) -> DataRows:
        """The data of these entries, without their scales."""
        record = self.record
        return DataRows(self.pool, self.data_offset, self.rows, record.data_bytes, record.name)

    def data(self) -> torch.Tensor:
        """A view [slots, rows, data_bytes] of the pool."""
        self._check_view()
        return self._view(self.data_offset, self.record.data_bytes)

    def scales(self) -> torch.Tensor:
        """A view [slots, rows, scale_bytes] of the pool."""
        self._check_view()
        scale_bytes = self.record.scale_bytes
        return self._view(self.scale_offset if scale_bytes else 0, scale_bytes)

    def _check_view(self) -> None:
        require_types(pool=self.pool)
        require_memory(pool=self.pool)
        require_rank("pool", self.pool, "[slots, slot_bytes]")
        if self.pool.dtype != torch.uint8:
            raise ValueError(f"pool is {self.pool.dtype}, expected torch.uint8")
        self._check_places(1)

    def _view(self, offset: int, row_bytes: int) -> torch.Tensor:
        size, stride = (len(self.pool), self.rows, row_bytes), (self.pool.stride(0), row_bytes, 1)
        return self.pool.as_strided(size, stride, self.pool.storage_offset() + offset)

    def check(self, align: int = TMA_ALIGN) -> None:
        """TypeError or ValueError, naming value and limit, for rows that do not lie in the pool.

        align: what data_offset, the stride of slots and the pool's address are multiples of.
        """
        check_pool("pool", self.pool, align)
        self._check_places(align)

    def _check_places(self, align: int) -> None:
        """Check everything but the pool."""
        require("record", self.record, Record)
        record = self.record
        data = ("data", record.name, self.data_offset, record.data_bytes)
        check_places(self.pool, self.rows, data, align)
        check_places(
            self.pool, self.rows, ("scales", record.name, self.scale_offset, record.scale_bytes)
        )


@dataclass(frozen=True)
class DataRows:
    """Entries without scales: `rows` of `row_bytes` in every slot of `pool`.

    data_offset: byte of the slot where they begin.
    record: its name, for messages.
    scale_offset: offset that scales would have.
    """

    pool: torch.Tensor
    data_offset: int
    rows: int
    row_bytes: int
    record: str
    scale_offset: int = 0

    def check(self) -> None:
        """TypeError or ValueError, naming value and limit, for rows that are not in the pool."""
        check_pool("pool", self.pool, 1)
        check_places(self.pool, self.rows, ("data", self.record, self.data_offset, self.row_bytes))
        check_places(self.pool, self.rows, ("scales", self.record, self.scale_offset, 0))


@dataclass(frozen=True)
class TailRows:
    """`rows` rows of `tail` in every slot of `pool`, from `offset` bytes on; see `layout.Tail`."""

    pool: torch.Tensor
    offset: int
    rows: int
    tail: Tail

    def __post_init__(self) -> None:
        set_whole(self, "offset", "rows")

    @property
    def columns(self) -> int:
        """Columns of a row of each part."""
        return self.tail.width * self.tail.overlap

    def parts(self) -> tuple[torch.Tensor, ...]:
        """fp32 views [slots, rows, columns]: values, scores; online maxima, sums, values."""
        pool, columns = self.pool.view(torch.float32), self.columns
        # Online the parts of a row are neighbours, else each is a block of all rows.
        count, row, part = 2, columns, self.rows * columns
        if self.tail.online:
            count, row, part = 3, 3 * columns, columns
        start = pool.storage_offset() + self.offset // FP32_BYTES
        size, stride = (len(pool), self.rows, columns), (pool.stride(0), row, 1)
        return tuple(pool.as_strided(size, stride, start + index * part) for index in range(count))

    @property
    def nbytes(self) -> int:
        """Bytes of the tail in a slot."""
        parts = 3 if self.tail.online else 2
        return parts * self.rows * self.columns * FP32_BYTES

    def check(self) -> None:
        """TypeError or ValueError, naming value and limit, for a tail that is not in the pool."""
        check_pool("pool", self.pool)
        slot_bytes = self.pool.shape[1]
        end = self.offset + self.nbytes
        least = 1 if self.tail.online else self.tail.overlap * self.tail.ratio
        if self.rows < least or self.offset < 0 or self.offset % TMA_ALIGN or end > slot_bytes:
            raise ValueError(
                f"{self.tail.name} at {self.offset}, {self.rows} rows: a multiple of {TMA_ALIGN} "
                f"from 0, at least {least} rows, and an end of {end} bytes within {slot_bytes}"
            )


def check_places(
    pool: torch.Tensor, rows: int, part: tuple[str, str, int, int], unit: int = 1
) -> None:
    """ValueError for rows that do not lie in the slots of a pool. part: what of an entry, of which
    record, the offset of the first in a slot, a multiple of `unit`, and its bytes."""
    (slots, slot_bytes), (name, record, offset, row_bytes) = pool.shape, part
    if rows < 1 or slots * rows > MAX_ENTRIES:
        raise ValueError(
            f"{slots} slots of {rows} rows: from 1 row to {MAX_ENTRIES} entries in all"
        )
    end = offset + rows * row_bytes
    if offset < 0 or offset % unit or end > slot_bytes:
        raise ValueError(
            f"{name} of {record} at {offset}, {rows} rows of {row_bytes} bytes: a multiple of "
            f"{unit} from 0, and the end {end} within the slot's {slot_bytes} bytes"
        )


def check_pool(name: str, pool: torch.Tensor, align: int = TMA_ALIGN) -> None:
    """TypeError or ValueError for what is no pool: uint8 [slots, slot_bytes], slots apart."""
    require_types(**{name: pool})
    require_rank(name, pool, "[slots, slot_bytes]")
    require_memory(**{name: pool})
    slots, slot_bytes = pool.shape
    if pool.dtype != torch.uint8 or (slot_bytes > 1 and pool.stride(1) != 1):
        raise ValueError(
            f"{name} is {pool.dtype} with strides {pool.stride()}, expected torch.uint8 with last "
            "stride 1"
        )
    if slots > 1 and pool.stride(0) < slot_bytes:
        raise ValueError(
            f"{name} has slots of {slot_bytes} bytes every {pool.stride(0)}: they overlap"
        )
    begins = (pool.data_ptr(), pool.stride(0) if slots > 1 else 0)
    if any(begin % align for begin in begins):
        raise ValueError(
            f"{name} at address {begins[0]:#x} with a slot every {begins[1]} bytes: both are "
            f"multiples of {align}"
        )


def check_mapping(name: str, numbers: torch.Tensor, end: int, limit: str) -> None:
    """ValueError for a number that is neither NO_ENTRY nor from 0 to end - 1; see `check_range`."""
    check_range(name, numbers, (NO_ENTRY, end), f"{NO_ENTRY}, or {limit}")


def check_range(name: str, numbers: torch.Tensor, range_: tuple[int, int], limit: str) -> None:
    """ValueError for a number outside of [begin, end); only looked at in the memory of this
    machine: on a GPU kernels pass over what is out of range."""
    if numbers.device.type != "cpu" or numbers.numel() == 0:
        return
    low, high = (int(value) for value in numbers.aminmax())
    if low < range_[0] or high >= range_[1]:
        raise ValueError(f"{name} has numbers from {low} to {high}: {limit}")
