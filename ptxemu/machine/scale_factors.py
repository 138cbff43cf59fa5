"""Scale factors of block-scaled MMAs: one byte for every block of a row along K, in tensor memory.

Row r of A or B has its bytes in lane r % 32 of column r / 32. The scale id names the first byte,
and there are as many bytes as blocks along the K of one MMA. Every quarter of the lanes holds a
copy. Each CTA of a pair has the factors of its rows of A, and of all rows of B.
With M = 128 for a pair, the lower half of the lanes has the columns of D below N / 2, the upper
half the others. Each half has the scale factors of its rows of B in both of its quarters. The rows
are counted from the first one of the half.
Sources: PTX ISA, tcgen05 "Block Scaling"; CUTLASS's `tmem_sf_frg` (ScaleFactorDuplicated4by1 and
2by2, cute/atom/mma_traits_sm100_frag.hpp); CUTLASS's block-scaled kernels for lane and column of
a row, and primitives/tcgen05/2cta_mma_blockscale_m128.py; TVM's test of M = 128, N = 32 on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tensor_core import FORMATS
from ptxemu.machine.tmem import LANES, Tmem
from ptxemu.machine.umma_desc import InstrDesc, SmemDesc, image_of
from ptxemu.native import operands as native
from ptxemu.numerics import formats

QUARTER = 32  # lanes of one copy
_ADDRESS_BITS = 0x3FFF_FFFF  # CUTLASS keeps the scale id in the two bits above them
LARGEST = 2.0**64  # an element times a scale factor beyond this may be too large for float32
_CODES = np.arange(256, dtype=np.uint8)
VALUES = {  # of every code
    "ue8m0": formats.ue8m0_to_f32(_CODES),
    "ue4m3": formats.e4m3_to_f32(_CODES & 0x7F),
}
# (kind, blocks along K) -> formats of the scale factors
_FORMATS = {
    ("mxf8f6f4", 1): ("ue8m0",),
    ("mxf4", 2): ("ue8m0",),
    ("mxf4nvf4", 2): ("ue8m0",),
    ("mxf4nvf4", 4): ("ue8m0", "ue4m3"),
}


class Placement(NamedTuple):
    """Place of an operand's scale factors in the tensor memory of one CTA.

    parts: number of consecutive parts of the rows, each with an equal share of the lanes.
    """

    address: int
    rows: int
    parts: int = 1

    def columns(self) -> tuple[int, int]:
        """Return (first column, number of columns)."""
        address = self.address & _ADDRESS_BITS
        if address >> 16:
            raise HardwareRefusal(f"scale factors at TMEM lane {address >> 16}, must be 0")
        return address & 0xFFFF, -(-self.rows // (self.parts * QUARTER))

    def copies(self, cells: np.ndarray) -> np.ndarray:
        """Return the copies of each row, (copies, rows), from cells [column, lane] of these
        columns."""
        return cells.reshape(-1).take(_cells_of(self.rows, self.parts))


@lru_cache(maxsize=256)
def _cells_of(rows: int, parts: int) -> np.ndarray:
    """Flat cells of the copies of each row, intp (copies, rows), from the first column on."""
    quarters, columns = LANES // QUARTER // parts, -(-rows // (parts * QUARTER))
    cells = np.arange(columns * LANES, dtype=np.intp)
    lanes = cells.reshape(columns, parts, quarters, QUARTER).transpose(2, 1, 0, 3)
    return lanes.reshape(quarters, parts, -1)[:, :, : rows // parts].reshape(quarters, rows)


class Scales(NamedTuple):
    """TMEM addresses of the scale factors of A and B, and the number of blocks.

    a: TMEM address for A.
    b: TMEM address for B.
    blocks: number of blocks of a row along K of one MMA.
    """

    a: int
    b: int
    blocks: int

    def placements(self, idesc: InstrDesc, cta_group: int) -> tuple[Placement, Placement]:
        """Return the placements for A and B."""
        rows = idesc.m // cta_group
        halves = 2 * rows == LANES
        return Placement(self.a, rows), Placement(self.b, idesc.n, 2 if halves else 1)


def require_scales(idesc: InstrDesc, scales: Scales | None) -> None:
    """Refuse block sizes, formats and scale ids that a kind does not have."""
    if (scales is None) != (idesc.scale_format is None):
        has = "without" if scales is None else "with"
        raise HardwareRefusal(f"kind::{idesc.kind} {has} scale factors")
    if scales is None:
        return
    allowed = _FORMATS.get((idesc.kind, scales.blocks))
    if allowed is None:
        raise HardwareRefusal(f"kind::{idesc.kind} with {scales.blocks} scale factors per row")
    if idesc.scale_format not in allowed:
        raise HardwareRefusal(
            f"kind::{idesc.kind} with {scales.blocks} scale factors per row in"
            f" {idesc.scale_format}, must be one of {allowed}"
        )
    for name, first in (("A", idesc.a_scale_id), ("B", idesc.b_scale_id)):
        if first % scales.blocks:
            raise HardwareRefusal(
                f"scale id {first} of {name}, must be a multiple of {scales.blocks} scale factors"
                " per row"
            )


def read_scales(tmem: Tmem, where: Placement, blocks: int, first: int, fmt: str) -> np.ndarray:
    """Return the scale factors as float32 (rows, blocks); first: byte of the first one.

    Raises UnsupportedPtx if quarters of the lanes that hold the same rows differ: it is unknown
    which MMA reads which quarter.
    """
    column, columns = where.columns()
    tmem.check(column, columns)
    copies = where.copies(tmem.cells[column : column + columns])
    if (copies[1:] != copies[0]).any():
        raise UnsupportedPtx(
            f"scale factors in TMEM column {column:#x} differ between the quarters of the lanes"
            " that hold the same rows"
        )
    codes = copies[0].view(np.uint8).reshape(where.rows, 4)
    return VALUES[fmt].take(codes[:, first : first + blocks])


def scaled(operand: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return every block of a row times its scale factor, exact, (rows, k).

    The result is float32, or float64 if float32 may overflow: the other operand's scale factor
    can compensate.
    """
    rows, blocks = scales.shape
    if np.fmax.reduce(scales, axis=None) > LARGEST:
        scales = scales.astype(np.float64)
    return (operand.reshape(rows, blocks, -1) * scales[:, :, None]).reshape(operand.shape)


