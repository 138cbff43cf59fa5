"""tcgen05.cp: copy a matrix from shared memory to some quarters of the lanes of tensor memory.

Elements of 4 and 6 bits, in chunks of 16 followed by padding, can be widened to a byte each.
Sources: PTX ISA, tcgen05.cp and its optional decompression; CUTLASS's copy traits
(cute/atom/copy_traits_sm100.hpp, UTCCP) for the lanes that the rows of a shape reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.tensor_core import widened
from ptxemu.machine.tmem import LANES, Tmem
from ptxemu.machine.umma_desc import SmemDesc, matrix_bytes


@dataclass(frozen=True)
class Fill:
    """Shape of a copy of rows to lanes of tensor memory.

    rows, nbytes: number of rows and bytes of each.
    run, stride: row r goes to lane r // run * stride + r % run.
    copies: lane offsets of the copies of each row.
    narrow: bits of the elements that are widened to a byte each; bytes are copied if it is 0.
    """

    rows: int
    nbytes: int
    run: int
    stride: int
    copies: tuple[int, ...] = (0,)
    narrow: int = 0

    @cached_property
    def matrix(self) -> tuple[int, int]:
        """Shape of the matrix in shared memory: (lines, bytes of a line)."""
        return self.rows, self.nbytes

    def lanes(self) -> np.ndarray:
        """Return the lane of each copy and row, intp."""
        return self._lanes

    @cached_property
    def _lanes(self) -> np.ndarray:
        row = np.arange(self.rows, dtype=np.intp)
        first = row // self.run * self.stride + row % self.run
        lanes = np.array(self.copies, np.intp)[:, None] + first
        lanes.flags.writeable = False
        return lanes

    @cached_property
    def last(self) -> int:
        """The largest lane."""
        return int(self._lanes[-1, -1])

    @cached_property
    def whole(self) -> bool:
        """Whether the copies, one behind the other, are all lanes."""
        return self.run == self.rows and self.copies == tuple(range(0, LANES, self.rows))

    def sources(self, codes: np.ndarray | None) -> np.ndarray | None:
        """Return the largest code of the source words of each word in tensor memory.

        codes: codes of the matrix's 32-bit words, [row, word].
        Padding is ignored. The result is None if all codes are 0.
        """
        if codes is None or not self.narrow:
            return codes
        first, last = _SOURCES[self.narrow]
        chunks = codes.reshape(self.rows, -1, 4)
        found = np.maximum(chunks[..., first], chunks[..., last]).reshape(codes.shape)
        return found if found.any() else None


# bits of an element -> of each word of a wide chunk the words of the narrow one that it comes from
_SOURCES = {4: ([0, 0, 1, 1], [0, 0, 1, 1]), 6: ([0, 0, 1, 2], [0, 1, 2, 2])}
NARROW = {"b4x16_p64": 4, "b6x16_p32": 6}  # source formats of a b8x16 destination

# (shape, multicast) of the instruction
SHAPES: dict[tuple[str, str], Fill] = {
    ("128x256b", ""): Fill(128, 32, 128, 0),
    ("128x128b", ""): Fill(128, 16, 128, 0),
    ("4x256b", ""): Fill(4, 32, 1, 32),
    ("64x128b", "warpx2::02_13"): Fill(64, 16, 64, 0, (0, 64)),
    ("64x128b", "warpx2::01_23"): Fill(64, 16, 32, 64, (0, 32)),
    ("32x128b", "warpx4"): Fill(32, 16, 32, 0, (0, 32, 64, 96)),
}


@lru_cache(maxsize=64)
def shape_of(name: str, multicast: str, source: str = "") -> Fill:
    """source: key of NARROW, or none."""
    return replace(SHAPES[name, multicast], narrow=NARROW.get(source, 0))


def read_matrix(smem: np.ndarray, desc: SmemDesc, shape: Fill) -> np.ndarray:
    """Return the words for tensor memory, uint32 (rows, nbytes / 4)."""
    image = matrix_bytes(smem, desc, shape.matrix)
    return (widened(shape.narrow, image) if shape.narrow else image).view(np.uint32)


def require_room(tmem: Tmem, address: int, shape: Fill) -> None:
    """Raise HardwareRefusal for columns that are not allocated, and past the last lane."""
    first = address >> 16
    if first + shape.last >= LANES:
        raise HardwareRefusal(f"tcgen05.cp of {shape.rows} rows to TMEM lane {first}")
    tmem.check(address & 0xFFFF, shape.nbytes // 4)


def fill(tmem: Tmem, address: int, shape: Fill, words: np.ndarray) -> None:
    """Write words, uint32 (rows, nbytes / 4), to the columns from the address on.

    Raises: as `require_room`.
    """
    require_room(tmem, address, shape)
    put(tmem, address, shape, words)


def put(tmem: Tmem, address: int, shape: Fill, words: np.ndarray) -> None:
    """Write the words to tensor memory; the columns are known to have room."""
    column, columns = address & 0xFFFF, shape.nbytes // 4
    cells = tmem.cells[column : column + columns]
    if shape.whole:
        cells.reshape(columns, -1, shape.rows)[...] = words.T[:, None, :]
    else:
        cells[:, (address >> 16) + shape.lanes()] = words.T[:, None, :]
