"""The arguments of append, gather, copy and checksum, and every check of them.

Nothing here waits for a GPU: values of tables that live there are taken as they are, and kernels
pass over what is out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kernelkit.call.tensors import (
    has_whole_rows,
    is_broadcast,
    require_own_elements,
    require_rank,
    require_table,
    require_tensors,
    require_tma,
)
from kvcache.layouts.latent import LATENTS, ROPE, Latent
from kvcache.layouts.rows import (
    NO_ENTRY,
    DataRows,
    Rows,
    TailRows,
    check_mapping,
    check_pool,
    check_range,
)
from kvcache.movement.config import VECTOR_BYTES

LATENT_DTYPES = (torch.bfloat16, torch.float32)
MAX_SLOT_BYTES = 1 << 31

Pair = tuple[DataRows, torch.Tensor]


@dataclass(frozen=True)
class AppendSwa:
    """Arguments of `kvcache.append_swa`."""

    rows: Rows
    kv: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    backend: str = "auto"
    arch: str | None = None

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        rows, kv, slots = self.rows, self.kv, self.slots
        tables = {"positions": self.positions, "slots": slots, "cos": self.cos, "sin": self.sin}
        require_tensors(pool=rows.pool, kv=kv, **tables)
        latent = LATENTS.get(rows.record.name)
        if latent is None:
            raise NotImplementedError(f"record {rows.record.name}: supported are {[*LATENTS]}")
        _check_latent("kv", kv, LATENT_DTYPES, latent)
        check_rope(self.positions, self.cos, self.sin, len(kv))
        _check_entries("slots", slots, len(kv), rows)
        read = {name: spans_of(tensor) for name, tensor in ({"kv": kv} | tables).items()}
        require_apart(read, {"pool": written_by(rows)})
        require_once("slots", slots)
        if len(kv) and slots.device.type == "cpu":
            check_positions(self.positions[slots >= 0], len(self.cos))


@dataclass(frozen=True)
class Place:
    """Fields of `DataRows` but for the pool."""

    data_offset: int
    rows: int
    row_bytes: int
    record: str
    scale_offset: int = 0


@dataclass(frozen=True)
class AppendRows:
    """Arguments of `kvcache.append_rows`: rows of one pool or of two, see `DataRows`.

    other_pool: None if both are in one pool, since an operator may not be given two outputs in
        one memory.
    """

    pool: torch.Tensor
    x: torch.Tensor
    slots: torch.Tensor
    place: Place
    other_pool: torch.Tensor | None = None
    other: torch.Tensor | None = None
    other_place: Place | None = None
    backend: str = "auto"
    arch: str | None = None

    @cached_property
    def pairs(self) -> list[Pair]:
        """Rows of a pool, and the tensor whose rows they become."""
        found = [(DataRows(self.pool, **vars(self.place)), self.x)]
        if self.other is not None:
            pool = self.pool if self.other_pool is None else self.other_pool
            found.append((DataRows(pool, **vars(self.other_place)), self.other))
        return found

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        pairs = self.pairs
        for rows, _ in pairs:
            rows.check()
        entries = [len(rows.pool) * rows.rows for rows, _ in pairs]
        if len({*entries}) > 1:
            raise ValueError(f"pools of {entries} entries: one mapping needs equal numbers")
        named = dict(zip(("first", "second"), pairs, strict=False))
        _check_rows(named, "slots", self.slots)
        read = {name: spans_of(x) for name, (_, x) in named.items()}
        read["slots"] = spans_of(self.slots)
        written = {f"the rows of {name}": span_of(rows) for name, (rows, _) in named.items()}
        require_apart(read, written)
        require_once("slots", self.slots)


@dataclass(frozen=True)
class Gather:
    """Arguments of `kvcache.gather`."""

    rows: Rows
    indices: torch.Tensor
    out: torch.Tensor
    backend: str = "auto"
    arch: str | None = None

    @property
    def dequantises(self) -> bool:
        """Whether entries become numbers; else their bytes are copied."""
        latent = LATENTS.get(self.rows.record.name)
        return latent is not None and latent.group > 0

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        rows, indices, out = self.rows, self.indices, self.out
        record = rows.record
        if self.dequantises:
            require_tensors(pool=rows.pool, indices=indices, out=out)
            _check_latent("out", out, (torch.bfloat16,), LATENTS[record.name])
            _check_entries("indices", indices, len(out), rows)
            self._check_apart()
            return
        if record.scale_bytes:
            names = [name for name, latent in LATENTS.items() if latent.group]
            raise NotImplementedError(
                f"record {record.name} has scales apart from its data: supported are {names} "
                "and records without"
            )
        rows.check(align=1)
        _check_rows({"out": (rows.data_rows, out)}, "indices", indices)
        self._check_apart()

    def _check_apart(self) -> None:
        require_own_elements("out", self.out)
        read = {"the rows": written_by(self.rows), "indices": spans_of(self.indices)}
        require_apart(read, {"out": spans_of(self.out)})


@dataclass(frozen=True)
class CopySlots:
    """Arguments of `kvcache.copy_slots`; source is None if it is the target."""

    target: torch.Tensor
    pairs: torch.Tensor
    source: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    backend: str = "auto"
    arch: str | None = None

    @property
    def pools(self) -> dict[str, torch.Tensor]:
        """Pools of source and target."""
        source = self.target if self.source is None else self.source
        return {"source": source, "target": self.target}

    def pieces(self, piece_bytes: int) -> int:
        """Number of pieces of a slot: segments, checked on the CPU, or parts of `piece_bytes`."""
        sizes = [pool.shape[1] for pool in self.pools.values()]
        segments, device = self.segments, self.pairs.device
        if segments is None:
            if sizes[0] != sizes[1]:
                raise ValueError(f"slots of {sizes[0]} and {sizes[1]} bytes differ: pass segments")
            return -(-sizes[0] // piece_bytes)
        require_table("segments", segments, torch.int64, (None, 3))
        if segments.device != device or (segments.numel() and not segments.is_contiguous()):
            raise ValueError(
                f"segments on {segments.device} with strides {segments.stride()}, expected "
                f"contiguous on {device} like pairs"
            )
        if segments.device.type == "cpu":
            for segment in segments.tolist():
                _check_segment(segment, sizes)
            self._check_segments(segments.numpy())
        return len(segments)

    def _check_segments(self, segments: np.ndarray) -> None:
        """Check that no two segments write the same bytes.

        If slots are both read and written, also check that no segment reads what another writes.
        """
        begins, ends = segments[:, :2], segments[:, :2] + segments[:, 2:]
        _check_apart("the target", begins[:, 1], ends[:, 1])
        here = self.pairs[(self.pairs >= 0).all(1)]
        moved = (begins[:, 0] != begins[:, 1]).any()
        if self.source is None and moved and torch.isin(here[:, 0], here[:, 1]).any():
            _check_apart("a slot that is read and written", begins.ravel(), ends.ravel())

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        pairs = self.pairs
        for name, pool in self.pools.items():
            _check_copied(name, pool, pairs.device)
        require_table("pairs", pairs, torch.int64, (None, 2))
        if pairs.numel() and not pairs.is_contiguous():
            raise ValueError(f"pairs has strides {pairs.stride()}: not contiguous")
        for column, (name, pool) in enumerate(self.pools.items()):
            limit = f"the {name} has slots 0 to {len(pool) - 1}"
            check_mapping(f"pairs of the {name}", pairs[:, column], len(pool), limit)
        tables = {"pairs": pairs} if self.segments is None else {
            "pairs": pairs, "segments": self.segments}  # fmt: skip
        read = {name: spans_of(table) for name, table in tables.items()}
        require_apart(read, {"target": spans_of(self.target)})
        if pairs.device.type == "cpu":
            self._check_pairs(pairs[(pairs >= 0).all(1)])

    def _check_pairs(self, pairs: torch.Tensor) -> None:
        """Check that no pair reads or writes what another pair writes."""
        require_once("pairs of the target", pairs[:, 1])
        if self.source is not None:
            source, target = spans_of(self.source), spans_of(self.target)
            if source != target:
                require_apart({"source": source}, {"target": target})
                return
        elif self.segments is not None:
            return  # a slot may have parts that are read and others that are written
        both = torch.isin(pairs[:, 0], pairs[:, 1]) & (pairs[:, 0] != pairs[:, 1])
        if both.any():
            slot = int(pairs[both][0, 0])
            raise ValueError(f"pairs read slot {slot} and write it: only one is possible")


@dataclass(frozen=True)
class Checksum:
    """Arguments of `kvcache.checksum`."""

    pool: torch.Tensor
    slots: torch.Tensor
    begin: int
    end: int
    backend: str = "auto"
    arch: str | None = None

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        pool, slots, begin, end = self.pool, self.slots, self.begin, self.end
        check_pool("pool", pool)
        _check_reached("pool", pool, "slots", slots.device)
        limit = min(pool.shape[1], MAX_SLOT_BYTES)
        if begin % VECTOR_BYTES or end % VECTOR_BYTES or not 0 <= begin <= end <= limit:
            raise ValueError(
                f"bytes {begin} to {end}: multiples of {VECTOR_BYTES} from 0 to {limit}, in order"
            )
        require_table("slots", slots, torch.int64, (None,))
        check_mapping("slots", slots, len(pool), f"the pool has slots 0 to {len(pool) - 1}")


def _check_rows(pairs: Mapping[str, Pair], name: str, mapping: torch.Tensor) -> None:
    """Refuse rows of bytes as they are, which lie in their pools, and a mapping of that name, that
    no kernel takes."""
    first, x = next(iter(pairs.values()))
    tokens = len(x) if x.ndim else 0
    for rows, tensor in pairs.values():
        require_tensors(pool=rows.pool, x=tensor, **{name: mapping})
    for tensor_name, (rows, tensor) in pairs.items():
        _check_tokens(tensor_name, tensor, tokens, rows)
    _check_table(name, mapping, tokens, first)


def _check_latent(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], latent: Latent
) -> None:
    layout = f"[T, {latent.elements}]"
    require_rank(name, x, layout)
    if x.dtype not in dtypes or x.shape[1] != latent.elements:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}, expected {dtypes} {layout}")
    require_tma(name, x)


def _check_entries(name: str, mapping: torch.Tensor, tokens: int, rows: Rows) -> None:
    """Refuse rows that do not lie in their pool, or a mapping that is not of `tokens` entries."""
    rows.check(VECTOR_BYTES)
    _check_table(name, mapping, tokens, rows)


def _check_table(name: str, mapping: torch.Tensor, tokens: int, rows: Rows | DataRows) -> None:
    """Refuse a mapping that is not of `tokens` entries."""
    require_table(name, mapping, torch.int64, (tokens,))
    entries = len(rows.pool) * rows.rows
    limit = f"{len(rows.pool)} slots of {rows.rows} rows have 0 to {entries - 1}"
    check_mapping(name, mapping, entries, limit)


def _check_tokens(name: str, x: torch.Tensor, tokens: int, rows: DataRows) -> None:
    """Refuse what is not [T, ...] with the bytes of a row in one piece for every token."""
    if not x.ndim or len(x) != tokens:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [{tokens}, ...]")
    row_bytes = x.numel() // tokens * x.itemsize if tokens else rows.row_bytes
    if row_bytes != rows.row_bytes:
        raise ValueError(
            f"{name} has {row_bytes} bytes for a token, record {rows.record} has {rows.row_bytes}"
        )
    if tokens and (not has_whole_rows(x) or is_broadcast(x)):
        raise ValueError(f"{name} has strides {x.stride()}: elements of a token not contiguous")


def _check_copied(name: str, pool: torch.Tensor, device: torch.device) -> None:
    check_pool(name, pool)
    slot_bytes = pool.shape[1]
    if slot_bytes % VECTOR_BYTES or slot_bytes >= MAX_SLOT_BYTES:
        raise ValueError(
            f"{name} has slots of {slot_bytes} bytes: a multiple of {VECTOR_BYTES} below "
            f"{MAX_SLOT_BYTES}"
        )
    _check_reached(name, pool, "pairs", device)


def _check_reached(name: str, pool: torch.Tensor, table: str, device: torch.device) -> None:
    """Refuse a pool that is neither on the device of a table nor in pinned memory of the host."""
    pinned = device.type == "cuda" and pool.device.type == "cpu" and pool.is_pinned()
    if pool.device != device and not pinned:
        given = f"{name} is on {pool.device}"
        raise ValueError(f"{given}, expected {device} as for {table}, or pinned memory")


def _check_apart(where: str, begins: np.ndarray, ends: np.ndarray) -> None:
    """ValueError for ranges of bytes of which one reaches into another; empty ones do not count."""
    there = np.flatnonzero(begins < ends)
    order = there[np.argsort(begins[there], kind="stable")]
    wrong = np.flatnonzero(ends[order[:-1]] > begins[order[1:]])
    if len(wrong):
        one, other = order[wrong[0] : wrong[0] + 2]
        raise ValueError(
            f"segments overlap in {where}: bytes {begins[one]} to {ends[one]} and from "
            f"{begins[other]} on"
        )


def _check_segment(segment: Sequence[int], sizes: Sequence[int]) -> None:
    *offsets, size = segment
    inside = size >= 0 and all(
        0 <= begin <= limit - size for begin, limit in zip(offsets, sizes, strict=True)
    )
    if not inside or any(number % VECTOR_BYTES for number in segment):
        raise ValueError(
            f"segment {tuple(segment)} (offset in the source, in the target, bytes): multiples of "
            f"{VECTOR_BYTES} within slots of {sizes[0]} and {sizes[1]} bytes"
        )


# ---- Angles of tokens


def check_rope(positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> None:
    """Refuse, by ValueError, what is no table of angles, or no positions of `tokens` tokens."""
    require_table("positions", positions, torch.int64, (tokens,))
    check_angles(cos, sin)
    if tokens and not len(cos):
        raise ValueError(f"cos has shape {tuple(cos.shape)}, expected a row for every position")


def check_angles(cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Refuse, by ValueError, what are no tables of cosines and sines of the same positions."""
    require_table("cos", cos, torch.float32, (None, ROPE // 2))
    require_table("sin", sin, torch.float32, (len(cos), ROPE // 2))
    require_tma("cos", cos)
    require_tma("sin", sin)


def check_positions(positions: torch.Tensor, angles: int) -> None:
    """Refuse, by ValueError, a position that the tables do not have; on the CPU alone."""
    check_range("positions", positions, (0, angles), f"the tables have 0 to {angles - 1}")


# ---- Memory that a launch writes may not be read or written by another part of it. Checked are
# overlaps of addresses, and numbers that occur twice in tables on the CPU.


@dataclass(frozen=True)
class Spans:
    """`count` pieces of `size` bytes, one every `stride` bytes from `begin` on."""

    begin: int
    stride: int
    count: int
    size: int

    @property
    def end(self) -> int:
        """End of the last piece."""
        return self.begin + (self.count - 1) * self.stride + self.size

    @property
    def begins(self) -> np.ndarray:
        """int64 [count]."""
        return self.begin + np.arange(self.count, dtype=np.int64) * self.stride


def spans_of(tensor: torch.Tensor) -> Spans:
    """Return the spans of a tensor's first dimension, or the whole tensor as one span.

    The spans need the other dimensions to be contiguous.
    """
    if not tensor.numel() or tensor.device.type == "meta":
        return Spans(0, 0, 0, 0)
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    size = tensor.itemsize * (1 + sum((length - 1) * stride for length, stride in sizes))
    if tensor.ndim < 2 or not has_whole_rows(tensor):
        return Spans(tensor.data_ptr(), 0, 1, size)
    count, stride = len(tensor), tensor.stride(0) * tensor.itemsize
    return Spans(tensor.data_ptr(), stride, count, tensor.numel() // count * tensor.itemsize)


def written_by(rows: Rows) -> Spans:
    """The data of all entries of `rows`, and their scales where these lie behind."""
    ends = [rows.data_offset + rows.rows * rows.record.data_bytes]
    begin = rows.data_offset
    if rows.record.scale_bytes:
        ends.append(rows.scale_offset + rows.rows * rows.record.scale_bytes)
        begin = min(begin, rows.scale_offset)
    return _of_slots(rows.pool, begin, max(ends) - begin)


def written_by_tail(tail: TailRows) -> Spans:
    """The rows of a tail in all slots."""
    return _of_slots(tail.pool, tail.offset, tail.nbytes)


def span_of(rows: DataRows) -> Spans:
    """The data of all entries."""
    return _of_slots(rows.pool, rows.data_offset, rows.rows * rows.row_bytes)


def _of_slots(pool: torch.Tensor, begin: int, size: int) -> Spans:
    """`size` bytes of every slot, from byte `begin` of it on."""
    if not len(pool) or pool.device.type == "meta":
        return Spans(0, 0, 0, 0)
    return Spans(pool.data_ptr() + begin, pool.stride(0), len(pool), size)


def overlap(one: Spans, other: Spans) -> bool:
    """Whether a byte is in both."""
    if not one.count or not other.count or one.end <= other.begin or other.end <= one.begin:
        return False
    if one.count == other.count == 1:
        return True
    few, many = sorted((one, other), key=lambda spans: spans.count)
    begins = np.sort(many.begins)
    # Of pieces that are equally long the last one that begins before an end reaches the furthest.
    last = np.searchsorted(begins, few.begins + few.size, "left") - 1
    found = last >= 0
    return bool((begins[last[found]] + many.size > few.begins[found]).any())


def require_apart(read: dict[str, Spans], written: dict[str, Spans]) -> None:
    """ValueError for memory that is both read and written, or written as two things."""
    names = [*written]
    for place, name in enumerate(names):
        others = {**read, **{other: written[other] for other in names[place + 1 :]}}
        for other, spans in others.items():
            if overlap(spans, written[name]):
                raise ValueError(
                    f"{other} and {name} share memory, from {max(spans.begin, written[name].begin)}"
                    f" on: an output may not overlap an input"
                )


def require_once(name: str, numbers: torch.Tensor) -> None:
    """ValueError for a number other than NO_ENTRY that occurs twice; looked at on the CPU alone."""
    if numbers.device.type != "cpu" or numbers.numel() < 2:
        return
    values = numbers.numpy()
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    twice = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != NO_ENTRY))
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2].tolist())
        raise ValueError(
            f"{name} has {int(ordered[twice[0]])} twice, at {first} and {second}: each may be "
            "written once"
        )
