"""Checks of cached attention, all of them before anything is written.

Kinds, shapes, records and numbers are checked everywhere; contents of index tensors only on the
CPU.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from fmha.config import PAGE_SIZES
from kernelkit.attention import check_factors, check_sinks
from kernelkit.call.tensors import (
    require_memory,
    require_no_grad,
    require_table,
    require_tensors,
    require_tma,
    require_type,
    require_types,
)
from kvcache.checks import whole
from kvcache.layouts.records import BF16_512, FP8_584
from kvcache.layouts.rows import Rows, check_mapping, check_range
from kvcache.movement.arguments import LATENT_DTYPES, check_angles, check_positions
from mla.attention.config import MAX_HEADS
from mla.tables import INT, LONG, Shapes, require_tables
from mla.window import ChunkWindow, EntryPages, TokenWindow
from mla.workspace import COLUMNS

RECORDS = (BF16_512, FP8_584)
MAX_WORKSPACE = 1 << 60  # bytes
Window = TokenWindow | ChunkWindow


def check_call(
    q: torch.Tensor,
    kv: torch.Tensor | None,
    ring: Rows,
    window: Window,
    past: Rows | None,
    rope: tuple[torch.Tensor, torch.Tensor],
    sinks: torch.Tensor | None,
    scale: float | None,
) -> None:
    """Check a call: raise TypeError, ValueError or NotImplementedError, naming the value and the
    limit.

    past: the rows of compressed entries, if there are any.
    """
    tensors = {"q": q, "ring": ring.pool, "slots": window.slots}
    if kv is not None:
        tensors["kv"] = kv
    cos, sin = _tables_of(rope)
    if past is not None:
        tensors["past"] = past.pool
    if sinks is not None:
        tensors["sinks"] = sinks
    tensors |= {"cos": cos, "sin": sin}
    require_tensors(**tensors)
    require_no_grad(**{name: tensors[name] for name in ("q", "kv") if name in tensors})
    if q.device.type == "cpu":  # elsewhere the operators check once for each layout
        require_memory(**tensors)
    _check_tokens(q, kv, len(window.slots))
    if isinstance(window, TokenWindow) and q.shape[1] > MAX_HEADS:
        raise ValueError(f"q has {q.shape[1]} heads: at most {MAX_HEADS} for decoding")
    check_angles(cos, sin)
    _check_rows("ring", ring)
    if ring.rows != window.rows:
        raise ValueError(f"rings of {ring.rows} rows, but the window was made for {window.rows}")
    if past is not None:
        _check_rows("past", past)
    require_type("scale", scale, float, optional=True)
    check_factors(COLUMNS**-0.5 if scale is None else scale, 0.0)
    if sinks is not None:
        require_table("sinks", sinks, torch.float32, (q.shape[1],))
    if q.device.type == "cpu":
        if sinks is not None:
            check_sinks(sinks)
        _check_seen(ring, window, len(cos))


def check_selected(rows: Rows, entries: torch.Tensor, chosen: torch.Tensor, tokens: int) -> None:
    """Check entries that tokens chose."""
    shapes: Shapes = {
        "entries": (LONG, (tokens, "k")),
        "chosen": (INT, (tokens,)),
    }
    require_tables({"entries": entries, "chosen": chosen}, shapes)
    check_mapping("entries", entries, rows.entries, f"there are entries 0 to {rows.entries - 1}")
    most = entries.shape[1]
    check_range("chosen", chosen, (0, most + 1), f"from 0 to the {most} entries of a row")


def check_every(rows: Rows, pages: EntryPages, tokens: int, *, decoding: bool) -> None:
    """Check all entries of a stream. decoding: whether they are those of a TokenWindow's tokens."""
    require_table("counts", pages.counts, INT, (tokens,))
    if decoding and pages.entries is not None:
        raise ValueError("pages to gather: a decoding step reads blocks (`see_entries`)")
    if pages.entries is None:
        if not decoding and (rows.record != BF16_512 or rows.rows not in PAGE_SIZES):
            raise ValueError(
                f"pages of {rows.rows} rows of {rows.record.name} are read in place: for a chunk "
                f"only {BF16_512.name} with one of {PAGE_SIZES} rows can be"
            )
        there, size = len(rows.pool), rows.rows
    else:
        there, size = pages.entries.shape
        limit = f"there are entries 0 to {rows.entries - 1}"
        check_mapping("entries", pages.entries, rows.entries, limit)
    columns = pages.table.shape[1]
    check_range("counts", pages.counts, (0, columns * size + 1), f"{columns} pages of {size}")
    if pages.table.device.type == "cpu" and tokens:
        used = torch.arange(columns) < -(-pages.counts[:, None] // size)
        check_range("table", pages.table[used], (0, there), f"there are pages 0 to {there - 1}")


def check_workspace(workspace: int) -> int:
    """Return the bytes of a workspace as an int."""
    return whole("workspace", workspace, 0, MAX_WORKSPACE)


def _tables_of(rope: object) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise TypeError(f"rope is {type(rope).__name__}, expected two tables (cos, sin)")
    require_types(cos=rope[0], sin=rope[1])
    return rope[0], rope[1]


def _check_tokens(q: torch.Tensor, kv: torch.Tensor | None, tokens: int) -> None:
    if q.ndim != 3 or q.dtype != torch.bfloat16 or (q.shape[0], q.shape[2]) != (tokens, COLUMNS):
        raise ValueError(
            f"q is {q.dtype} {tuple(q.shape)}, expected torch.bfloat16 "
            f"({tokens}, heads, {COLUMNS}): the step has {tokens} tokens"
        )
    if not q.shape[1]:
        raise ValueError("q has 0 heads: at least 1")
    require_tma("q", q)
    if kv is None:
        return
    if kv.shape != (tokens, COLUMNS):
        raise ValueError(f"kv has shape {tuple(kv.shape)}, expected ({tokens}, {COLUMNS})")
    if kv.dtype not in LATENT_DTYPES:
        raise ValueError(f"kv is {kv.dtype}, expected one of {LATENT_DTYPES}")


def _check_rows(name: str, rows: Rows) -> None:
    if rows.record not in RECORDS:
        names = [record.name for record in RECORDS]
        raise NotImplementedError(
            f"{name} of {getattr(rows.record, 'name', rows.record)}: supported are {names}"
        )
    rows.check()
    unit = rows.record.scale_bytes
    if unit and rows.scale_offset % unit:
        raise ValueError(f"scale_offset {rows.scale_offset} of {name}: a multiple of {unit} bytes")


def _check_seen(ring: Rows, window: Window, positions: int) -> None:
    """Check the tables of a window; for padding tokens (without a slot) only positions."""
    if isinstance(window, TokenWindow):
        check_positions(window.positions, positions)
        _check_decoding(ring, window)
    else:
        check_positions(window.offsets, positions)
        _check_chunk(ring, window, positions)


def _check_decoding(ring: Rows, window: TokenWindow) -> None:
    limit = f"there are entries 0 to {ring.entries - 1}"
    check_mapping("entries", window.entries, ring.entries, limit)
    check_range("lengths", window.lengths, (0, window.window + 1), f"0 to {window.window} tokens")


def _check_chunk(ring: Rows, window: ChunkWindow, positions: int) -> None:
    tokens, (pages, size) = len(window.slots), window.own.shape
    begins = window.cu_tokens.tolist()
    if begins[0] or begins[-1] != tokens or begins != sorted(begins):
        raise ValueError(
            f"cu_tokens {begins}: not ascending from 0 to {tokens}, the number of tokens"
        )
    longest = max((end - begin for begin, end in pairwise(begins)), default=0)
    if longest > window.longest:
        raise ValueError(f"longest {window.longest}: a request has {longest} tokens")
    room = min(positions, window.table.shape[1] * size)
    check_range("lengths", window.lengths, (0, room + 1), f"there is room for {room}")
    check_range("table", window.table, (0, pages), f"there are pages 0 to {pages - 1}")
    check_mapping("own", window.own, tokens, f"there are tokens 0 to {tokens - 1}")
    check_mapping("older", window.older, ring.entries, f"entries are 0 to {ring.entries - 1}")
    limit = f"there are rows 0 to {pages * size - 1}"
    check_mapping("older_rows", window.older_rows, pages * size, limit)
    check_range("tokens", window.tokens, (0, max(tokens, 1)), f"of {tokens}")
