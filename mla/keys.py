"""Keys of cached attention in a form that attention can read.

Tokens that decode read all of theirs where they are, in one launch (`attend_in_place`). Keys of a
chunk are in the cache itself, or as BF16 in a workspace, and each kind of them has a method by
which the queries of some tokens attend to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fmha.api import attention
from kvcache.layouts.records import BF16_512
from kvcache.layouts.rows import Rows
from kvcache.movement.api import append_rows, append_swa, gather
from mla.attention.arguments import Listed
from mla.attention.launch import SPARSE
from mla.window import PAGE, ChunkWindow, EntryPages
from mla.workspace import COLUMNS

BF16 = torch.bfloat16
Part = tuple[torch.Tensor, ...]
Rope = tuple[torch.Tensor, torch.Tensor]
Place = dict[str, Any]  # backend and arch


# -- decoding -------------------------------------------------------------------------------------


def listed(
    rows: Rows, places: torch.Tensor, counts: torch.Tensor, *, paged: bool = False
) -> Listed:
    """Return entries int64 [T, n], or pages int32 [T, n] of entries 0, 1, 2, ..., as keys of the
    sparse operator; token t reads the first counts[t] entries."""
    offsets = rows.data_offset, rows.scale_offset
    return Listed(rows.pool, places, counts, rows.record.name, rows.rows, *offsets, paged)


def attend_in_place(
    q: torch.Tensor,
    near: Listed,
    far: Listed | None,
    positions: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return O of one softmax over both, with the sink. options: rope, sinks, scale, and place."""
    cos, sin = options.pop("rope")
    angles = {"cos": cos, "sin": sin, "positions": positions}
    o, _ = SPARSE({"q": q, "keys": near, "extra": far, **angles, **options})
    return o


# -- chunks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnKeys:
    """Keys of tokens with entries of their own.

    Token t reads the first lengths[t] entries of its row of `entries`, int64 [T, n].
    """

    rows: Rows
    entries: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor

    def attend(self, q: torch.Tensor, group: slice, options: dict[str, Any]) -> Part:
        """Gather the keys of the tokens of `group`, and attend to them."""
        place = {name: options[name] for name in ("backend", "arch")}
        entries = self.entries[group]
        k = gathered(self.rows, entries, place).view(*entries.shape, 1, COLUMNS)
        return _by_token(q[group], k, self, group, options)


@dataclass(frozen=True)
class PagedKeys:
    """Keys in pages [pages, rows, 1, 512]; row t of `table`, int32 [T, columns], has the pages of
    t."""

    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor

    def attend(self, q: torch.Tensor, group: slice, options: dict[str, Any]) -> Part:
        """Attend to the keys of the tokens of `group`."""
        paged = {"page_table": self.table[group]}
        return _by_token(q[group], self.pages, self, group, options | paged)


@dataclass(frozen=True)
class ChunkKeys:
    """Keys of requests in pages; positions determine which tokens see a key."""

    pages: torch.Tensor
    window: ChunkWindow

    def attend(self, q: torch.Tensor, group: slice, options: dict[str, Any]) -> Part:
        """Attend with the tokens of `group`; a request takes part with its tokens in the group."""
        mine, count = self.window, group.stop - group.start
        first = mine.cu_tokens[:-1]
        found = attention(
            q[group], self.pages, self.pages,
            window=(mine.window - 1, 0),
            q_offset=mine.starts + (group.start - first).clamp(min=0),
            kv_lens=mine.lengths,
            page_table=mine.table,
            cu_seqlens_q=(mine.cu_tokens - group.start).clamp(0, count),
            max_seqlen_q=min(mine.longest, count),
            pack_heads=True,
            **options,
        )  # fmt: skip
        return _parts(found)


Keys = OwnKeys | PagedKeys | ChunkKeys


def _by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    keys: OwnKeys | PagedKeys,
    group: slice,
    options: dict[str, Any],
) -> Part:
    """Run attention with one batch entry for each token, whose heads share a tile of queries.

    All keys of a token have smaller positions, so that only their number matters.
    """
    found = attention(
        q[:, None], k, k,
        q_offset=keys.offsets[group], kv_lens=keys.lengths[group], pack_heads=True, **options,
    )  # fmt: skip
    o, *statistics = _parts(found)
    return o.squeeze(1), *(numbers.squeeze(2).transpose(0, 1) for numbers in statistics)


def _parts(found: torch.Tensor | Part) -> Part:
    """Return the result of `attention` as a tuple, even if it is a single tensor."""
    return (found,) if isinstance(found, torch.Tensor) else found


# -- the window -----------------------------------------------------------------------------------


def write_chunk(
    ring: Rows, kv: torch.Tensor | None, window: ChunkWindow, rope: Rope, place: Place
) -> ChunkKeys:
    """Write kv to the ring, and return the keys with the rounding of the record.

    A ring has no room for all keys of the step, so these are rounded by a record of their own.
    Earlier keys are read from the ring before kv overwrites them.
    """
    if kv is None:
        raise ValueError("kv is None: a chunk reads its own entries from it")
    older = gathered(ring, window.older, place)
    own = scratch(ring, len(kv))
    append_swa(own, kv, window.positions, window.tokens, *rope, **place)
    keys = gathered(own, window.own, place)
    pages = keys.view(-1, PAGE * COLUMNS).view(torch.uint8)
    append_rows(
        (Rows(pages, 0, 0, PAGE, BF16_512), older), None, window.older_rows.flatten(), **place
    )
    append_swa(ring, kv, window.positions, window.slots, *rope, **place)
    return ChunkKeys(keys.view(-1, PAGE, 1, COLUMNS), window)


def scratch(ring: Rows, tokens: int) -> Rows:
    """Allocate rows for `tokens` entries of the ring's record, in slots of PAGE."""
    record, slots = ring.record, -(-tokens // PAGE)
    pool = torch.empty(slots, record.page_bytes(PAGE), dtype=torch.uint8, device=ring.pool.device)
    return Rows(pool, 0, PAGE * record.data_bytes, PAGE, record)


# -- compressed entries ---------------------------------------------------------------------------


def all_entries(rows: Rows, pages: EntryPages, offsets: torch.Tensor, place: Place) -> PagedKeys:
    """Return keys that are read in place if `pages` has no entries to gather, else gathered."""
    if pages.entries is None:
        keys = in_place(rows)
    else:
        keys = gathered(rows, pages.entries, place).view(-1, PAGE, 1, COLUMNS)
    return PagedKeys(keys, pages.table, pages.counts, offsets)


# -- memory ---------------------------------------------------------------------------------------


def gathered(rows: Rows, entries: torch.Tensor, place: Place) -> torch.Tensor:
    """Gather entries int64 [...], n in all, as bf16 [n, 512]; NO_ENTRY becomes zeros."""
    numbers = entries.reshape(-1)
    out = torch.empty(len(numbers), COLUMNS, dtype=BF16, device=rows.pool.device)
    gather(rows, numbers, out, **place)
    return out


def in_place(rows: Rows) -> torch.Tensor:
    """Return a view [slots, rows, 1, 512] of BF16_512 entries."""
    return rows.data().view(BF16).unsqueeze(2)
