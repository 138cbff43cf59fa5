"""Attention over the cache of a DeepSeek-V4 layer: the newest tokens, and what is left of older
ones in compressed entries.

A layer calls `cached_attention` once per step. It writes the step's window entries, attends over
the window and, where there is a past, over compressed entries, and merges the two with the sink:
the same as one softmax over both. K and V are the same entry, one for all heads. Compressed entries
that the step completes are written before, since the tokens that complete them see them.

    view = step_view(cache.layout, step.tensors(device), longest=step.longest)  # once per step
    rows = cache.rows("swa", layer)
    o = cached_attention(q, kv, rows, view.window, rope=rope, sinks=sinks)      # window alone
    past = Selected(cache.rows("csa", copy), entries, chosen)                   # of `select`
    o = cached_attention(q, kv, rows, view.window, rope=rope, sinks=sinks, past=past)
    past = Every(cache.rows("hca", copy), view.pages["hca"])
    o = cached_attention(q, kv, rows, view.window, rope=rope, sinks=sinks, past=past)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmha.config import PAGE_SIZES
from fmha.sparse.keys import Keys, OwnKeys, all_entries, write_chunk, write_tokens
from fmha.sparse.window import Arrays, ChunkWindow, EntryPages, TokenWindow, see_entries, see_window
from fmha.sparse.workspace import COLUMNS, Workspace, chunk_rows, decoding_rows, workspace_of
from kernelkit import hw
from kernelkit.merge import merge
from kernelkit.tensors import require_no_grad, require_table, require_tensors
from kvcache.layouts.layout import Layout
from kvcache.layouts.records import BF16_512, FP8_584
from kvcache.layouts.rows import Rows

RECORDS = (BF16_512, FP8_584)
WORKSPACE = 1 << 30  # bytes

Window = TokenWindow | ChunkWindow
Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Selected:
    """Of each token `chosen` entries: int64 [T, k], the first chosen[t] (int32 [T]) of row t."""

    rows: Rows
    entries: torch.Tensor
    chosen: torch.Tensor


@dataclass(frozen=True)
class Every:
    """All entries that a token sees: windows of `ratio` tokens that it or one before completed.
    pages: of the stream that rows are a copy of."""

    rows: Rows
    pages: EntryPages


Past = Selected | Every


@dataclass(frozen=True)
class StepView:
    """What the tokens of a step see: of the ring, and of streams that are attended over whole."""

    window: TokenWindow | ChunkWindow
    pages: Mapping[str, EntryPages]


def step_view(
    layout: Layout,
    arrays: Arrays,
    *,
    longest: int,
    ring: str = "swa",
    every: Sequence[str] = ("hca",),
    pages: Mapping[str, int] | None = None,
) -> StepView:
    """The index tensors of a step, for all layers. See `fmha.sparse.window`, also for bare tensors.

    Args:
        layout: of the cache.
        arrays: `Step.tensors`, or the buffers of `Step.fill`; for a CUDA graph call this within the
            capture.
        longest: `Step.longest`, most tokens of a request; up to the layout's draft (at least 1) all
            tokens count as decoding, and those with slots of -1 as padding.
        ring: the ring that holds the window.
        every: streams that are attended over whole; those that the layout lacks are passed over.
        pages: of a stream, `fmha.sparse.window.pages_of` what the requests have; without it the
            block tables say how many there can be.

    Returns:
        What the tokens see of the ring and of the streams.

    Raises:
        ValueError: for more pages than `pages` says, or a window larger than its ring.
    """
    find, tables = layout.find, arrays["block_tables"]
    names = {array.name for array in layout.arrays}
    window = see_window(
        arrays,
        arrays[f"rows_of.{ring}"],
        window=find(ring).window,
        rows=find(ring).rows(layout.draft),
        longest=longest,
        context=tables.shape[1] * layout.block_tokens,
    )
    found = {}
    for name in [name for name in every if name in names]:
        stream = find(name)
        size = layout.entries(stream)
        in_place = stream.record == BF16_512 and size in PAGE_SIZES
        bound = (pages or {}).get(name)
        found[name] = see_entries(
            arrays, ratio=stream.ratio, block_entries=size, in_place=in_place, pages=bound
        )
    return StepView(window, found)


def cached_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    ring: Rows,
    window: TokenWindow | ChunkWindow,
    *,
    rope: Rope,
    past: Past | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    workspace: int = WORKSPACE,
    backend: str = "auto",
    arch: str | None = None,
) -> torch.Tensor:
    """softmax(scale Q K^T, sink) K over the window and the past, as `fmha.sparse.reference` defines
    it, the last 64 columns turned back by the token's position.

    Nothing waits for a GPU; a step of decoding can be captured in a CUDA graph, padding included.

    Args:
        q: bf16 [T, H, 512], rotated.
        kv: [T, 512], bf16 or fp32, normalised and not rotated.
        ring: of BF16_512 or FP8_584; kv is written there as `kvcache.append_swa` does, and
            attention reads what the record holds.
        window: of the step, `StepView.window`.
        rope: (cos, sin), fp32 [positions, 32], the layer's own.
        past: compressed entries, of BF16_512 or FP8_584; one that is there twice counts twice.
        sinks: fp32 [H], for each head a logit whose value is zero.
        scale: multiplies q.k; 512 ** -0.5 by default.
        workspace: bytes that one call may take beside its arguments and its result; tokens go in as
            many launches as that needs (`plan_workspace`).
        backend, arch: see `kernelkit.launch.choose_target`.

    Returns:
        bf16 [T, H, 512]; a token of padding has 0.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the value and the limit; shapes, dtypes
            and records before anything is written.
    """
    _check(q, kv, ring, window, past)
    if not len(q):
        return torch.empty_like(q)
    at_once = _workspace(ring, window, q.shape[1], past).at_once(workspace, len(q))
    at_once = min(at_once, hw.MAX_GRID_YZ)  # a token is an entry of the batch
    place = {"backend": backend, "arch": arch}
    write = write_tokens if isinstance(window, TokenWindow) else write_chunk
    parts = [write(ring, kv, window, rope, place)]
    if isinstance(past, Selected):
        parts.append(OwnKeys(past.rows, past.entries, past.chosen, window.offsets))
    elif past is not None:
        parts.append(all_entries(past.rows, past.pages, window.offsets, place))
    options = {"rope": rope, "scale": scale, **place}
    if at_once == len(q):
        return _attend(q, slice(0, len(q)), parts, sinks, options)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin in range(0, len(q), at_once):
        group = slice(begin, min(begin + at_once, len(q)))
        out[group] = _attend(q, group, parts, sinks, options)
    return out


def _attend(
    q: torch.Tensor,
    group: slice,
    parts: Sequence[Keys],
    sinks: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """O of the tokens of `group`; the sink joins once, where the parts become one."""
    if len(parts) == 1:
        return parts[0].attend(q, group, {**options, "sinks": sinks})[0]
    found = [keys.attend(q, group, {**options, "normalize": False}) for keys in parts]
    place = {name: options[name] for name in ("backend", "arch")}
    return merge(found, sinks=sinks, out_dtype=q.dtype, return_lse=False, **place)


def _workspace(ring: Rows, window: Window, heads: int, past: Past | None) -> Workspace:
    """Of this call, by the shapes of its tensors."""
    if isinstance(window, TokenWindow):
        near = decoding_rows(ring.record, window.window, window.rows)
    else:
        tokens, requests = len(window.slots), len(window.starts)
        near = chunk_rows(ring.record, window.window, tokens, requests)
    far = None
    if isinstance(past, Selected):
        far = (0, past.entries.shape[1])
    elif past is not None:
        entries = past.pages.entries
        far = (0 if entries is None else entries.numel(), 0)
    return workspace_of(near, far, heads)


# -- checks ---------------------------------------------------------------------------------------


def _check(
    q: torch.Tensor, kv: torch.Tensor, ring: Rows, window: Window, past: Past | None
) -> None:
    """What the operators would find only when the window has been written, or never."""
    tensors = {"q": q, "kv": kv, "ring": ring.pool, "slots": window.slots}
    require_no_grad(q=q, kv=kv)
    if past is not None:
        tensors["past"] = past.rows.pool
    require_tensors(**tensors)
    tokens = len(window.slots)
    if q.ndim != 3 or q.dtype != torch.bfloat16 or (q.shape[0], q.shape[2]) != (tokens, COLUMNS):
        raise ValueError(
            f"q is {q.dtype} {tuple(q.shape)}: torch.bfloat16 ({tokens}, heads, {COLUMNS}), the "
            f"step has {tokens} tokens"
        )
    if kv.shape != (tokens, COLUMNS):
        raise ValueError(f"kv has shape {tuple(kv.shape)}: ({tokens}, {COLUMNS})")
    _check_rows("ring", ring)
    if ring.rows != window.rows:
        raise ValueError(
            f"rings of {ring.rows} rows: what the step sees was made for {window.rows}"
        )
    if past is not None:
        _check_rows("past", past.rows)
    if isinstance(past, Selected):
        require_table("entries", past.entries, torch.int64, (tokens, None))
        require_table("chosen", past.chosen, torch.int32, (tokens,))
    elif past is not None:
        require_table("counts", past.pages.counts, torch.int32, (tokens,))


def _check_rows(name: str, rows: Rows) -> None:
    if rows.record not in RECORDS:
        names = [record.name for record in RECORDS]
        raise NotImplementedError(f"{name} of {rows.record.name}: supported are {names}")
