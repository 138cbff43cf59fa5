"""Arguments of a compressor call, and the checks of their values and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernelkit.call.tensors import (
    require_rank,
    require_table,
    require_tensors,
    require_tma,
    require_types,
)
from kernelkit.plan.limits import FLT_MAX
from kvcache.books.step import ENDS_OF, ROWS_OF
from kvcache.checks import require
from kvcache.layouts.layout import Tail
from kvcache.layouts.rows import Rows, TailRows, check_mapping, check_range
from kvcache.movement.arguments import (
    check_angles,
    require_apart,
    require_once,
    spans_of,
    written_by,
)
from mla.compressor.config import RECORDS, EntryConfig, refused


@dataclass(frozen=True)
class Compressor:
    """Weights of a compressor; its ratio, overlap and width are those of its tail.

    ape: fp32 [ratio, overlap * width], added to the scores of a token by its place in the window.
    weight: fp32 [width], weight of the RMSNorm.
    eps: epsilon of the RMSNorm.
    """

    ape: torch.Tensor
    weight: torch.Tensor
    eps: float = 1e-6


@dataclass(frozen=True)
class Tables:
    """The tables of a step (`kvcache.books.step.Step`) of T tokens, B requests and E ends.

    positions: int64 [T], the position of each token.
    owners: int32 [T], the request of each token.
    starts: int32 [B], the position of the first token of each request.
    cu_tokens: int32 [B + 1], the index of the first token of each request.
    state_slots: int32 [B], the slot of each request's tail, or -1.
    ends: int32 [E], tokens that complete an entry, -1 for padding.
    tail_rows: int64 [T], the row of the tail that keeps each token, or -1.
    entries: int64 [T], the entry of the stream that each token completes, or -1.
    """

    positions: torch.Tensor
    owners: torch.Tensor
    starts: torch.Tensor
    cu_tokens: torch.Tensor
    state_slots: torch.Tensor
    ends: torch.Tensor
    tail_rows: torch.Tensor
    entries: torch.Tensor

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor], stream: str, tail: str) -> Tables:
        """The tables in `Step.tensors` for a stream and the tail of its compressor."""
        plain = ("positions", "owners", "starts", "cu_tokens", "state_slots")
        require("tensors", tensors, Mapping)
        require("stream", stream, str)
        require("tail", tail, str)
        names = (*plain, f"{ENDS_OF}{stream}", f"{ROWS_OF}{tail}", f"{ROWS_OF}{stream}")
        missing = [name for name in names if name not in tensors]
        if missing:
            raise ValueError(f"no tables {missing}: there are {', '.join(map(str, tensors))}")
        require_types(**{name: tensors[name] for name in names})
        return Tables(*(tensors[name] for name in names))

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """The tables by name, in the order of the fields."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Job:
    """All arguments of `mla.compressor.api.compress`."""

    compressor: Compressor
    tail: TailRows
    out: Rows
    values: torch.Tensor
    scores: torch.Tensor
    tables: Tables
    cos: torch.Tensor
    sin: torch.Tensor
    longest: int | None = None

    @property
    def entry(self) -> EntryConfig:
        """The shape and the record of an entry."""
        tail = self.tail.tail
        return EntryConfig(self.out.record.name, tail.ratio, tail.overlap, tail.width)

    @property
    def tokens(self) -> int:
        """The number of tokens of the step."""
        return len(self.values)


@dataclass(frozen=True)
class Compress:
    """Operator arguments of a compressor call, with the fields of its `Tail` that it needs."""

    compressor: Compressor
    tail_pool: torch.Tensor
    tail_offset: int
    tail_rows: int
    ratio: int
    width: int
    overlap: int
    online: bool
    out: Rows
    values: torch.Tensor
    scores: torch.Tensor
    tables: Tables
    cos: torch.Tensor
    sin: torch.Tensor
    longest: int | None = None
    backend: str = "auto"
    arch: str | None = None

    @property
    def job(self) -> Job:
        """All arguments, grouped into their parts."""
        windows = {"overlap": self.overlap, "online": self.online}
        tail = Tail("tail", self.ratio, self.width, copies=1, **windows)
        rows = TailRows(self.tail_pool, self.tail_offset, self.tail_rows, tail)
        shared = ("compressor", "out", "values", "scores", "tables", "cos", "sin", "longest")
        return Job(tail=rows, **{name: getattr(self, name) for name in shared})


