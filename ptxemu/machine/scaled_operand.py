"""An operand of a block-scaled MMA, decoded and multiplied with its scale factors at once, where
there is machine code and nothing is out of the ordinary. `mma` says what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ptxemu.machine.operand_format import FORMATS
from ptxemu.machine.scale_factors import LARGEST, VALUES, Placement
from ptxemu.machine.tmem import Tmem
from ptxemu.machine.umma_desc import SmemDesc, image_of
from ptxemu.native import operands as native
from ptxemu.native.library import compiled

_ELEMENTS = {"packed e2m1": 2, "e4m3": 1, "e5m2": 1}  # formats, and elements of a byte

_frame = np.zeros(native.FRAME, np.int64)
_FRAME_AT = _frame.ctypes.data
_WORDS = _frame.data  # quicker to fill than an array


class Factors(NamedTuple):
    """Where an operand's scale factors are, how many a row has, the byte of the first one, and
    their format."""

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


def scaled_operand(
    memories: Sequence[np.ndarray],
    desc: SmemDesc,
    shape: tuple[int, int, str, bool],
    tmem: Tmem,
    factors: Factors,
) -> np.ndarray | None:
    """float32 (rows of all memories, k), or None where `mma` has to do it step by step.

    memories: shared memory of each CTA that has part of the rows, uint8. shape: of such a part:
    rows, k, format, MN-major?
    """
    rows, k, fmt, mn_major = shape
    routine, packed = compiled(native.scaled_operand), _ELEMENTS.get(fmt)
    column, columns = factors.where.columns()
    if routine is None or packed is None or mn_major or not tmem.holds(column, columns):
        return None
    image = image_of(desc, shape)
    words, table = image.words.shape[1], _table(fmt, factors.fmt)
    out = np.empty((rows * len(memories), k), np.float32)
    place, frame = out.ctypes.data, _WORDS
    frame[native.INDEX], frame[native.ROWS] = image.words.ctypes.data, rows
    frame[native.WORDS], frame[native.BLOCK] = words, words // factors.blocks
    frame[native.PACKED], frame[native.BYTE] = packed, factors.first
    frame[native.CELLS] = tmem.cells[column:].ctypes.data
    frame[native.PARTS] = factors.where.parts
    frame[native.PER_PART] = factors.where.rows // factors.where.parts
    frame[native.TABLE], frame[native.LARGE] = table.products, table.large
    for number, smem in enumerate(memories):
        if image.end > len(smem) // 8:
            return None
        frame[native.SMEM], frame[native.FIRST] = smem.ctypes.data, number * rows
        frame[native.OUT] = place + number * rows * k * 4
        if routine(_FRAME_AT):
            return None
    return out
