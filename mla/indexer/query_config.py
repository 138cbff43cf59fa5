"""What a kernel of the indexer's queries is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from mla.indexer.formats import FORMATS, LANES, IndexFormat


@dataclass(frozen=True)
class QueryConfig:
    """record: a name of mla.indexer.formats.FORMATS. dtype, weights: 'bf16' or 'fp32'."""

    record: str
    dtype: str
    weights: str
    threads: int = 128

    @property
    def form(self) -> IndexFormat:
        """What `record` names."""
        return FORMATS[self.record]

    @property
    def rows(self) -> int:
        """That a CTA has at a time."""
        return self.threads // LANES
