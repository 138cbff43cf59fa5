"""Memory that cached attention takes beside its arguments and its result, in bytes.

entries expanded to BF16, 1,024 bytes each: those that all tokens of a step read together, and
                  those of each token's own
scratch           a record of the step's own window entries, of a chunk
partial results   O in fp32 and LSE of two parts, where there is a past
"""

from __future__ import annotations

from dataclasses import dataclass

from fmha.config import PAGE_SIZES
from kernelkit.plan.dtypes import BF16_BYTES, FP32_BYTES
from kvcache.checks import require, whole
from kvcache.layouts.layout import Layout, Ring
from kvcache.layouts.records import BF16_512, Record
from mla.window import PAGE, chunk_pages, decodes

COLUMNS = 512
ROW_BYTES = BF16_BYTES * COLUMNS
PARTS = 2  # the window and the past
STATISTICS = 1  # LSE


@dataclass(frozen=True)
class Workspace:
    """Room that a call needs: entries in BF16 and bytes that all its tokens share, and those of
    each token."""

    rows: int
    bytes: int
    token_rows: int
    token_bytes: int

    @property
    def shared(self) -> int:
        """Bytes for the whole step."""
        return self.rows * ROW_BYTES + self.bytes

    @property
    def each(self) -> int:
        """Bytes for each token that goes at once."""
        return self.token_rows * ROW_BYTES + self.token_bytes

    def size(self, tokens: int) -> int:
        """Bytes, where so many tokens go at once."""
        tokens = whole("tokens", tokens)
        return self.shared + tokens * self.each

    def at_once(self, limit: int, tokens: int) -> int:
        """Tokens of a launch within `limit` bytes; ValueError where they are too few for one."""
        limit, tokens = whole("limit", limit), whole("tokens", tokens)
        if limit < self.size(1):
            raise ValueError(
                f"a workspace of {limit:,} bytes: at least {self.size(1):,}, {self.shared:,} for "
                f"the whole step and {self.each:,} for each token computed at once"
            )
        return min((limit - self.shared) // self.each, tokens) if self.each else tokens


def workspace_of(near: tuple[int, int, int], far: tuple[int, int] | None, heads: int) -> Workspace:
    """near: of the window, rows and bytes that are shared, and rows of each token, see
    `decoding_rows` and `chunk_rows`; far: rows of the past, shared and of each token, or None."""
    shared, scratch, own = near
    if far is None:
        return Workspace(shared, scratch, own, 0)
    partial = PARTS * heads * FP32_BYTES * (COLUMNS + STATISTICS)
    return Workspace(shared + far[0], scratch, own + far[1], partial)


def decoding_rows(record: Record, window: int, rows: int) -> tuple[int, int, int]:
    """Return `near` of `workspace_of` for a step whose tokens read rings of `rows` rows, in place
    where these are pages."""
    return 0, 0, 0 if is_page(record, window, rows) else window


def is_page(record: Record, window: int, rows: int) -> bool:
    """Whether attention reads a ring as it is, every row of it: softmax asks for no order."""
    return rows == window and record == BF16_512 and rows in PAGE_SIZES


def chunk_rows(record: Record, window: int, tokens: int, requests: int) -> tuple[int, int, int]:
    """Return `near` of `workspace_of` for a step of any tokens: its keys in pages, those of the
    rings, and its own in `record`."""
    keys = chunk_pages(tokens, requests, window) * PAGE + requests * (window - 1)
    return keys, -(-tokens // PAGE) * record.page_bytes(PAGE), 0


def plan_workspace(
    layout: Layout,
    heads: int,
    *,
    tokens: int,
    requests: int,
    longest: int,
    selected: int | None = None,
    entries: int | None = None,
    ring: str = "swa",
) -> Workspace:
    """The workspace of the calls of a step, before there is one.

    The index tensors of a step are not in it: 8 bytes for each entry that they name, once for all
    layers.

    Args:
        layout: of the cache.
        heads: query heads.
        tokens, requests: of the step.
        longest: most tokens of a request.
        selected: entries that a token attends to, of a CSA layer.
        entries: of all requests together where a layer attends to all and reads them from a
            workspace, rounded up to PAGE for each request. Neither: a layer without a past.
        ring: the ring that holds the window.

    Returns:
        Its `size(tokens)` is the most bytes that a call takes, what `kvcache.plan(workspace=)` sets
        aside.

    Raises:
        TypeError: for a name that is no ring's.
    """
    require("layout", layout, Layout)
    require("ring", ring, str)
    array = layout.find(ring)
    if not isinstance(array, Ring):
        raise TypeError(f"{ring!r} is not a ring")
    heads, longest = whole("heads", heads, 1), whole("longest", longest)
    tokens, requests = whole("tokens", tokens), whole("requests", requests)
    selected = None if selected is None else whole("selected", selected)
    entries = None if entries is None else whole("entries", entries)
    window, rows = array.window, array.rows(layout.draft)
    near = decoding_rows(array.record, window, rows)
    if not decodes(window, rows, longest):
        near = chunk_rows(array.record, window, tokens, requests)
    far = None
    if selected is not None or entries is not None:
        far = (entries or 0, selected or 0)
    return workspace_of(near, far, heads)
