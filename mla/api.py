"""Attention over the cache of a DeepSeek-V4 layer: recent tokens, and older ones in compressed
form.

A layer calls `cached_attention` once per step. It writes the step's window entries, then attends
over the window and, if there is a past, over compressed entries. The result is that of one softmax
over both, with the sink. When requests decode, one launch does it, which reads all entries where
they are; for a chunk, attention runs over each kind of keys, and a merge follows. K and V are the
same entry, one for all heads. The caller writes the compressed entries that the step completes
before this call, since the tokens that complete them see them.

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
from fmha.launch import ARCHS
from kernelkit.call.launch import choose_target
from kernelkit.compile.arch import WITHOUT_E4M3
from kernelkit.merge.api import merge
from kernelkit.plan import hw
from kvcache.checks import require, shown
from kvcache.layouts.layout import Layout, Ring, Stream
from kvcache.layouts.records import BF16_512
from kvcache.layouts.rows import Rows
from kvcache.movement.api import append_swa
from mla.attention.arguments import Listed
from mla.checks import (
    check_call,
    check_every,
    check_selected,
    check_workspace,
)
from mla.keys import Keys, OwnKeys, all_entries, attend_in_place, listed, write_chunk
from mla.tables import INT, LONG, require_kind, require_tables
from mla.window import (
    Arrays,
    ChunkWindow,
    EntryPages,
    TokenWindow,
    see_entries,
    see_window,
)
from mla.workspace import Workspace, chunk_rows, workspace_of

WORKSPACE = 1 << 30  # bytes

Window = TokenWindow | ChunkWindow
Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Selected:
    """Entries that each token chose.

    Token t reads the first chosen[t] entries of its row; entries is int64 [T, k], chosen int32 [T].
    """

    rows: Rows
    entries: torch.Tensor
    chosen: torch.Tensor


@dataclass(frozen=True)
class Every:
    """All entries that a token sees: those completed by it or by an earlier token.

    rows: the rows of one copy of a stream.
    pages: the pages of that stream.
    """

    rows: Rows
    pages: EntryPages


Past = Selected | Every


@dataclass(frozen=True)
class StepView:
    """Keys visible to a step's tokens, in the ring and in the streams attended over completely."""

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
    """Compute the index tensors of a step, for all layers. `mla.window` does the same for bare
    tensors.

    Args:
        layout: layout of the cache.
        arrays: `Step.tensors`, or the buffers of `Step.fill`; for a CUDA graph call this within the
            capture.
        longest: `Step.longest`, the largest number of tokens of a request. Up to the layout's draft
            (at least 1) all tokens count as decoding, and those with slots of -1 as padding.
        ring: name of the ring that holds the window.
        every: streams that are attended over completely; those that the layout lacks are skipped.
        pages: for each stream, the number of pages of the requests (`mla.window.pages_of`). By
            default the block tables bound it. A step that decodes needs none.

    Returns:
        The keys that the tokens see in the ring and in the streams.

    Raises:
        ValueError: for more pages than `pages` says, or a window larger than its ring.
    """
    require("layout", layout, Layout)
    require("arrays", arrays, Mapping)
    require("pages", pages, Mapping, optional=True)
    rings, streams = _rings_and_streams(layout, ring, every)
    require_tables(arrays, {f"rows_of.{ring}": (LONG, ("T",)), "block_tables": (INT, ("B", None))})
    window = see_window(
        arrays,
        arrays[f"rows_of.{ring}"],
        window=rings.window,
        rows=rings.rows(layout.draft),
        longest=longest,
        context=arrays["block_tables"].shape[1] * layout.block_tokens,
    )
    found = {}
    for stream in streams:
        name = stream.name
        size = layout.entries(stream)
        in_place = isinstance(window, TokenWindow)
        in_place |= stream.record == BF16_512 and size in PAGE_SIZES
        bound = (pages or {}).get(name)
        found[name] = see_entries(
            arrays, ratio=stream.ratio, block_entries=size, in_place=in_place, pages=bound
        )
    return StepView(window, found)


def _rings_and_streams(
    layout: Layout, ring: str, every: Sequence[str]
) -> tuple[Ring, list[Stream]]:
    """Return the ring of that name, and the listed streams that the layout has.

    Raises:
        TypeError: for a name of another kind.
    """
    require("ring", ring, str)
    found = layout.find(ring)
    if not isinstance(found, Ring):
        raise TypeError(f"{ring!r} is not a ring")
    if isinstance(every, str) or not isinstance(every, Sequence):
        raise TypeError(f"every is {shown(every)}, expected a sequence of names")
    streams = []
    names = {array.name for array in layout.arrays}
    for place, name in enumerate(every):
        require(f"every[{place}]", name, str)
        stream = layout.find(name) if name in names else None
        if isinstance(stream, Stream):
            streams.append(stream)
        elif stream is not None:
            raise TypeError(f"{name!r} is not a stream")
    return found, streams


