"""What the queries of a forward see, in the terms of the kernels: `Sight`.

Transformers asks for a mask once in a forward and for each kind of layers, before any layer has
run. So it is here that positions and padding become tables of the kernels; a layer only uses them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False)
class Sight:
    """Row r of an entry stands at column start + r of the keys that a layer's cache returns, and
    sees the columns from max(first, start + r - left) to min(end - 1, start + r + right); a side
    that is None has no bound.

    batch, queries, keys: sizes of a forward; keys counts the columns, filled or not.
    start: int32 [B]; None where neither side has a bound, or the last row is at the last column.
    end: int32 [B], columns that exist, without pads on the right; None for all of them, which is
        where there are no tables at all.
    first: int32 [B], pads on the left; None where there are none.
    newest: whether the last row stands at the last key that exists, in every entry; a single row
        always does, or is a pad.
    """

    batch: int
    queries: int
    keys: int
    left: int | None
    right: int | None
    start: torch.Tensor | None = None
    end: torch.Tensor | None = None
    first: torch.Tensor | None = None
    newest: bool = True

    ndim = 4  # transformers takes what has two dimensions for padding, and converts it

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the mask that this stands for; transformers reads the last one."""
        return self.batch, 1, self.queries, self.keys

    @property
    def plain(self) -> tuple[int | None, ...]:
        """What two of the same forward and kind of layers have in common."""
        return self.batch, self.queries, self.keys, self.left, self.right

    def to(self, device: torch.device) -> Sight:
        """On a device; the same where it is there already."""
        if self.end is None or self.end.device == device:
            return self
        start, end, first = (
            None if table is None else table.to(device)
            for table in (self.start, self.end, self.first)
        )
        return replace(self, start=start, end=end, first=first)


@dataclass(frozen=True, eq=False)
class Packed:
    """Tables of a call of `fmha.attention` where each entry is two packed ones behind each other:
    the keys before its first one, which nobody asks for, and its own with all its queries. Queries
    that are pads stand before the first key, at negative positions, and see none where the layer is
    causal.

    cu_seqlens_q, cu_seqlens_k: int32 [2 B + 1]; kv_lens: int32 [2 B]; q_offset: int32 [2 B] or
    None.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    kv_lens: torch.Tensor
    q_offset: torch.Tensor | None


def packed(sight: Sight, pitch: int) -> Packed:
    """The tables of a Sight with pads on the left. pitch: rows from the first key of an entry to
    that of the next one."""
    first, end, start = sight.first, sight.end, sight.start
    assert first is not None, "an entry without pads needs no packing"
    assert end is not None, "where there are pads on the left, it is known where keys end"
    entries = torch.arange(sight.batch, dtype=torch.int32, device=first.device)
    queries, keys = entries * sight.queries, entries * pitch
    nothing = torch.zeros_like(first)
    return Packed(
        _starts(queries, queries + sight.queries),
        _starts(keys + first, keys + sight.keys),
        _in_turn(nothing, end - first),
        None if start is None else _in_turn(nothing, start - first),
    )


def _in_turn(before: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    return torch.stack((before, own), 1).flatten()


def _starts(begins: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of packed entries, the last of which ends with the last of `ends`."""
    return torch.nn.functional.pad(_in_turn(begins, ends), (1, 0))
