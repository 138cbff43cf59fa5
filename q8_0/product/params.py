"""What the product's kernel is launched with, word by word: see `kernelkit.param_table`.

Addresses, strides and sizes are in bytes unless a comment says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.param_table import Word


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """Rows of something."""

    address: Word
    stride: Word  # between rows
    rows: Word  # how many


@dataclass(frozen=True, kw_only=True)
class ProductParams:
    """The operands and the result."""

    x: Matrix  # quants of tokens
    x_scales: Matrix
    w: Matrix  # quants of rows of the weights, or their blocks
    w_scales: Matrix  # of interleaved weights the weights again, which nobody reads there
    w_end: Word  # address behind the weights
    out: Matrix
    blocks: Word  # of a row
    group: Word  # tiles of tokens that are neighbours in the grid
