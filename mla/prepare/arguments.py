"""Arguments of the operator `mla_prepare_attention`: those of the calls that it replaces.

Pools are in one sequence without repetition, and parts have numbers of pools. Tables that all parts
read are there once: torch allows an operator 64 arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kvcache.layouts.latent import LATENTS
from kvcache.layouts.layout import Tail
from kvcache.layouts.rows import Rows, TailRows
from kvcache.movement.arguments import (
    AppendSwa,
    Spans,
    require_apart,
    spans_of,
    written_by,
    written_by_tail,
)
from mla.compressor.arguments import Compressor, Job, Tables
from mla.compressor.arguments import check as check_job
from mla.glue.arguments import Arguments as Between
from mla.glue.arguments import QueryHeads
from mla.indexer.formats import FORMATS, WIDTH
from mla.indexer.query_launch import Query
from mla.indexer.query_launch import check as check_query

Pools = tuple[torch.Tensor, ...]
SHARED = ("positions", "owners", "starts", "cu_tokens", "state_slots")  # tables of a step
RECORDS = {name: latent.record for name, latent in LATENTS.items()}
RECORDS |= {name: form.record for name, form in FORMATS.items()}
ELEMENTS = {name: latent.elements for name, latent in LATENTS.items()} | dict.fromkeys(
    FORMATS, WIDTH
)


@dataclass(frozen=True)
class Place:
    """`kvcache.Rows` with the number of its pool and the name of its record, one of RECORDS."""

    pool: int
    data_offset: int
    scale_offset: int
    rows: int
    record: str

    def of(self, pools: Pools) -> Rows:
        """Return the rows."""
        places = self.data_offset, self.scale_offset, self.rows
        return Rows(pools[self.pool], *places, RECORDS[self.record])


@dataclass(frozen=True)
class TailPlace:
    """`kvcache.TailRows` with the number of its pool, and the fields of its `Tail` that a kernel
    needs. depth: its rows; `tail_rows` is another argument of a part."""

    pool: int
    offset: int
    depth: int
    ratio: int
    overlap: int
    online: bool

    def of(self, pools: Pools, width: int) -> TailRows:
        """Return the rows of the tail. width: the elements of an entry."""
        windows = {"overlap": self.overlap, "online": self.online}
        tail = Tail("tail", self.ratio, width, copies=1, **windows)
        return TailRows(pools[self.pool], self.offset, self.depth, tail)


@dataclass(frozen=True)
class StreamPart:
    """`api.Compression`, without the tables that parts share."""

    compressor: Compressor
    values: torch.Tensor
    scores: torch.Tensor
    ends: torch.Tensor
    tail_rows: torch.Tensor
    entries: torch.Tensor
    tail: TailPlace
    out: Place


@dataclass(frozen=True)
class QueryPart:
    """`api.IndexQueries`."""

    q: torch.Tensor
    weights: torch.Tensor
    record: str = "indexer_fp4"
    factor: float = 1.0


@dataclass(frozen=True)
class WindowPart:
    """`api.WindowKeys`."""

    kv: torch.Tensor
    slots: torch.Tensor
    rows: Place


@dataclass(frozen=True)
class Arguments:
    """Arguments of the operator; `mla.prepare_attention` explains them."""

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    pools: tuple[torch.Tensor, ...]
    owners: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    cu_tokens: torch.Tensor | None = None
    state_slots: torch.Tensor | None = None
    entries: StreamPart | None = None
    index_keys: StreamPart | None = None
    index_queries: QueryPart | None = None
    queries: QueryHeads | None = None
    window: WindowPart | None = None
    longest: int | None = None
    backend: str = "auto"
    arch: str | None = None

    @cached_property
    def jobs(self) -> dict[str, Job]:
        """Arguments of `compress` for each compressor, by the name of the part."""
        parts = {"entries": self.entries, "index_keys": self.index_keys}
        return {name: self._job(part) for name, part in parts.items() if part is not None}

    def _job(self, part: StreamPart) -> Job:
        out, width = part.out.of(self.pools), ELEMENTS[part.out.record]
        tail = part.tail.of(self.pools, width)
        shared = {name: getattr(self, name) for name in SHARED}
        own = {name: getattr(part, name) for name in ("ends", "tail_rows", "entries")}
        rows = part.values, part.scores, Tables(**shared, **own)
        return Job(part.compressor, tail, out, *rows, self.cos, self.sin, self.longest)

    @cached_property
    def query(self) -> Query | None:
        """Arguments of `prepare_query`."""
        part = self.index_queries
        if part is None:
            return None
        shared = self.positions, self.cos, self.sin
        return Query(part.q, part.weights, *shared, part.record, part.factor)

    @cached_property
    def heads(self) -> Between | None:
        """Arguments of `norm_rope_append`."""
        if self.queries is None:
            return None
        return Between(self.positions, self.cos, self.sin, queries=self.queries)

    @cached_property
    def append(self) -> AppendSwa | None:
        """Arguments of `append_swa`."""
        part = self.window
        if part is None:
            return None
        rows = part.rows.of(self.pools)
        return AppendSwa(rows, part.kv, self.positions, part.slots, self.cos, self.sin)

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        jobs, query, heads, append = self.jobs, self.query, self.heads, self.append
        if not jobs and query is None and heads is None and append is None:
            raise ValueError(
                "nothing to do: give entries, index_keys, index_queries, queries or window"
            )
        for job in jobs.values():
            check_job(job)
        if query is not None:
            check_query(query)
        if heads is not None:
            heads.check()
        if append is not None:
            append.check()
        self._check_memory(jobs, append)

    def _check_memory(self, jobs: dict[str, Job], append: AppendSwa | None) -> None:
        """Raise ValueError for memory that one part writes, and another one reads or writes."""
        read = {"positions": self.positions, "cos": self.cos, "sin": self.sin}
        written: dict[str, Spans] = {}
        for name, job in jobs.items():
            read |= {f"{name}.values": job.values, f"{name}.scores": job.scores}
            read |= {f"{name}.ape": job.compressor.ape, f"{name}.weight": job.compressor.weight}
            read |= {f"{name}.{table}": given for table, given in job.tables.named.items()}
            written[f"{name}.out"] = written_by(job.out)
            written[f"{name}.tail"] = written_by_tail(job.tail)
        if self.index_queries is not None:
            read["index_queries.q"] = self.index_queries.q
            read["index_queries.weights"] = self.index_queries.weights
        if append is not None:
            read |= {"window.kv": append.kv, "window.slots": append.slots}
            written["window.rows"] = written_by(append.rows)
        spans = {name: spans_of(tensor) for name, tensor in read.items()}
        if self.queries is not None:
            # `Between` has compared what its own part reads and writes.
            heads = spans_of(self.queries.out)
            require_apart(spans | written, {"queries.out": heads})
            spans["queries.q"] = spans_of(self.queries.read)
        require_apart(spans, written)
