"""The numbers of the format Q8_0, and where a matrix of its blocks lies in memory, as data.

A block is 32 neighbouring weights of a row: an fp16 scale d, little endian, and 32 int8 q; the
weight is d * q. GGUF stores blocks one behind the other, 34 bytes each: INTERLEAVED. Quants then
stand at 2-byte offsets. SOA has the quants of the whole matrix first, 16-byte aligned, and all
scales behind them.
"""

from __future__ import annotations

BLOCK = 32  # weights that share a scale
SCALE_BYTES = 2  # fp16
BLOCK_BYTES = SCALE_BYTES + BLOCK
ALIGN = 16  # of the buffer in SOA, for the widest access of a thread
INTERLEAVED, SOA = "interleaved", "soa"
LAYOUTS = (INTERLEAVED, SOA)
MAX_SIZE = (1 << 31) - 1  # rows, columns: kernels count both in 32 bits
LEVELS = 127  # the largest |q| of a rounded number; -128 is read like any other


def blocks_of(cols: int) -> int:
    """Blocks of a row; ValueError for a number of columns that no blocks have."""
    if cols < BLOCK or cols % BLOCK or cols > MAX_SIZE:
        raise ValueError(f"cols {cols}: a multiple of {BLOCK} from {BLOCK} to {MAX_SIZE}")
    return cols // BLOCK


def interleaved_bytes(cols: int) -> int:
    """Number of bytes of a row of blocks in GGUF's interleaved layout."""
    return blocks_of(cols) * BLOCK_BYTES


def scales_offset(rows: int, cols: int) -> int:
    """Offset in bytes of the scales in an SOA buffer."""
    return -(-rows * cols // ALIGN) * ALIGN


def soa_bytes(rows: int, cols: int) -> int:
    """Number of bytes of an SOA buffer: quants [rows, cols], then scales [rows, cols / 32]."""
    return scales_offset(rows, cols) + rows * blocks_of(cols) * SCALE_BYTES
