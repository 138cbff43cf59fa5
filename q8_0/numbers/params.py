"""Launch parameters of the product of numbers, word by word: see `kernelkit.device.param_table`.

Addresses and strides are in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.device.param_table import Word


@dataclass(frozen=True, kw_only=True)
class NumbersParams:
    """Operands and result; a bias where the config says so, else 0."""

    tokens: Word
    rows: Word
    blocks: Word  # of a row
    source: Word  # scales ('soa') or blocks ('interleaved')
    source_stride: Word  # between their rows
    out: Word
    out_stride: Word  # between tokens
    bias: Word
    token_tiles: Word
    row_tiles: Word  # of a cluster: one or two tiles of rows
    group: Word  # tiles of tokens that are neighbours in the walk
