"""`prepare_attention`: one launch for rows that `compress`, `prepare_query`, `norm_rope_append` and
`append_swa` would write in a launch each.

None of these rows depends on another one. Devices, `backend`, `arch` and what is refused: as in
`kvcache.movement.api`, on compute capability 9.0 and 10.x. Nothing waits for a GPU; each call can
be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.call.tensors import require_type
from kvcache.checks import require
from kvcache.layouts.layout import Tail
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows, TailRows
from mla.compressor.arguments import Compressor, Tables
from mla.glue.api import Queries, heads_of
from mla.indexer.api import IndexQuery
from mla.prepare.arguments import (
    ELEMENTS,
    RECORDS,
    SHARED,
    Place,
    QueryPart,
    StreamPart,
    TailPlace,
    WindowPart,
)
from mla.prepare.launch import PREPARE_ATTENTION

__all__ = ["Compression", "IndexQueries", "WindowKeys", "prepare_attention"]


@dataclass(frozen=True)
class Compression:
    """Entries that the tokens of a step complete, and rows of the tail, as `mla.compress` writes
    them.

    compressor: the weights.
    tail: the tail of the layer, `Cache.tail`; its name finds its table, 'rows_of.csa_tail' say.
    out: the entries of the layer, or its index keys, `Cache.rows`; written in place.
    values, scores: fp32 [T, overlap * width].
    stream: the name of the stream, which finds its tables, 'rows_of.csa' and 'ends_of.csa' say.
    """

    compressor: Compressor
    tail: TailRows
    out: Rows
    values: torch.Tensor
    scores: torch.Tensor
    stream: str


@dataclass(frozen=True)
class IndexQueries:
    """Queries of the indexer, as `mla.prepare_query` prepares them with its default rotation, which
    keys from `compress` have.

    q: bf16 or fp32 [T, H, 128], not rotated yet.
    weights: bf16 or fp32 [T, H].
    record: 'indexer_fp4', 'indexer_fp8' or 'indexer_bf16', the record of the keys.
    factor: the weights are multiplied by it.
    """

    q: torch.Tensor
    weights: torch.Tensor
    record: str = "indexer_fp4"
    factor: float = 1.0


@dataclass(frozen=True)
class WindowKeys:
    """Keys of the window, as `kvcache.append_swa` writes them. `cached_attention` with `kv=None`
    reads them.

    rows: the ring of the layer, of FP8_584, BF16_512 or FP8_656, written in place.
    kv: bf16 or fp32 [T, 512], normalised and not rotated.
    slots: int64 [T], the entry of each token, or -1; `StepView.window.slots`.
    """

    rows: Rows
    kv: torch.Tensor
    slots: torch.Tensor


def prepare_attention(
    arrays: Mapping[str, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    entries: Compression | None = None,
    index_keys: Compression | None = None,
    index_queries: IndexQueries | None = None,
    queries: Queries | None = None,
    window: WindowKeys | None = None,
    longest: int | None = None,
    backend: str = "auto",
    arch: str | None = None,
) -> IndexQuery | None:
    """Prepare what scores and attention of a layer read, for the T tokens of a step.

    The parts that are given share one launch. Each of them is written as the call of its own would
    write it, bit for bit: `compress`, `prepare_query`, `norm_rope_append` and `kvcache.append_swa`.

    Args:
        arrays: `Step.tensors`, or the buffers of `Step.fill`: the positions of the T tokens, and
            the tables that `Tables.of` reads for compressors.
        rope: (cos, sin), fp32 [positions, 32], the layer's own.
        entries: compressed entries of the layer.
        index_keys: keys of the indexer.
        index_queries: queries of the indexer.
        queries: queries of attention, as `norm_rope_append` writes them; neighbours are pairs.
        window: keys of the window.
        longest: the largest number of tokens of a request, `Step.longest`, if it is known. The
            division of the compressors' work depends on it, their bytes do not.
        backend, arch: see `kernelkit.call.launch.choose_target`.

    Returns:
        The prepared queries, as `prepare_query` returns them; None without `index_queries`.

    Raises:
        NotImplementedError: as the calls of the parts do; and for two compressors whose CTAs do not
            fit in one launch, which is never so with those of DeepSeek-V4.
        TypeError, ValueError: naming the value and the limit, before anything is written.
    """
    found = PREPARE_ATTENTION(fields(
        arrays, rope, entries=entries, index_keys=index_keys, index_queries=index_queries,
        queries=queries, window=window, longest=longest, backend=backend, arch=arch,
    ))  # fmt: skip
    return None if index_queries is None else IndexQuery(*found)


def fields(
    arrays: Mapping[str, torch.Tensor],
    rope: tuple[torch.Tensor, torch.Tensor],
    *,
    entries: Compression | None = None,
    index_keys: Compression | None = None,
    index_queries: IndexQueries | None = None,
    queries: Queries | None = None,
    window: WindowKeys | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Convert arguments of `prepare_attention` to fields of `arguments.Arguments`."""
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise TypeError(f"rope is {type(rope).__name__}, expected two tables (cos, sin)")
    require("arrays", arrays, Mapping)
    if "positions" not in arrays:
        raise ValueError(f"no positions: arrays are {', '.join(map(str, arrays))}")
    pools: list[torch.Tensor] = []
    given = {"positions": arrays["positions"], "cos": rope[0], "sin": rope[1], **options}
    for name, part in (("entries", entries), ("index_keys", index_keys)):
        if part is not None:
            require(name, part, Compression)
            require(f"{name}.tail", part.tail, TailRows)
            require(f"{name}.tail.tail", part.tail.tail, Tail)
            tables = Tables.of(arrays, part.stream, part.tail.tail.name)
            given |= {table: getattr(tables, table) for table in SHARED}
            given[name] = _stream(name, part, tables, pools)
    if index_queries is not None:
        require("index_queries", index_queries, IndexQueries)
        given["index_queries"] = QueryPart(**vars(index_queries))
    if queries is not None:
        given["queries"] = heads_of(queries)
    if window is not None:
        require("window", window, WindowKeys)
        place = _place("window.rows", window.rows, pools)
        given["window"] = WindowPart(window.kv, window.slots, place)
    return given | {"pools": tuple(pools)}


