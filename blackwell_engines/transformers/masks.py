"""Convert masks of transformers to bounds that kernels accept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

# ---- What queries see, in the terms of the kernels
#
# Transformers asks for a mask once in a forward and for each kind of layers, before any layer has
# run. So it is here that positions and padding become tables of the kernels; a layer only uses
# them.


@dataclass(frozen=True, eq=False)
class Sight:
    """Keys that are visible to the queries of a forward.

    Row r of an entry has column start + r of the keys that a layer's cache returns.
    It sees the columns from max(first, start + r - left) to min(end - 1, start + r + right). A side
    that is None has no bound.

    batch, queries, keys: sizes of a forward; keys counts the columns, filled or not.
    start: int32 [B]; None if neither side has a bound, or the last row is at the last column.
    end: int32 [B], columns that exist, without pads on the right; None for all of them, which is
        the case without tables.
    first: int32 [B], pads on the left; None if there are none.
    newest: whether the last row is at the last key that exists, in every entry. A single row always
        is, or is a pad.
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
        """Shape of the mask that this replaces; transformers reads the last size."""
        return self.batch, 1, self.queries, self.keys

    @property
    def plain(self) -> tuple[int | None, ...]:
        """Values that layers of one kind share in a forward."""
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
    """Tables of a call of `fmha.attention` in which each entry becomes two consecutive packed ones.

    The first has the keys before the entry's first key, and no queries. The second has the entry's
    keys and all its queries. Queries that are pads get negative positions, before the first key,
    and see none if the layer is causal.

    cu_seqlens_q, cu_seqlens_k: int32 [2 B + 1]
    kv_lens: int32 [2 B]
    q_offset: int32 [2 B] or None
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
    """Return cumulative starts of packed entries; the last one is the last of `ends`."""
    return torch.nn.functional.pad(_in_turn(begins, ends), (1, 0))


# ---- `keys_in_sight`: what transformers registers as a mask, without a mask
#
# A mask arrives as a function of positions, made of others by transformers, beside the padding [B,
# S]. Known functions become a left and a right bound, padding a first and a last key; whatever else
# there is raises, because a kernel that did not see it would be silently wrong.

Sides = tuple[int | None, int | None]
MaskFunction = Callable[..., Any]

CAUSAL: Sides = (None, 0)
EVERYTHING: Sides = (None, None)
# Where transformers makes a function of positions -> its bounds by what it was made with.
MADE: dict[str, Callable[[Any], Sides]] = {
    "sliding_window_overlay.<locals>.inner_mask": lambda window: (window - 1, None),
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda window: (window, window),
}
BOTH = "and_masks.<locals>.and_mask"


def keys_in_sight(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | Sight | None = None,
    **options: Any,
) -> Sight:
    """The interface of masks of transformers; options are what other implementations need.

    Args:
        batch_size, q_length: of the new tokens.
        kv_length: columns that the cache of a layer returns, filled or not.
        q_offset: tokens before the new ones, an int or int64 []; kv_offset: those of them that the
            cache has dropped.
        mask_function: causal, bidirectional, or either with a sliding window.
        attention_mask: bool [B, S], True for tokens, in one piece for every entry; or what an
            earlier call returned, which `generate` makes ahead.

    Raises:
        NotImplementedError: for another mask function.
        ValueError: for padding in the middle of an entry, and sizes that disagree.

    Reads the padding on the host, once; but where it is traced.
    """
    left, right = sides_of(mask_function)
    if left is not None and right is None:
        raise NotImplementedError(
            f"a window of {left + 1} keys to the left, unbounded to the right"
        )
    sight = Sight(batch_size, q_length, kv_length, left, right)
    if isinstance(attention_mask, Sight):
        if attention_mask.plain != sight.plain:
            raise ValueError(f"a mask of {attention_mask.plain} for layers of {sight.plain}")
        return attention_mask
    start = q_offset - kv_offset
    stop = start + q_length if right == 0 else kv_length
    if attention_mask is None:
        return _unpadded(sight, start, stop, options.get("device"))
    if attention_mask.ndim != 2 or attention_mask.shape[1] <= kv_offset:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)}: [B, S] of all tokens so far, those "
            f"{kv_offset} that a sliding cache has dropped among them"
        )
    return _padded(sight, start, stop, attention_mask[:, kv_offset : kv_offset + kv_length])


def sides_of(mask_function: MaskFunction) -> Sides:
    """(left, right): columns before and behind the own one that a mask function shows.

    Raises:
        NotImplementedError: naming a function that is no such window.
    """
    if mask_function is masking_utils.causal_mask_function:
        return CAUSAL
    if mask_function is masking_utils.bidirectional_mask_function:
        return EVERYTHING
    return _sides_of_made(mask_function)


@torch.compiler.disable(reason="what transformers made a mask function of cannot be traced")
def _sides_of_made(mask_function: MaskFunction) -> Sides:
    """Return the sides of a mask function that another function made."""
    name = mask_function.__qualname__
    made_with = [cell.cell_contents for cell in mask_function.__closure__ or ()]
    if mask_function.__module__ == masking_utils.__name__ and len(made_with) == 1:
        if name in MADE:
            return MADE[name](made_with[0])
        if name == BOTH:
            lefts, rights = zip(*map(sides_of, made_with[0]), strict=True)
            return _smallest(lefts), _smallest(rights)
    raise NotImplementedError(
        f"mask function {name}: supported are causal and bidirectional attention and sliding "
        "windows; not chunks, packed sequences, blocks of images, or custom functions"
    )


def _smallest(sizes: tuple[int | None, ...]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def _unpadded(sight: Sight, start: Any, stop: Any, device: Any) -> Sight:
    """Return the sight of a forward without padding.

    Tables are omitted if they add nothing. A single new token always has them, so that its kernel
    does not depend on the cache.
    """
    grown = isinstance(start, int) and stop == sight.keys == start + sight.queries
    if grown and sight.queries > 1:
        return sight
    return _placed(sight, start, _table(sight, stop, device))


def _padded(sight: Sight, start: Any, stop: Any, padding: torch.Tensor) -> Sight:
    """padding: bool [B, n], of the columns that it is known for; all others are pads."""
    places = torch.arange(padding.shape[1], dtype=torch.int32, device=padding.device)
    shown = padding & (places < stop)
    end = torch.where(shown, places + 1, 0).amax(1)
    first = torch.minimum(torch.where(shown, places, sight.keys).amin(1), end)
    holes = end - first - shown.sum(1)
    first, end = _table(sight, first, padding.device), _table(sight, end, padding.device)
    if is_tracing(padding):
        torch._assert_async(holes.amax() == 0, "attention_mask has pads between tokens of an entry")
        # A single query that is a pad lies after its entry's end; its row is not used.
        return _placed(sight, start, end, first=first, newest=sight.queries == 1)
    facts = torch.stack((first.amax(), (stop - end).amax(), holes.amax())).tolist()
    if facts[2]:
        entry = int(holes.argmax())
        raise ValueError(
            f"attention_mask of entry {entry} has {int(holes[entry])} pads between its tokens "
            f"{int(first[entry])} and {int(end[entry]) - 1}: pads have to be at its ends"
        )
    if not facts[0] and not facts[1]:
        return _unpadded(sight, start, stop, padding.device)
    newest = sight.queries == 1 or not facts[1]
    return _placed(sight, start, end, first=first if facts[0] else None, newest=newest)


def _placed(sight: Sight, start: Any, end: torch.Tensor, **padding: Any) -> Sight:
    """Add tables of the ends of keys and, if a side has a bound, of the positions of queries."""
    bounded = (sight.left, sight.right) != EVERYTHING
    where = _table(sight, start, end.device) if bounded else None
    return replace(sight, start=where, end=end, **padding)


def _table(sight: Sight, value: Any, device: Any) -> torch.Tensor:
    """int32 [B] of a number, which may be on the device, or of a tensor [B]."""
    if isinstance(value, torch.Tensor):
        return value.to(device, torch.int32).expand(sight.batch).contiguous()
    return torch.full((sight.batch,), value, dtype=torch.int32, device=device)
