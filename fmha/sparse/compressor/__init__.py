"""Compressors: one entry for the tokens of a window, and the rows that wait for theirs."""

from typing import TYPE_CHECKING

from kernelkit.exports import exports

if TYPE_CHECKING:
    from fmha.sparse.compressor.api import Compressor, Tables, compress

__all__ = ["Compressor", "Tables", "compress"]

__getattr__, __dir__ = exports(__name__, {
    "fmha.sparse.compressor.api": "Compressor Tables compress",
})  # fmt: skip