def cached_attention(
    q: torch.Tensor,
    kv: torch.Tensor | None,
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
    """Compute softmax(scale Q K^T, sink) K over the window and the past.

    `mla.reference` is the definition. The last 64 columns are rotated back by the token's position.
    CUDA graphs capture a decoding step, padding included: a launch writes kv, another one attends.

    Args:
        q: bf16 [T, H, 512], rotated; a decoding step has up to 128 heads.
        kv: [T, 512], bf16 or fp32, normalised and not rotated; None if `norm_rope_append` wrote the
            entries of a decoding step, which is one launch then.
        ring: rows of BF16_512 or FP8_584; kv is written to it as `kvcache.append_swa` does, then
            read from there.
        window: window of the step, `StepView.window`.
        rope: (cos, sin), fp32 [positions, 32], the layer's own.
        past: compressed entries, of BF16_512 or FP8_584; one that is listed twice counts twice.
        sinks: fp32 [H], for each head a logit whose value is zero.
        scale: factor of q.k; 512 ** -0.5 by default.
        workspace: bytes that a chunk may use besides its arguments and its result; its tokens are
            divided into as many launches as this requires (`plan_workspace`).
        backend, arch: see `kernelkit.call.launch.choose_target`. Chunks need Hopper, sm_100a or
            sm_103a, FP8_584 compute capability 8.9.

    Returns:
        bf16 [T, H, 512]; a token of padding has 0.

    Raises:
        TypeError, ValueError, NotImplementedError: naming value and limit, before any write.
    """
    _check(q, kv, ring, window, past, rope, sinks, scale)
    _check_place(q.device, backend, arch, ring, past)
    limit, place = check_workspace(workspace), {"backend": backend, "arch": arch}
    if not len(q):
        return torch.empty_like(q)
    options = {"rope": rope, "scale": scale, **place}
    if isinstance(window, TokenWindow):
        if kv is not None:
            append_swa(ring, kv, window.positions, window.slots, *rope, **place)
        near = listed(ring, window.entries, window.lengths)
        options["sinks"] = sinks
        return attend_in_place(q, near, _in_place(past), window.positions, options)
    at_once = _workspace(ring, window, q.shape[1], past).at_once(limit, len(q))
    parts = [write_chunk(ring, kv, window, rope, place)]
    if isinstance(past, Selected):
        parts.append(OwnKeys(past.rows, past.entries, past.chosen, window.offsets))
    elif past is not None:
        parts.append(all_entries(past.rows, past.pages, window.offsets, place))
    return _in_groups(q, min(at_once, hw.MAX_GRID_YZ), parts, sinks, options)


def _in_groups(
    q: torch.Tensor,
    at_once: int,
    parts: Sequence[Keys],
    sinks: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return O of a chunk, of `at_once` tokens at a time: each is a batch entry of a launch."""
    if at_once >= len(q):
        return _attend(q, slice(0, len(q)), parts, sinks, options)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for begin in range(0, len(q), at_once):
        group = slice(begin, min(begin + at_once, len(q)))
        out[group] = _attend(q, group, parts, sinks, options)
    return out


def _in_place(past: Past | None) -> Listed | None:
    """Return the past as keys of the sparse operator."""
    if past is None:
        return None
    if isinstance(past, Selected):
        return listed(past.rows, past.entries, past.chosen)
    return listed(past.rows, past.pages.table, past.pages.counts, paged=True)


def _attend(
    q: torch.Tensor,
    group: slice,
    parts: Sequence[Keys],
    sinks: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Return O of the tokens of `group`; the sink is added once, in the merge.

    The parts are normalised. For parts that are not, a merge gets the sum of weights from exp(LSE -
    row_max), which fp32 rounds away if scores are huge.
    """
    if len(parts) == 1:
        return parts[0].attend(q, group, {**options, "sinks": sinks})[0]
    wide = {"out_dtype": torch.float32, "return_lse": True}
    found = [keys.attend(q, group, options | wide) for keys in parts]
    place = {name: options[name] for name in ("backend", "arch")}
    return merge(found, sinks=sinks, out_dtype=q.dtype, return_lse=False, **place)


def _check(
    q: torch.Tensor,
    kv: torch.Tensor | None,
    ring: Rows,
    window: Window,
    past: Past | None,
    rope: Rope,
    sinks: torch.Tensor | None,
    scale: float | None,
) -> None:
    """Check all arguments, before anything is written."""
    _check_kinds(ring, window, past)
    check_call(q, kv, ring, window, None if past is None else past.rows, rope, sinks, scale)
    if isinstance(past, Selected):
        check_selected(past.rows, past.entries, past.chosen, len(q))
    elif past is not None:
        check_every(past.rows, past.pages, len(q), decoding=isinstance(window, TokenWindow))


def _check_place(
    device: torch.device, backend: str, arch: str | None, ring: Rows, past: Past | None
) -> None:
    """Refuse a device without kernels; tensors on the meta device are not computed anywhere."""
    if device.type == "meta":
        return
    target = choose_target(device, backend, arch, ARCHS)
    for rows in (ring,) if past is None else (ring, past.rows):
        if rows.record != BF16_512 and target.arch in WITHOUT_E4M3:
            raise NotImplementedError(
                f"entries of {rows.record.name} on {target.arch}: e4m3 needs compute capability 8.9"
            )


def _check_kinds(ring: Rows, window: Window, past: Past | None) -> None:
    """Raise TypeError for arguments, and parts of them, that are of another kind."""
    require_kind("ring", ring, Rows)
    require_kind("window", window, TokenWindow, ChunkWindow)
    if past is None:
        return
    require_kind("past", past, Selected, Every)
    require_kind("past.rows", past.rows, Rows)
    if isinstance(past, Every):
        require_kind("past.pages", past.pages, EntryPages)


def _workspace(ring: Rows, window: ChunkWindow, heads: int, past: Past | None) -> Workspace:
    """Return the workspace of a chunk, by the shapes of its tensors."""
    near = chunk_rows(ring.record, window.window, len(window.slots), len(window.starts))
    far = None
    if isinstance(past, Selected):
        far = (0, past.entries.shape[1])
    elif past is not None:
        entries = past.pages.entries
        far = (0 if entries is None else entries.numel(), 0)
    return workspace_of(near, far, heads)
