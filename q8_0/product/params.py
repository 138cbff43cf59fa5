"""Launch parameters of the product's kernel, word by word: see `kernelkit.device.param_table`.

Addresses and strides are in bytes. Rows of quants and of scales, if separate, are contiguous, so
the number of blocks gives their strides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelkit.device.param_table import Word
from q8_0.blocks import SOA, scales_offset

if TYPE_CHECKING:
    from q8_0.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Rows in one piece."""

    address: Word
    rows: Word  # how many


@dataclass(frozen=True, kw_only=True)
class WeightMatrix:
    """Weights of either layout."""

    quants: Matrix  # or blocks
    scales: Matrix  # that are apart; interleaved the blocks again, which nobody reads there
    stride: Word  # between rows of blocks
    end: Word  # address after the last row

    @classmethod
    def of(cls, weights: Weights) -> WeightMatrix:
        """Return the matrix of a handle."""
        rows, data = weights.rows, weights.data
        begin = scales_offset(rows, weights.cols) if weights.layout == SOA else 0
        last = data.shape[-1] + (rows - 1) * data.stride(0) if data.ndim > 1 else data.shape[0]
        return cls(
            quants=Matrix(address=data, rows=rows),
            scales=Matrix(address=(data, begin), rows=rows),
            stride=weights.row_stride,
            end=(data, last),
        )


@dataclass(frozen=True, kw_only=True)
class ProductParams:
    """The operands and the result; a bias where the config says so, else 0."""

    x: Matrix  # quants of tokens
    x_scales: Matrix
    w: WeightMatrix
    out: Word
    out_stride: Word
    bias: Word
    blocks: Word  # of a row
    group: Word  # tiles of tokens that are neighbours in the grid
