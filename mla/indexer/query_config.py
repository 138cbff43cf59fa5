"""Compile-time configuration of the kernels of the indexer's queries."""

from __future__ import annotations

from dataclasses import dataclass

from mla.indexer.formats import FORMATS, LANES, PLAIN, IndexFormat, Rotation


@dataclass(frozen=True)
class QueryConfig:
    """Configuration of a query kernel.

    record: a name of mla.indexer.formats.FORMATS.
    dtype, weights: 'bf16' or 'fp32'.
    """

    record: str
    dtype: str
    weights: str
    rotation: Rotation = PLAIN
    threads: int = 128

    @property
    def form(self) -> IndexFormat:
        """Format named by `record`."""
        return FORMATS[self.record]

    @property
    def rows(self) -> int:
        """Number of rows that a CTA processes at a time."""
        return self.threads // LANES
