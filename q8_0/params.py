"""Launch parameters of the kernels, word by word: see `kernelkit.device.param_table`.

Addresses and strides are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelkit.device.param_table import Word
from q8_0.blocks import SCALE_BYTES, SOA, scales_offset

if TYPE_CHECKING:
    from q8_0.weights import Weights


@dataclass(frozen=True, kw_only=True)
class WeightWords:
    """Addresses of quants and scales. If interleaved, a block's scale precedes its quants, and both
    addresses are that of the first block."""

    quants: Word
    stride: Word  # between rows of quants, or of blocks
    scales: Word
    scale_stride: Word  # between rows of scales
    rows: Word
    cols: Word

    @classmethod
    def of(cls, weights: Weights, *, flat: bool = False) -> WeightWords:
        """Return the words of a handle; `flat` treats all its rows, which are contiguous, as one
        row."""
        rows, cols, stride = weights.rows, weights.cols, weights.row_stride
        if flat:
            rows, cols, stride = 1, rows * cols, rows * stride
        begin, scale_stride = 0, stride
        if weights.layout == SOA:
            begin = scales_offset(weights.rows, weights.cols)
            scale_stride = weights.blocks * SCALE_BYTES
        return cls(
            quants=weights.data,
            stride=stride,
            scales=(weights.data, begin),
            scale_stride=scale_stride,
            rows=rows,
            cols=cols,
        )


@dataclass(frozen=True, kw_only=True)
class RepackParams:
    """`repack_kernel.Repack`: from one layout to the other."""

    blocks: WeightWords  # interleaved
    arrays: WeightWords  # soa
    tiles: Word  # of a row


@dataclass(frozen=True, kw_only=True)
class DequantiseParams:
    """`dequantise_kernel.Dequantise`: weights as numbers."""

    weights: WeightWords
    out: Word
    out_stride: Word  # between rows
    tiles: Word  # of a row


@dataclass(frozen=True, kw_only=True)
class QuantiseParams:
    """`quantise_kernel.Quantise`: rows of numbers to `q8_0.activations.Activations`."""

    x: Word
    x_stride: Word  # between tokens
    quants: Word
    scales: Word
    cols: Word
    tiles: Word  # of a token


@dataclass(frozen=True, kw_only=True)
class MatvecParams:
    """`matvec_kernel.Matvec`: a few tokens times the weights; scales of x and a bias where the
    config says so, else 0."""

    weights: WeightWords
    x: Word
    x_stride: Word  # between tokens
    x_scales: Word
    x_scale_stride: Word
    tokens: Word
    out: Word
    out_stride: Word
    bias: Word
