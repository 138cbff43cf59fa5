"""Bytes and cells as the matrices that they are: element types, swizzles, tensor memory."""

from __future__ import annotations

import numpy as np

from ptxemu.machine.tensor_map import TensorMap
from ptxemu.numerics.formats import ELEMENTS, decoded
from ptxemu.numerics.swizzle import Swizzle


def block_positions(
    start: int, rows: int, row_bytes: int, swizzle: Swizzle, pitch: int = 0
) -> np.ndarray:
    """Where each byte of a matrix lies in shared memory, intp [row, byte].

    pitch: bytes from one row to the next; 0: the rows lie one behind the other. Rows longer than
    the swizzle's span are cut into blocks of it, each of which holds all rows.
    """
    width = min(row_bytes, swizzle.span) if swizzle.bits else row_bytes
    byte = np.arange(row_bytes, dtype=np.intp)
    step = pitch or width
    block, within = byte // width, byte % width
    row = np.arange(rows, dtype=np.intp)[:, None]
    return swizzle.apply(start + block * rows * step + row * step + within)


def tile_positions(tm: TensorMap, start: int) -> np.ndarray:
    """The same of a box that TMA moves, [row, byte]; dimension 1 of the box is the fastest row."""
    return block_positions(start, tm.rows, tm.smem_row_bytes, tm.swizzle, tm.pitch)


def tile_dtype(tm: TensorMap) -> str:
    """The element type in shared memory; packed 4- and 6-bit types are shown as bytes."""
    return tm.dtype if tm.dtype in ELEMENTS else "u8"


def tile_shape(tm: TensorMap) -> tuple[int, ...]:
    """Of the box as a tensor of `tile_dtype`, the contiguous dimension last."""
    size, _ = ELEMENTS[tile_dtype(tm)]
    return (*reversed(tm.box[1:]), tm.smem_row_bytes // size)


def tensor_memory(cells: np.ndarray, dtype: str) -> np.ndarray:
    """Cells [column, lane] as float32 [lane, element]: one f32 to a cell, or two bf16 or f16."""
    lanes = np.ascontiguousarray(cells.T)
    return decoded(lanes.view(np.uint8), dtype)


def text_of(matrix: np.ndarray, title: str) -> str:
    """A matrix as lines, its rows numbered; leading dimensions are told in front of the row."""
    rows = matrix.reshape(-1, matrix.shape[-1]) if matrix.ndim > 1 else matrix.reshape(1, -1)
    outer = matrix.shape[:-1]
    form = _number if rows.dtype.kind == "f" else str
    lines = [f"{title}: shape {tuple(matrix.shape)}"]
    for index, row in enumerate(rows):
        place = ",".join(map(str, np.unravel_index(index, outer))) if outer else "0"
        lines.append(f"[{place:>5}] " + " ".join(f"{form(value):>9}" for value in row.tolist()))
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.4g}"
