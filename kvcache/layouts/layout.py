"""Contents of a block and of a request's state, as data that give every offset of the cache.

    block       block_tokens original tokens of all layers: for each stream and layer a page of
                block_tokens / ratio entries; a packed stream has one page for all its layers
    state       one per request: rings (the last tokens as they are) and tails (rows that wait for
                compression), one of each per layer
    checkpoint  the rows of a state that a request at some multiple of block_tokens still needs,
                side by side

Each ends in GUARD_BYTES that nobody writes but the canary. All sizes are bytes. No torch, no DSL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from kernelkit.plan.dtypes import FP32_BYTES
from kvcache.checks import require, whole
from kvcache.layouts.records import TMA_ALIGN, Record, round_up

GUARD_BYTES = 64
# Far beyond any model; offsets are counted piece by piece, and more would take minutes and memory.
MAX_COPIES = 1 << 16  # layers
MAX_TOKENS = 1 << 20  # of a window, a block, a draft
MAX_TAIL_RATIO, MAX_WIDTH = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Stream:
    """Entries that stay: one for `ratio` tokens and copy, in pages of the paged pool.

    copies: layers that have entries of their own.
    packed: the entries of all copies share a page, which wastes nothing for one or two layers.
    of_layer: for each layer of the model the copy it reads, or None; layer i's is i by default.
    """

    name: str
    record: Record
    ratio: int
    copies: int
    packed: bool = False
    of_layer: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self)

    @property
    def bytes_per_token(self) -> float:
        """Payload."""
        return self.copies * self.record.bytes / self.ratio


@dataclass(frozen=True)
class Ring:
    """The last `window` entries of a sliding window, position x in row x % rows."""

    name: str
    record: Record
    window: int
    copies: int
    of_layer: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self)

    def rows(self, draft: int) -> int:
        """Number of rows that let a step append `draft` tokens and take them all back."""
        return self.window + max(draft, 1) - 1

    def page_bytes(self, draft: int) -> int:
        """Bytes of one copy's page."""
        return self.record.page_bytes(self.rows(draft))

    @property
    def marked_bytes(self) -> int:
        """Bytes of one copy in a checkpoint that a step marks; see `Layout.can_mark`."""
        return (self.window - 1) * self.record.data_bytes

    def live(self, position: int, draft: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what a request of `position` tokens still needs, in a copy's page.

        The next query sees itself and window - 1 tokens before it.
        """
        rows, record = self.rows(draft), self.record
        for first, count in _runs(max(0, position - self.window + 1), position, rows):
            yield first * record.data_bytes, count * record.data_bytes
            if record.scale_bytes:
                scales = rows * record.data_bytes
                yield scales + first * record.scale_bytes, count * record.scale_bytes


@dataclass(frozen=True)
class Tail:
    """Rows of tokens that a compressor has not compressed yet, in fp32.

    Every `ratio` tokens the compressor emits an entry from the last `overlap` windows.
    Raw: position x is in row x % rows of [rows, overlap * width] values, followed by as many
    scores; the first half of a row is for the window that follows. Online: row x % rows has the
    running [maximum, sum, value] of the window instead, three times `width`, after position x.
    """

    name: str
    ratio: int
    width: int
    copies: int
    overlap: int = 1
    online: bool = False
    of_layer: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        _check_fields(self)

    def rows(self, draft: int) -> int:
        """Number of rows that let a step append `draft` tokens and take them all back."""
        return draft + 1 if self.online else self.overlap * self.ratio + max(draft, 1) - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of values or of scores; of all three, online."""
        return FP32_BYTES * self.width * (3 if self.online else self.overlap)

    def page_bytes(self, draft: int) -> int:
        """Bytes of one copy's page."""
        return self.rows(draft) * self.row_bytes * (1 if self.online else 2)

    def live(self, position: int, draft: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what a request of `position` tokens still needs, in a copy's page."""
        rows, inside = self.rows(draft), position % self.ratio
        begun = position - inside
        if self.online:
            if inside:
                yield (position - 1) % rows * self.row_bytes, self.row_bytes
            return
        for part in (0, rows * self.row_bytes):
            for first, count in _runs(begun, position, rows):
                yield part + first * self.row_bytes, count * self.row_bytes
            half = self.row_bytes // self.overlap
            for row in range(max(0, begun - (self.overlap - 1) * self.ratio), begun):
                yield part + row % rows * self.row_bytes, (self.overlap - 1) * half


def _runs(begin: int, end: int, rows: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) where positions begin .. end - 1 of a ring lie side by side."""
    if begin == end:
        return
    first, count = begin % rows, end - begin
    yield first, min(count, rows - first)
    if first + count > rows:
        yield 0, first + count - rows


@dataclass(frozen=True)
class Place:
    """Location of the rows of one copy in a slot of a pool, see `kvcache.layouts.rows.Rows`."""

    record: Record
    rows: int
    data_offset: int
    scale_offset: int


@dataclass(frozen=True)
class Region:
    """A named piece of a slot, for those who move or register memory piece by piece."""

    name: str
    copy: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Layout:
    """The cache of a model.

    block_tokens: tokens of a block, a multiple of every ratio.
    draft: the most tokens of a step that may be taken back.
    model_layers: number of layers for the layer maps, 0 without any.
    """

    name: str
    block_tokens: int
    streams: tuple[Stream, ...]
    rings: tuple[Ring, ...] = ()
    tails: tuple[Tail, ...] = ()
    draft: int = 0
    model_layers: int = 0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def arrays(self) -> tuple[Stream | Ring | Tail, ...]:
        """All of them."""
        return (*self.streams, *self.rings, *self.tails)

    @property
    def _of_state(self) -> tuple[Ring | Tail, ...]:
        return (*self.rings, *self.tails)

    @cached_property
    def _by_name(self) -> dict[str, Stream | Ring | Tail]:
        return {array.name: array for array in self.arrays}

    @property
    def has_state(self) -> bool:
        """Whether a request has anything outside its blocks."""
        return bool(self.rings or self.tails)

    @property
    def window(self) -> int:
        """Tokens of the widest ring, 0 without one."""
        return max((ring.window for ring in self.rings), default=0)

    @property
    def bytes_per_token(self) -> float:
        """Payload in the paged pool of a long request: what papers quote."""
        return sum(stream.bytes_per_token for stream in self.streams)

    def entries(self, stream: Stream) -> int:
        """Entries of one copy in a block."""
        require("stream", stream, Stream)
        return self.block_tokens // stream.ratio

    @cached_property
    def block_regions(self) -> tuple[Region, ...]:
        """The pages of a block in order; a packed stream has one."""
        sizes = []
        for stream in self.streams:
            entries, pages = self.entries(stream), stream.copies
            if stream.packed:
                entries, pages = entries * pages, 1
            size = stream.record.page_bytes(entries)
            sizes += [(stream.name, copy, size, stream.record.page_align) for copy in range(pages)]
        return _placed(sizes)

    @cached_property
    def state_regions(self) -> tuple[Region, ...]:
        """The pages of a state in order."""
        sizes = []
        for array in self._of_state:
            align = array.record.page_align if isinstance(array, Ring) else TMA_ALIGN
            size = round_up(array.page_bytes(self.draft), TMA_ALIGN)
            sizes += [(array.name, copy, size, align) for copy in range(array.copies)]
        return _placed(sizes)

    @cached_property
    def block_bytes(self) -> int:
        """Stride of blocks."""
        return self._slot_bytes(self.block_regions, [s.record.page_align for s in self.streams])

    @cached_property
    def state_bytes(self) -> int:
        """Stride of states, 0 where requests have none."""
        if not self.has_state:
            return 0
        return self._slot_bytes(self.state_regions, [r.record.page_align for r in self.rings])

    @cached_property
    def checkpoint_bytes(self) -> int:
        """Stride of checkpoints: room for the most that a state needs at a block's boundary."""
        if not self.has_state:
            return 0
        return sum(a.copies * self._most_live(a) for a in self._of_state) + GUARD_BYTES

    def _most_live(self, array: Ring | Tail) -> int:
        """Bytes of a copy that a checkpoint holds, wherever in the ring they begin."""
        rows, block = array.rows(self.draft), self.block_tokens
        first = round_up(self.window, block) + block  # from where on no window is cut short
        positions = range(first, first + rows * block, block)
        return max(sum(size for _, size in self._live(array, p)) for p in positions)

    @staticmethod
    def _slot_bytes(regions: tuple[Region, ...], aligns: list[int]) -> int:
        end = max(region.offset + region.bytes for region in regions)
        return round_up(end + GUARD_BYTES, math.lcm(TMA_ALIGN, *aligns))

    @cached_property
    def block_payload(self) -> int:
        """Bytes of the entries of a full block."""
        return sum(self.entries(s) * s.copies * s.record.bytes for s in self.streams)

    @cached_property
    def state_payload(self) -> int:
        """Bytes of the rows of a state."""
        rings = sum(r.copies * r.rows(self.draft) * r.record.bytes for r in self.rings)
        return rings + sum(t.copies * t.page_bytes(self.draft) for t in self.tails)

    def payload(self, tokens: int) -> int:
        """Bytes of the entries that a request of `tokens` tokens has in the paged pool."""
        tokens = whole("tokens", tokens)
        return sum(tokens // s.ratio * s.copies * s.record.bytes for s in self.streams)

    def blocks(self, tokens: int) -> int:
        """Blocks that a request of `tokens` tokens has."""
        if type(tokens) is not int or tokens < 0:
            tokens = whole("tokens", tokens)
        return -(-tokens // self.block_tokens)

    def live(self, position: int) -> list[tuple[int, int]]:
        """(offset, bytes) in a state of what a request of `position` tokens still needs of it."""
        position = whole("position", position)
        return [
            (self.offset(array.name, copy) + offset, size)
            for array in self._of_state
            for offset, size in self._live(array, position)
            for copy in range(array.copies)
        ]

    def _live(self, array: Ring | Tail, position: int) -> list[tuple[int, int]]:
        """`live` of one copy, rounded out to what copies move: a row of scales may be 8 bytes."""
        found = []
        for offset, size in array.live(position, self.draft):
            start = offset // TMA_ALIGN * TMA_ALIGN
            found.append((start, round_up(offset + size, TMA_ALIGN) - start))
        return found

    def segments(self, position: int) -> list[tuple[int, int, int]]:
        """(offset in the state, offset in the checkpoint, bytes) of a checkpoint at `position`.

        ValueError inside a block, where tails have more than a checkpoint has room for.
        """
        if whole("position", position, None) < 0 or position % self.block_tokens:
            raise ValueError(
                f"a checkpoint at {position}: at least 0, a multiple of {self.block_tokens} tokens"
            )
        live = self.live(position)
        starts = accumulate((size for _, size in live), initial=0)
        return [(offset, start, size) for (offset, size), start in zip(live, starts, strict=False)]

    @cached_property
    def can_mark(self) -> bool:
        """Whether a step may write a checkpoint at a boundary inside it, from its own tokens.

        True if a state has rings alone, of plain rows, and a boundary is where each ring begins
        anew: then the rows of a copy lie in one piece, at the same place in every checkpoint.
        """
        return self.has_state and not self.tails and all(map(self._is_marked, self.rings))

    def _is_marked(self, ring: Ring) -> bool:
        record, anew = ring.record, self.block_tokens % ring.rows(self.draft) == 0
        return anew and ring.window > 1 and not (record.scale_bytes or record.bytes % TMA_ALIGN)

    def mark(self, name: str, copy: int) -> Place:
        """Return the location in a checkpoint of a copy of ring `name`: window - 1 rows, in order.

        Agrees with `segments`. Raises ValueError for another array, or unless `can_mark`.
        """
        ring = self.find(name)
        if not (self.can_mark and isinstance(ring, Ring)):
            raise ValueError(f"{name!r} of {self.name}: only rings that begin anew at boundaries")
        if not 0 <= whole("copy", copy, None) < ring.copies:
            raise NoSuchCopy(f"copy {copy} of {name!r}: it has {ring.copies}")
        offset = copy * ring.marked_bytes
        for other in self.rings[: self.rings.index(ring)]:
            offset += other.copies * other.marked_bytes
        return Place(ring.record, ring.window - 1, offset, offset)

    def alike(self, position: int) -> int:
        """An early position with the same `live`, and inside a block at the same place: for those
        who keep tables by position."""
        position = whole("position", position)
        first, period = self._repetition
        return position if position < first else first + (position - first) % period

    @cached_property
    def _repetition(self) -> tuple[int, int]:
        """(from where on, every how many tokens) `live` repeats."""
        reach = [ring.window for ring in self.rings]
        reach += [(tail.overlap - 1) * tail.ratio for tail in self.tails]
        rows = [array.rows(self.draft) for array in self._of_state]
        first = round_up(max(reach, default=0), self.block_tokens)
        return first, math.lcm(self.block_tokens, *rows)

    def find(self, name: str) -> Stream | Ring | Tail:
        """The stream, ring or tail of that name; NoSuchArray names those that are there."""
        require("name", name, str)
        if name not in self._by_name:
            raise NoSuchArray(f"{name!r}: the layout {self.name} has {sorted(self._by_name)}")
        return self._by_name[name]

    def place(self, name: str, copy: int) -> Place:
        """Return the location of the rows of `copy` of a stream or ring in a slot."""
        array = self.find(name)
        if isinstance(array, Tail):
            raise TypeError(f"{name!r} is a tail of fp32 rows, not of records")
        if not 0 <= whole("copy", copy, None) < array.copies:
            raise NoSuchCopy(f"copy {copy} of {name!r}: it has {array.copies}")
        rows = array.rows(self.draft) if isinstance(array, Ring) else self.entries(array)
        record = array.record
        packed = isinstance(array, Stream) and array.packed
        first, page_rows = (copy * rows, array.copies * rows) if packed else (0, rows)
        start = self.offset(name, 0 if packed else copy)
        scales = start + page_rows * record.data_bytes
        return Place(
            record, rows, start + first * record.data_bytes, scales + first * record.scale_bytes
        )

    def offset(self, name: str, page: int) -> int:
        """Byte offset of a page in its slot: of copy `page`, or page 0 of a packed stream."""
        place = self.find(name).name, whole("page", page, None)
        if place not in self._offsets:
            raise NoSuchCopy(f"page {page} of {name!r}: it has fewer")
        return self._offsets[place]

    @cached_property
    def _offsets(self) -> dict[tuple[str, int], int]:
        regions = (*self.block_regions, *self.state_regions)
        return {(region.name, region.copy): region.offset for region in regions}


def _placed(sizes: list[tuple[str, int, int, int]]) -> tuple[Region, ...]:
    """Regions one behind another from (name, copy, bytes, alignment)."""
    regions, end = [], 0
    for name, copy, size, align in sizes:
        start = round_up(end, align)
        regions.append(Region(name, copy, start, size))
        end = start + size
    return tuple(regions)


class NoSuchArray(KeyError, ValueError):
    """A layout has no stream, ring or tail of that name."""

    __str__ = Exception.__str__


class NoSuchCopy(IndexError, ValueError):
    """An array has fewer copies."""


def _check_types(layout: Layout) -> None:
    """TypeError for fields that are of another kind."""
    require("name", layout.name, str)
    for name, kind in (("streams", Stream), ("rings", Ring), ("tails", Tail)):
        require(name, getattr(layout, name), tuple)
        for place, array in enumerate(getattr(layout, name)):
            require(f"{name}[{place}]", array, kind)
    for name in ("block_tokens", "draft"):
        object.__setattr__(layout, name, whole(name, getattr(layout, name), None, MAX_TOKENS))
    layers = whole("model_layers", layout.model_layers, 0, MAX_COPIES)
    object.__setattr__(layout, "model_layers", layers)


def _check_fields(array: Stream | Ring | Tail) -> None:
    """TypeError for a field of another kind, ValueError for a number beyond any model's; numbers
    become ints."""
    require("name", array.name, str)
    kinds = {"record": Record, "of_layer": tuple, "packed": bool, "online": bool}
    limits = {"window": MAX_TOKENS, "copies": MAX_COPIES, "overlap": None, "width": MAX_WIDTH}
    limits["ratio"] = MAX_TAIL_RATIO if isinstance(array, Tail) else MAX_TOKENS
    for field in array.__dataclass_fields__:
        value, name = getattr(array, field), f"{array.name}: {field}"
        if field in limits:
            least = 1 if field == "width" else None
            object.__setattr__(array, field, whole(name, value, least, limits[field]))
        elif field in kinds:
            require(name, value, kinds[field])
    copies = (
        copy if copy is None else whole(f"{array.name}: of_layer[{layer}]", copy, None, MAX_COPIES)
        for layer, copy in enumerate(array.of_layer)
    )
    object.__setattr__(array, "of_layer", tuple(copies))


def _check(layout: Layout) -> None:
    """ValueError for a layout that contradicts itself, by value and limit."""
    _check_types(layout)
    arrays = layout.arrays
    names = [array.name for array in arrays]
    if not layout.streams:
        raise ValueError(f"{layout.name}: a cache has at least one stream of entries")
    if len(set(names)) < len(names):
        raise ValueError(f"{layout.name}: names {names} are not distinct")
    if layout.block_tokens < 1 or layout.draft < 0:
        raise ValueError(
            f"{layout.name}: block_tokens {layout.block_tokens} at least 1, "
            f"draft {layout.draft} at least 0"
        )
    for array in arrays:
        if array.copies < 1:
            raise ValueError(f"{array.name}: {array.copies} copies, at least 1")
        if array.of_layer and len(array.of_layer) != layout.model_layers:
            raise ValueError(
                f"{array.name}: a map of {len(array.of_layer)} layers, "
                f"the model has {layout.model_layers}"
            )
        named = (copy for copy in array.of_layer if copy is not None)
        wrong = [copy for copy in named if not 0 <= copy < array.copies]
        if wrong:
            raise ValueError(
                f"{array.name}: copies {wrong} in its map, but there are {array.copies}"
            )
        ratio = getattr(array, "ratio", 1)
        if ratio < 1 or layout.block_tokens % ratio:
            raise ValueError(
                f"{array.name}: one entry for {ratio} tokens does not divide a block of "
                f"{layout.block_tokens}"
            )
    for tail in layout.tails:
        if tail.overlap not in (1, 2) or (tail.online and tail.overlap > 1):
            raise ValueError(
                f"{tail.name}: overlap {tail.overlap}, online {tail.online}: "
                "1 or 2 windows, 1 if online"
            )
    for ring in layout.rings:
        if ring.window < 1:
            raise ValueError(f"{ring.name}: a window of {ring.window} tokens, at least 1")
