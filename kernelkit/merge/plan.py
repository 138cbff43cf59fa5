"""Compile-time config of a merge kernel, and the work of each thread, as data.

A thread owns one or two vectors of a row, each at most 16 bytes of every tensor. A CTA owns a tile
of rows, (query positions x heads) of one batch entry. With `lanes` > 1 it reads that many parts of
every row at a time and adds up what its lanes hold in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernelkit.plan.dtypes import ITEM_BYTES

VECTOR_BYTES = 16
MAX_HEAD_DIM = 512
HEAD_DIM_STEP = 8

CTA_THREADS = 256
LANES = 8
# With this many vectors to a part, one lane keeps 4 MiB of loads in flight: latency times bandwidth
# of an H100 is 2 MiB.
VECTORS_THAT_FILL = 1 << 16
UNROLLED = 4  # parts whose loads are in flight together, per thread

FIELDS_OF_PART = 12  # three addresses, and three strides of each tensor
FIELDS_OF_STACK = 15  # the same with four strides
# Room for parts in the kernel's parameters: a larger table costs a larger copy at every launch.
CAPACITIES = (4, 32, 256)
# A sector holds the statistics of 8 consecutive positions; one row of 8 heads lies in 8 sectors.
POSITIONS_OF_TILE = 8


@dataclass(frozen=True)
class MergeConfig:
    """Static fields; lengths, strides and the number of parts are arguments of the kernel.

    dtypes: dtypes of the parts, each once
    out_dtype: dtype of O
    raw: whether some part has a row_max
    stacked: whether one tensor holds all parts
    capacity: number of parts that fit the parameter table
    lanes: see the module
    """

    label: ClassVar = ("fmha_merge", "head_dim")

    head_dim: int
    dtypes: tuple[str, ...]
    out_dtype: str
    raw: bool
    sinks: bool
    stacked: bool
    capacity: int
    lanes: int

    @property
    def vector(self) -> int:
        """Elements of a load or store."""
        return VECTOR_BYTES // max(ITEM_BYTES[name] for name in (*self.dtypes, self.out_dtype))

    @property
    def vectors(self) -> int:
        """Vectors of a row per thread: two share what their row costs, addresses and weights."""
        return 1 if self.head_dim // self.vector % 2 else 2

    @property
    def columns(self) -> int:
        return self.head_dim // (self.vector * self.vectors)

    @property
    def rows(self) -> int:
        """Rows per CTA, a power of two."""
        return floor_power_of_two(max(1, CTA_THREADS // (self.columns * self.lanes)))

    @property
    def threads(self) -> int:
        return self.lanes * self.rows * self.columns


def lanes_for(parts: int, rows: int, head_dim: int) -> int:
    """Lanes that keep a GPU busy: several where many parts meet few rows."""
    vectors = rows * head_dim * ITEM_BYTES["bf16"] // VECTOR_BYTES
    return LANES if parts > UNROLLED and vectors < VECTORS_THAT_FILL else 1


def capacity_for(parts: int) -> int:
    """The smallest table that holds `parts`; ValueError where none does."""
    for capacity in CAPACITIES:
        if parts <= capacity:
            return capacity
    raise ValueError(
        f"{parts} parts, limit {CAPACITIES[-1]} in one launch: their addresses and strides are "
        f"parameters of the kernel. Pass a stack (O [N, ...], LSE [N, ...]), which has no limit"
    )


def tile_positions(rows: int, positions: int, heads: int) -> int:
    """Query positions of a tile of `rows` rows, a power of two; the other rows are heads."""
    tile_heads = rows // min(rows, POSITIONS_OF_TILE, ceil_power_of_two(positions))
    return rows // min(tile_heads, ceil_power_of_two(heads))


def floor_power_of_two(number: int) -> int:
    """Largest power of two <= number, which is at least 1."""
    return 1 << (number.bit_length() - 1)


def ceil_power_of_two(number: int) -> int:
    """Smallest power of two >= number, which is at least 1."""
    return 1 << (number - 1).bit_length()