# An operand of a block-scaled MMA, decoded and multiplied with its scale factors at once, where
# there is machine code and nothing is out of the ordinary, for `machine.quick_mma`.

ELEMENTS = {"packed e2m1": 2, "e4m3": 1, "e5m2": 1}  # formats, and elements of a byte


class Factors(NamedTuple):
    """Scale factors of one operand.

    where: their place.
    blocks: number of factors of a row.
    first: byte of the first one.
    fmt: their format.
    """

    where: Placement
    blocks: int
    first: int
    fmt: str


class _Table(NamedTuple):
    """Addresses of what a byte times a scale factor is, by the code of that and the byte, and of a
    byte for each code: whether such products may be too large for float32."""

    products: int
    large: int
    arrays: tuple[np.ndarray, ...]


@lru_cache(maxsize=16)
def _table(fmt: str, scale_format: str) -> _Table:
    values = FORMATS[fmt].decode(np.arange(256, dtype=np.uint8)[:, None])
    factors = VALUES[scale_format]
    with np.errstate(all="ignore"):
        products = np.ascontiguousarray(values[None] * factors[:, None, None])
        large = (factors > LARGEST).astype(np.uint8)
    return _Table(products.ctypes.data, large.ctypes.data, (products, large))


class SharedMemory(Protocol):
    """Shared memory of a CTA, uint8 (bytes,), and its address."""

    smem: np.ndarray
    smem_at: int


class ScaledPart:
    """The rows of a block-scaled operand that one CTA has, to be read again and again."""

    __slots__ = ("_frame", "_address", "_end", "_column", "_columns", "_large", "_kept")

    def __init__(
        self,
        desc: SmemDesc,
        form: tuple[int, int, str, bool],
        factors: Factors,
        out: tuple[int, int, int],
        number: int,
    ) -> None:
        """Prepare to read.

        Args:
            desc: descriptor of the operand.
            form: rows of the part, k, format, whether MN-major, which it must not be.
            factors: the scale factors.
            out: address of the float32 of the first row of all parts, and how many of them lie
                between those of neighbours in k and of neighbouring rows.
            number: of the part.
        """
        rows, _, fmt, _ = form
        image, table = image_of(desc, form), _table(fmt, factors.fmt)
        words = image.words.shape[1]
        frame = np.zeros(native.FRAME, np.int64)
        frame[native.OUT], frame[native.K_STEP], frame[native.ROW_STEP] = out
        frame[native.INDEX], frame[native.ROWS] = image.words.ctypes.data, rows
        frame[native.FIRST], frame[native.WORDS] = number * rows, words
        frame[native.BLOCK], frame[native.PACKED] = words // factors.blocks, ELEMENTS[fmt]
        frame[native.BYTE], frame[native.PARTS] = factors.first, factors.where.parts
        frame[native.PER_PART] = factors.where.rows // factors.where.parts
        frame[native.TABLE], frame[native.LARGE] = table.products, table.large
        self._frame, self._address = frame.data, frame.ctypes.data
        self._end = image.end
        self._column, self._columns = factors.where.columns()
        self._kept = frame, image, table

    def read(self, routine: Callable[[int], int], memory: SharedMemory, tmem: Tmem) -> bool:
        """Write the rows times their scale factors; return False where Python has to look."""
        if self._end > len(memory.smem) >> 3 or not tmem.holds(self._column, self._columns):
            return False
        self._frame[native.SMEM] = memory.smem_at
        self._frame[native.CELLS] = tmem.cells_at + 4 * LANES * self._column
        return not routine(self._address)
