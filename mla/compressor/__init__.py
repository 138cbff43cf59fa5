"""Compressors: one entry for the tokens of a window, and the rows that wait for theirs."""

from typing import TYPE_CHECKING

from kernelkit.call.exports import exports

if TYPE_CHECKING:
    from mla.compressor.api import Compressor, Tables, compress

__all__ = ["Compressor", "Tables", "compress"]

exports(__name__, {
    "mla.compressor.api": "Compressor Tables compress",
})  # fmt: skip
