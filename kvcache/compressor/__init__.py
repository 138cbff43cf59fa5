"""Compressors: one entry for the tokens of a window, and the rows that wait for theirs."""

from kvcache.compressor.api import Compressor, Tables, compress

__all__ = ["Compressor", "Tables", "compress"]
