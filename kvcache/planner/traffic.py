"""Bytes of the cache that a step reads and writes, by array: what its time cannot be less than.

Arithmetic alone, no torch. Counted once is what kernels need once: rows of a window that are there
already, the keys of an indexer by a request, selected entries by every token, a compressor's older
rows when a window is complete. Workspaces and activations are not the cache's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelkit.plan.dtypes import FP32_BYTES
from kvcache.checks import require, whole
from kvcache.layouts.layout import Layout, Ring, Stream, Tail

Span = tuple[int, int]  # tokens of a request before and after a step


@dataclass(frozen=True)
class Traffic:
    """Traffic of one array, all of its copies."""

    name: str
    read: int
    written: int

    @property
    def bytes(self) -> int:
        """Both."""
        return self.read + self.written

    def seconds(self, bandwidth: float) -> float:
        """At so many bytes a second."""
        return self.bytes / bandwidth


def step_traffic(
    layout: Layout, spans: Sequence[Span], selected: Mapping[str, int] | None = None
) -> tuple[Traffic, ...]:
    """Return the traffic of a step, array by array.

    Args:
        layout: the layout of the cache.
        spans: (tokens before, tokens after) the step, for each request.
        selected: entries of a stream that each token reads at most, 1024 of 'csa' for
            DeepSeek-V4-Pro; of other streams a request reads all that it has.

    Raises:
        ValueError: for a span that goes backwards, or a stream that the layout lacks.
    """
    require("layout", layout, Layout)
    require("selected", selected, Mapping, optional=True)
    selected = selected or {}
    for name, most in selected.items():
        whole(f"selected[{name!r}]", most)
    unknown = sorted({*selected} - {stream.name for stream in layout.streams})
    if unknown:
        raise ValueError(f"selected {unknown}: {layout.name} has no such stream")
    for start, length in spans:
        whole("start", start, None)
        whole("length", length, None)
        if not 0 <= start <= length:
            raise ValueError(f"a step from {start} to {length} tokens: from 0 on, not backwards")
    return tuple(
        _traffic(layout, array, spans, selected.get(array.name)) for array in layout.arrays
    )


def _traffic(
    layout: Layout, array: Stream | Ring | Tail, spans: Sequence[Span], most: int | None
) -> Traffic:
    read = written = 0
    for span in spans:
        if isinstance(array, Stream):
            mine = _of_stream(array, span, most)
        elif isinstance(array, Ring):
            mine = _of_ring(array, span, layout.draft)
        else:
            mine = _of_tail(array, span, layout.draft)
        read, written = read + mine[0], written + mine[1]
    return Traffic(array.name, array.copies * read, array.copies * written)


def _of_stream(stream: Stream, span: Span, most: int | None) -> Span:
    start, length = span
    made = length // stream.ratio - start // stream.ratio
    if most is None:
        read = length // stream.ratio if length > start else 0
    else:
        read = sum(min(most, (token + 1) // stream.ratio) for token in range(start, length))
    return read * stream.record.bytes, made * stream.record.bytes


def _of_ring(ring: Ring, span: Span, draft: int) -> Span:
    start, length = span
    tokens = length - start
    older = min(start, ring.window - 1) if tokens else 0
    return (older + tokens) * ring.record.bytes, min(tokens, ring.rows(draft)) * ring.record.bytes


def _of_tail(tail: Tail, span: Span, draft: int) -> Span:
    start, length = span
    rows = min(length - start, tail.rows(draft))
    if tail.online:
        running = start % tail.ratio > 0 and length > start
        return running * tail.row_bytes, rows * tail.row_bytes
    # Of every row a window reads one half: values and scores of its own columns.
    read = 0
    for entry in range(start // tail.ratio, length // tail.ratio):
        first = max(0, (entry + 1 - tail.overlap) * tail.ratio)
        read += max(0, start - first)
    return read * tail.width * FP32_BYTES * 2, rows * tail.row_bytes * 2
