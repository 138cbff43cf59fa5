"""Keys that the tokens of a step see in the cache, as index tensors: a window of a ring, or all
entries of a stream.

They are made once per step by arithmetic on the device, and are the same for all layers of a kind.
Sizes follow from shapes and from host numbers, and nothing waits for a value on a GPU; inside a
CUDA graph every replay makes the tensors again. Entries are numbered as in `kvcache.layouts.rows`,
-1 for none. `arrays` is the result of `Step.tensors`, the target of `Step.fill`, or tensors by the
same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.checks import set_whole, whole
from kvcache.layouts.rows import NO_ENTRY, check_range
from mla.tables import INT, LONG, Shapes, require_tables

MAX_PAGES = (1 << 31) // 128  # their rows are counted in 32 bits
PAGE = 128  # keys of a page of a workspace: those of a tile of `fmha`

Arrays = Mapping[str, torch.Tensor]

# Tables that are checked here, for a step with T tokens of B requests; slots: of the tokens in a
# ring.
OF_TOKENS: Shapes = {"positions": (LONG, ("T",)), "slots": (LONG, ("T",))}
OF_REQUESTS: Shapes = {
    "starts": (INT, ("B",)),
    "lengths": (INT, ("B",)),
    "cu_tokens": (INT, ("B+1",)),
}
OF_CHUNK: Shapes = OF_TOKENS | OF_REQUESTS | {"state_slots": (INT, ("B",))}
OF_ENTRIES: Shapes = {
    "positions": (LONG, ("T",)),
    "owners": (INT, ("T",)),
    "block_tables": (INT, ("B", None)),
    "lengths": (INT, ("B",)),
    "cu_tokens": (INT, ("B+1",)),
}


@dataclass(frozen=True)
class TokenWindow:
    """Keys of a step whose requests have few tokens: after all of them are written, the ring still
    holds what each one sees. Every token has its own keys, in any order.

    window: tokens that one sees, itself included.
    rows: rows of a ring.
    positions, slots: int64 [T], of the tokens, which are written first; positions of padding are 0.
    lengths: int32 [T], keys of a token, 0 for padding.
    entries: int64 [T, window], entries of the ring, NO_ENTRY from lengths on.
    """

    window: int
    rows: int
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    entries: torch.Tensor

    def __post_init__(self) -> None:
        _check_numbers(self)
        own: Shapes = {"lengths": (INT, ("T",)), "entries": (LONG, ("T", self.window))}
        require_tables(vars(self), OF_TOKENS | own)


@dataclass(frozen=True)
class ChunkWindow:
    """Keys of a step with any number of tokens. Those of a request lie in pages by position: first
    the ring's keys, then the step's own tokens, which are written to the ring after it was read.

    window, rows, slots: as in TokenWindow.
    positions: int64 [T].
    offsets: int32 [T], positions again.
    longest: most tokens of a request.
    cu_tokens, starts, lengths: of the requests, as in a Step.
    table: int32 [B, columns], the page of position x in column x // PAGE; columns without keys name
    any page.
    own: int64 [pages, PAGE], the step's token in each row of a page, or NO_ENTRY.
    older: int64 [B, window - 1], entries of the ring to copy.
    older_rows: int64 [B, window - 1], the rows of the pages that they go to.
    tokens: int64 [T], 0, 1, 2, ...
    """

    window: int
    rows: int
    longest: int
    positions: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor
    cu_tokens: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    own: torch.Tensor
    older: torch.Tensor
    older_rows: torch.Tensor
    tokens: torch.Tensor

    def __post_init__(self) -> None:
        _check_numbers(self)
        older = LONG, ("B", self.window - 1)
        own: Shapes = {
            "offsets": (INT, ("T",)),
            "tokens": (LONG, ("T",)),
            "table": (INT, ("B", None)),
            "own": (LONG, (None, PAGE)),
            "older": older,
            "older_rows": older,
        }
        require_tables(vars(self), OF_TOKENS | OF_REQUESTS | own)


@dataclass(frozen=True)
class EntryPages:
    """All entries of a stream: token t sees those before counts[t] = (position + 1) // ratio.

    counts: int32 [T].
    table: int32 [T, columns], the page of entry s in column s // (entries of a page).
    entries: int64 [pages, PAGE], the stream entry to gather to each row of a page, or None.
        None means that `table` names the stream's own blocks, which decoding requires.
    """

    ratio: int
    counts: torch.Tensor
    table: torch.Tensor
    entries: torch.Tensor | None

    def __post_init__(self) -> None:
        set_whole(self, "ratio")
        whole("ratio", self.ratio, 1)
        shapes: dict = {"counts": (INT, ("T",)), "table": (INT, ("T", None))}
        if self.entries is not None:
            shapes["entries"] = LONG, (None, PAGE)
        require_tables(vars(self), shapes)


def _check_numbers(seen: TokenWindow | ChunkWindow) -> None:
    """Raise TypeError or ValueError if the window is no number, or larger than its ring."""
    set_whole(seen, "window", "rows")
    whole("window", seen.window, 1, whole("rows", seen.rows, 1))
    if isinstance(seen, ChunkWindow):
        set_whole(seen, "longest")
        whole("longest", seen.longest)


def see_window(
    arrays: Arrays, slots: torch.Tensor, *, window: int, rows: int, longest: int, context: int
) -> TokenWindow | ChunkWindow:
    """Return the keys visible to the tokens of a step in rings of `rows` rows.

    slots: int64 [T], the entry of each token in the ring, `rows_of.<ring>` of a step.
    longest: most tokens of a request, a number of the host.
    context: most tokens that a request can have.

    Return a TokenWindow if `longest` allows it; its tokens may be padding (slots -1).
    """
    longest, context = whole("longest", longest), whole("context", context)
    if not 1 <= whole("window", window, None) <= whole("rows", rows, None):
        raise ValueError(f"a window of {window} tokens in rings of {rows} rows: from 1 to {rows}")
    given = {**arrays, "slots": slots}
    require_tables(given, OF_TOKENS if decodes(window, rows, longest) else OF_CHUNK)
    if decodes(window, rows, longest):
        return _token_window(arrays["positions"], slots, window, rows)
    return _chunk_window(arrays, slots, (window, rows), longest, context)


def _token_window(
    positions: torch.Tensor, slots: torch.Tensor, window: int, rows: int
) -> TokenWindow:
    there = slots >= 0
    positions = torch.where(there, positions, 0)
    lengths = torch.where(there, (positions + 1).clamp(max=window), 0)
    rings = torch.div(slots, rows, rounding_mode="floor")
    back = torch.arange(window, device=slots.device)
    entries = rings[:, None] * rows + (positions[:, None] - back) % rows
    return TokenWindow(
        window,
        rows,
        positions,
        slots,
        lengths.int(),
        torch.where(back < lengths[:, None], entries, NO_ENTRY),
    )


def _chunk_window(
    arrays: Arrays, slots: torch.Tensor, shape: tuple[int, int], longest: int, context: int
) -> ChunkWindow:
    """Return the keys of a step with any number of tokens. shape: window and rows."""
    window, rows = shape
    starts, ends = arrays["starts"].long(), arrays["lengths"].long()
    first_token, rings = arrays["cu_tokens"][:-1].long(), arrays["state_slots"].long()
    requests, tokens, device = len(starts), len(slots), slots.device
    most = chunk_pages(tokens, requests, window)
    pages = _pages((starts - window + 1).clamp(min=0), ends, most, -(-context // PAGE))
    own = first_token[pages.owner] + pages.number - starts[pages.owner]
    own = torch.where(pages.there & (pages.number >= starts[pages.owner]), own, NO_ENTRY)
    numbers = starts[:, None] - window + 1 + torch.arange(window - 1, device=device)
    there = numbers >= 0
    older = rings[:, None] * rows + numbers % rows
    older_rows = (pages.base + torch.div(numbers, PAGE, rounding_mode="floor")) * PAGE
    older_rows += numbers % PAGE
    return ChunkWindow(
        window,
        rows,
        longest,
        arrays["positions"],
        slots,
        arrays["positions"].int(),
        arrays["cu_tokens"],
        arrays["starts"],
        arrays["lengths"],
        pages.table,
        own,
        torch.where(there, older, NO_ENTRY),
        torch.where(there, older_rows, NO_ENTRY),
        torch.arange(tokens, device=device),
    )


def see_entries(
    arrays: Arrays, *, ratio: int, block_entries: int, in_place: bool, pages: int | None = None
) -> EntryPages:
    """Return all entries of a stream whose blocks have `block_entries` entries of each copy.

    Args:
        in_place: whether attention reads the blocks themselves, as it does for a TokenWindow.
        pages: pages of PAGE entries for all requests, see `pages_of`; None for as many as the block
            tables have room for.
    """
    require_tables(arrays, OF_ENTRIES)
    whole("ratio", ratio, 1)
    whole("block_entries", block_entries, 1)
    if pages is not None:
        whole("pages", pages, 0, MAX_PAGES)
    requests = len(arrays["block_tables"])
    check_range("owners", arrays["owners"], (0, requests), f"there are {requests} requests")
    room = arrays["block_tables"].shape[1] * block_entries
    most_tokens = room * ratio + ratio - 1
    limit = f"the block tables have room for {room} entries of {ratio} tokens"
    check_range("lengths", arrays["lengths"], (0, most_tokens + 1), limit)
    positions, owners = arrays["positions"], arrays["owners"].long()
    blocks, token = arrays["block_tables"], torch.arange(len(positions), device=positions.device)
    counts = torch.div(positions + 1, ratio, rounding_mode="floor")
    counts = torch.where(token < arrays["cu_tokens"][-1], counts, 0)  # padding sees none
    if in_place:
        return EntryPages(ratio, counts.int(), blocks[owners], None)
    columns = -(-blocks.shape[1] * block_entries // PAGE)
    most = len(blocks) * columns if pages is None else pages
    ends = torch.div(arrays["lengths"].long(), ratio, rounding_mode="floor")
    found = _pages(torch.zeros_like(ends), ends, most, columns)
    column = torch.div(found.number, block_entries, rounding_mode="floor")
    entries = torch.full_like(found.number, NO_ENTRY)
    if blocks.shape[1]:
        block = blocks[found.owner, column.clamp(max=blocks.shape[1] - 1)].long()
        there = block * block_entries + found.number % block_entries
        entries = torch.where(found.there, there, NO_ENTRY)
    return EntryPages(ratio, counts.int(), found.table[owners], entries)


def decodes(window: int, rows: int, longest: int) -> bool:
    """Whether a ring still holds what all `longest` tokens of a request see, after their writes."""
    return longest <= rows - window + 1


def chunk_pages(tokens: int, requests: int, window: int) -> int:
    """Return the most pages that the keys of a ChunkWindow take: n keys in a row lie in at most
    (n + 2 PAGE - 2) // PAGE pages."""
    return (tokens + requests * (window - 1 + 2 * PAGE - 2)) // PAGE