def check(job: Job) -> None:
    """Raise TypeError, ValueError or NotImplementedError for arguments that no kernel supports."""
    compressor, tail, out = job.compressor, job.tail, job.out
    floats = {"values": job.values, "scores": job.scores}
    weights = {"ape": compressor.ape, "weight": compressor.weight}
    pools = {"tail pool": tail.pool, "pool": out.pool}
    require_tensors(**pools, **floats, **weights, cos=job.cos, sin=job.sin, **job.tables.named)
    if out.record.name not in RECORDS:
        raise NotImplementedError(f"record {out.record.name}: supported are {[*RECORDS]}")
    tail.check()
    out.check()
    reason = refused(job.entry, online=tail.tail.online)
    if reason:
        raise NotImplementedError(reason)
    _check_scales(out)
    columns, layer = job.entry.columns, tail.tail
    for name, tensor in floats.items():
        require_rank(name, tensor, "[T, columns]")
        require_table(name, tensor, torch.float32, (job.tokens, columns))
        require_tma(name, tensor)
    require_table("ape", compressor.ape, torch.float32, (layer.ratio, columns))
    require_table("weight", compressor.weight, torch.float32, (layer.width,))
    for name, tensor in weights.items():
        require_tma(name, tensor)
    check_angles(job.cos, job.sin)
    if not 0 <= compressor.eps <= FLT_MAX:
        raise ValueError(f"eps {compressor.eps}: from 0 to {FLT_MAX:.4g} (fp32)")
    _check_tables(job)
    if out.pool.device.type == "cpu":
        _check_apart(job)


def _check_apart(job: Job) -> None:
    """Raise ValueError for memory both read and written, and for rows or entries written twice."""
    tables = job.tables.named
    read = {"values": job.values, "scores": job.scores, "cos": job.cos, "sin": job.sin} | tables
    read |= {"ape": job.compressor.ape, "weight": job.compressor.weight}
    written = {"the entries": written_by(job.out)}
    if job.tail.pool.untyped_storage()._cdata != job.out.pool.untyped_storage()._cdata:
        written["the tail"] = spans_of(job.tail.pool)
    require_apart({name: spans_of(tensor) for name, tensor in read.items()}, written)
    for name in ("tail_rows", "entries"):
        require_once(name, tables[name])


def _check_scales(out: Rows) -> None:
    """Refuse fp32 scales that are not aligned: they are written in one access."""
    unit = 4 if out.record.scale_bytes == 4 else 1
    if out.record.scale_bytes and out.scale_offset % unit:
        raise ValueError(f"scales at {out.scale_offset}: a multiple of {unit}")


def _check_tables(job: Job) -> None:
    """Refuse wrong dtypes and shapes and, on the CPU, numbers that are out of range."""
    tables, tokens, tail = job.tables, job.tokens, job.tail
    requests = len(tables.starts) if tables.starts.ndim else 0
    sizes = {"positions": tokens, "owners": tokens, "tail_rows": tokens, "entries": tokens}
    sizes |= {"starts": requests, "state_slots": requests, "cu_tokens": requests + 1, "ends": None}
    for name, tensor in tables.named.items():
        long = name in ("positions", "tail_rows", "entries")
        require_table(name, tensor, torch.int64 if long else torch.int32, (sizes[name],))
    slots = len(tail.pool)
    limit = f"{slots} slots of {tail.rows} rows have 0 to {slots * tail.rows - 1}"
    check_mapping("tail_rows", tables.tail_rows, slots * tail.rows, limit)
    limit = f"the pool has entries 0 to {job.out.entries - 1}"
    check_mapping("entries", tables.entries, job.out.entries, limit)
    check_mapping("ends", tables.ends, tokens, f"there are tokens 0 to {tokens - 1}")
    limit = f"the tail has slots 0 to {slots - 1}"
    check_mapping("state_slots", tables.state_slots, slots, limit)
    check_range("owners", tables.owners, (0, requests), f"there are requests 0 to {requests - 1}")
    check_range("cu_tokens", tables.cu_tokens, (0, tokens + 1), f"from 0 to {tokens} tokens")
    if job.longest is not None and job.longest < 0:
        raise ValueError(f"longest {job.longest}: at least 0, the most tokens of a request")
    ends = tables.ends
    if ends.device.type == "cpu" and tokens and ends.numel():
        first = tables.positions[ends[ends >= 0].long()] + 1 - tail.tail.ratio
        limit = f"entries begin there, and the tables of angles have 0 to {len(job.cos) - 1}"
        check_range("positions", first, (0, len(job.cos)), limit)
    if job.longest is not None and tables.cu_tokens.device.type == "cpu":
        most = int(tables.cu_tokens.diff().max()) if requests else 0
        if most > job.longest:
            raise ValueError(f"longest {job.longest}: a request has {most} tokens")