def _stream(name: str, part: Compression, tables: Tables, pools: list[torch.Tensor]) -> StreamPart:
    """Return the fields of a compressor, and add its pools to `pools`."""
    require(f"{name}.compressor", part.compressor, Compressor)
    tail = part.tail.tail
    number = _number(f"{name}.tail.pool", part.tail.pool, pools)
    shape = tail.ratio, tail.overlap, tail.online
    place = TailPlace(number, part.tail.offset, part.tail.rows, *shape)
    own = tables.ends, tables.tail_rows, tables.entries
    out = _place(f"{name}.out", part.out, pools)
    if tail.width != ELEMENTS[out.record]:
        raise NotImplementedError(
            f"{name}.tail of width {tail.width}: entries of {out.record} have "
            f"{ELEMENTS[out.record]} elements"
        )
    return StreamPart(part.compressor, part.values, part.scores, *own, place, out)


def _place(name: str, rows: Rows, pools: list[torch.Tensor]) -> Place:
    """Return rows without their pool, and add it to `pools`."""
    require(name, rows, Rows)
    record = rows.record
    require(f"{name}.record", record, Record)
    if RECORDS.get(record.name) != record:
        raise NotImplementedError(
            f"record {record.name} of {record.bytes} bytes: {name} is in one of {[*RECORDS]}"
        )
    number = _number(f"{name}.pool", rows.pool, pools)
    return Place(number, rows.data_offset, rows.scale_offset, rows.rows, record.name)


def _number(name: str, pool: torch.Tensor, pools: list[torch.Tensor]) -> int:
    """Return the number of a pool: an operator may not be given two outputs in one memory."""
    require_type(name, pool, torch.Tensor)
    for number, other in enumerate(pools):
        if other is pool:
            return number
    pools.append(pool)
    return len(pools) - 1