def pages_of(entries: np.ndarray) -> int:
    """Count the pages of requests with these numbers of entries; see `Step.entries`."""
    return int((-(-entries // PAGE)).sum())


@dataclass(frozen=True)
class _Pages:
    """Keys begins[b] to ends[b] - 1 of every request b, in consecutive pages.

    table: int32 [B, columns], the page of key x in column x // PAGE.
    base: int64 [B, 1], offset to add to x // PAGE.
    owner: int64 [pages, 1], the request.
    number: int64 [pages, PAGE], the key in a row.
    there: whether the row holds a key.
    """

    table: torch.Tensor
    base: torch.Tensor
    owner: torch.Tensor
    number: torch.Tensor
    there: torch.Tensor


def _pages(begins: torch.Tensor, ends: torch.Tensor, most: int, columns: int) -> _Pages:
    """Lay keys out in `most` pages.

    Raises:
        ValueError: if they need more pages, and the values are in host memory.
    """
    device = begins.device
    first = torch.div(begins, PAGE, rounding_mode="floor")
    behind = torch.div(ends + PAGE - 1, PAGE, rounding_mode="floor")
    counts = behind - first
    after = counts.cumsum(0)
    if device.type == "cpu" and counts.sum() > most:
        raise ValueError(f"{int(counts.sum())} pages of {PAGE} keys, limit {most}")
    base = (after - counts - first)[:, None]
    page = torch.arange(most, device=device)
    owner = torch.searchsorted(after, page, right=True).clamp(max=max(len(ends) - 1, 0))[:, None]
    number = (page[:, None] - base[owner[:, 0]]) * PAGE + torch.arange(PAGE, device=device)
    there = (number >= begins[owner]) & (number < ends[owner])
    last = (after - 1)[:, None].clamp(min=0)
    column = torch.arange(columns, device=device)
    table = (base + column).clamp(min=0).minimum(last).clamp(max=max(most - 1, 0))
    return _Pages(table.int(), base, owner, number, there)
