"""Sizes in bytes of the memory that cached attention uses besides its arguments and its result.

Decoding reads all entries where they are, and needs none. A chunk needs:

entries expanded to BF16, 1,024 bytes each: those that all tokens of a step read together, and
                  those of each token's own
scratch           a record of the step's own window entries, of a chunk
partial results   O in fp32 and LSE of two parts, if there is a past
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelkit.plan.dtypes import BF16_BYTES, FP32_BYTES
from kvcache.checks import require, whole
from kvcache.layouts.layout import Layout, Ring
from kvcache.layouts.records import Record
from mla.window import PAGE, chunk_pages, decodes

COLUMNS = 512
ROW_BYTES = BF16_BYTES * COLUMNS
PARTS = 2  # the window and the past
STATISTICS = 1  # LSE


@dataclass(frozen=True)
class Workspace:
    """Memory that a call needs: entries and bytes shared by all its tokens, and those per token."""

    rows: int
    bytes: int
    token_rows: int
    token_bytes: int

    @property
    def shared(self) -> int:
        """Number of bytes for the whole step."""
        return self.rows * ROW_BYTES + self.bytes

    @property
    def each(self) -> int:
        """Number of bytes for each token of a launch."""
        return self.token_rows * ROW_BYTES + self.token_bytes

    def size(self, tokens: int) -> int:
        """Return the number of bytes, if `tokens` tokens are in a launch."""
        tokens = whole("tokens", tokens)
        return self.shared + tokens * self.each

    def at_once(self, limit: int, tokens: int) -> int:
        """Return the number of tokens of a launch within `limit` bytes; ValueError below one
        token."""
        limit, tokens = whole("limit", limit), whole("tokens", tokens)
        if limit < self.size(1):
            raise ValueError(
                f"a workspace of {limit:,} bytes: at least {self.size(1):,}, {self.shared:,} for "
                f"the whole step and {self.each:,} for each token computed at once"
            )
        return min((limit - self.shared) // self.each, tokens) if self.each else tokens


NONE = Workspace(0, 0, 0, 0)  # of a decoding step


def workspace_of(near: tuple[int, int], far: tuple[int, int] | None, heads: int) -> Workspace:
    """Return the workspace for the two parts of attention of a chunk.

    near: shared rows and bytes of the window, see `chunk_rows`.
    far: shared rows of the past and rows of each token, or None.
    """
    if far is None:
        return Workspace(*near, 0, 0)
    partial = PARTS * heads * FP32_BYTES * (COLUMNS + STATISTICS)
    return Workspace(near[0] + far[0], near[1], far[1], partial)


def chunk_rows(record: Record, window: int, tokens: int, requests: int) -> tuple[int, int]:
    """Return `near` of `workspace_of` for a step of any tokens.

    Its keys are in pages, together with those of the rings; its own are also in `record`.
    """
    keys = chunk_pages(tokens, requests, window) * PAGE + requests * (window - 1)
    return keys, -(-tokens // PAGE) * record.page_bytes(PAGE)


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
    """Compute the workspace of the calls of a step before the step exists; 0 for decoding.

    The index tensors of a step are not included: 8 bytes for each entry that they list, once for
    all layers. Neither are the sums of CTAs that share a token (`Decision.workspace_bytes`), which
    a launch has only if its tokens do not fill the GPU.

    Args:
        layout: layout of the cache.
        heads: number of query heads.
        tokens, requests: numbers of tokens and requests of the step.
        longest: largest number of tokens of a request. If their window entries fit the ring
            (`step_view`), the step decodes.
        selected: number of entries that a token attends to, in a CSA layer.
        entries: number of entries of all requests together, each rounded up to PAGE, if a layer
            attends to all entries and reads them from a workspace. A layer without a past has
            neither `selected` nor `entries`.
        ring: name of the ring that holds the window.

    Returns:
        The workspace; its `size(tokens)` is the largest number of bytes that a call uses.
        `kvcache.plan(workspace=)` reserves this number.

    Raises:
        TypeError: if `ring` does not name a ring.
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
    if decodes(window, rows, longest):
        return NONE
    near = chunk_rows(array.record, window, tokens, requests)
    far = None
    if selected is not None or entries is not None:
        far = (entries or 0, selected or 0)
    return workspace_of(near, far, heads)
