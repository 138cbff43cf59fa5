"""Configuration of the launch, its CTAs, and the words that it is launched with.

The grid has the CTAs of each part after those of the part before. All CTAs have the threads, and
all clusters the CTAs, of the part with the most; threads and CTAs that a part has no use for leave
at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernelkit.device.param_table import Word
from kvcache.movement.config import AppendConfig, AppendParams
from mla.compressor.config import WalkConfig, WindowConfig
from mla.compressor.params import CompressParams
from mla.glue.config import GlueConfig, GlueParams
from mla.indexer.params import QueryParams
from mla.indexer.query_config import QueryConfig

CompressorConfig = WindowConfig | WalkConfig
PartConfig = CompressorConfig | QueryConfig | GlueConfig | AppendConfig


@dataclass(frozen=True)
class PrepareConfig:
    """The parts of a launch, at least one of them, each as its own launch has it."""

    entries: WindowConfig | WalkConfig | None
    index_keys: WindowConfig | WalkConfig | None
    index_queries: QueryConfig | None
    queries: GlueConfig | None
    window: AppendConfig | None

    @property
    def compressors(self) -> list[CompressorConfig]:
        """The compressors."""
        return [part for part in (self.entries, self.index_keys) if part is not None]

    @property
    def parts(self) -> list[PartConfig]:
        """All parts."""
        rows = (self.index_queries, self.queries, self.window)
        return [*self.compressors, *(part for part in rows if part is not None)]

    @property
    def threads(self) -> int:
        """The threads of a CTA."""
        return max(part.threads for part in self.parts)

    @property
    def slices(self) -> int:
        """The CTAs of a cluster."""
        return max((part.slices for part in self.compressors), default=1)

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM at a time for which registers suffice, 0 if ptxas decides."""
        return min((part.ctas_per_sm for part in self.compressors), default=0)

    def refused(self) -> str | None:
        """Return why these parts cannot share a launch, None if they can."""
        for part in self.compressors:
            if part.syncs and part.threads != self.threads:
                return f"compressors of {part.threads} and {self.threads} threads"
            if part.slices not in (1, self.slices):
                return f"compressors with clusters of {part.slices} and {self.slices} CTAs"
        return None

    def ranges(self, ctas: Sequence[int]) -> tuple[list[Ctas], int]:
        """Return the CTAs of each part, and their number in all. ctas: those that each needs."""
        ranges, end = [], 0
        for count in ctas:
            ranges.append(Ctas(begin=end, count=count))
            end += -(-count // self.slices) * self.slices  # a cluster has CTAs of one part only
        return ranges, end


@dataclass(frozen=True, kw_only=True)
class Ctas:
    """The CTAs of a part: `count` of them from `begin` on."""

    begin: Word
    count: Word


@dataclass(frozen=True, kw_only=True)
class PrepareParams:
    """Parameters of `kernel.Prepare`; zeros for parts that are not there."""

    entries_ctas: Ctas
    index_keys_ctas: Ctas
    index_queries_ctas: Ctas
    queries_ctas: Ctas
    window_ctas: Ctas
    entries: CompressParams
    index_keys: CompressParams
    index_queries: QueryParams
    queries: GlueParams
    window: AppendParams
