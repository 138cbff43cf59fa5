"""The arguments of append, gather, copy and checksum, and every check of them.

Nothing here waits for a GPU: values of tables that live there are taken as they are, and kernels
pass over what is out of range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
from kvcache.layouts.latent import LATENTS, Latent
from kvcache.layouts.layout import Place
from kvcache.layouts.rows import Rows, check_mapping, check_pool
from kvcache.movement.checks import (
    check_positions,
    check_rope,
    require_apart,
    require_once,
    spans_of,
    written_by,
)
from kvcache.movement.config import VECTOR_BYTES

LATENT_DTYPES = (torch.bfloat16, torch.float32)
MAX_SLOT_BYTES = 1 << 31

Pair = tuple[Rows, torch.Tensor]


@dataclass(frozen=True)
class AppendSwa:
    """Of `kvcache.append_swa`."""

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
class AppendRows:
    """Of `kvcache.append_rows`: rows of one pool, or of two. other_pool: None where both are in
    the same one, since an operator may not be given one memory to write to twice."""

    pool: torch.Tensor
    x: torch.Tensor
    slots: torch.Tensor
    place: Place
    other_pool: torch.Tensor | None = None
    other: torch.Tensor | None = None
    other_place: Place | None = None
    backend: str = "auto"
    arch: str | None = None

    @property
    def pairs(self) -> list[Pair]:
        """Rows of a pool, and the tensor whose rows they become."""
        found = [(Rows(self.pool, **vars(self.place)), self.x)]
        if self.other is not None:
            pool = self.pool if self.other_pool is None else self.other_pool
            found.append((Rows(pool, **vars(self.other_place)), self.other))
        return found

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        pairs = self.pairs
        for rows, _ in pairs:
            rows.check(align=1)
        if len({rows.entries for rows, _ in pairs}) > 1:
            entries = [rows.entries for rows, _ in pairs]
            raise ValueError(f"pools of {entries} entries: one mapping is of as many in each")
        named = {f"tensor {index}": pair for index, pair in enumerate(pairs)}
        _check_rows(named, "slots", self.slots)
        read = {name: spans_of(x) for name, (_, x) in named.items()}
        read["slots"] = spans_of(self.slots)
        written = {f"the rows of {name}": written_by(rows) for name, (rows, _) in named.items()}
        require_apart(read, written)
        require_once("slots", self.slots)


@dataclass(frozen=True)
class Gather:
    """Of `kvcache.gather`."""

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
        _check_rows({"out": (rows, out)}, "indices", indices)
        self._check_apart()

    def _check_apart(self) -> None:
        require_own_elements("out", self.out)
        read = {"the rows": written_by(self.rows), "indices": spans_of(self.indices)}
        require_apart(read, {"out": spans_of(self.out)})


@dataclass(frozen=True)
class CopySlots:
    """Of `kvcache.copy_slots`; source: None where it is the target."""

    target: torch.Tensor
    pairs: torch.Tensor
    source: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    backend: str = "auto"
    arch: str | None = None

    @property
    def pools(self) -> dict[str, torch.Tensor]:
        """Of source and target."""
        source = self.target if self.source is None else self.source
        return {"source": source, "target": self.target}

    def pieces(self, piece_bytes: int) -> int:
        """How many a slot has: its segments, checked on the CPU, or parts of so many bytes."""
        sizes = [pool.shape[1] for pool in self.pools.values()]
        segments, device = self.segments, self.pairs.device
        if segments is None:
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"slots of {sizes[0]} and {sizes[1]} bytes: equal, without segments"
                )
            return -(-sizes[0] // piece_bytes)
        require_table("segments", segments, torch.int64, (None, 3))
        if segments.device != device or (segments.numel() and not segments.is_contiguous()):
            raise ValueError(
                f"segments on {segments.device} with strides {segments.stride()}: contiguous, on "
                f"{device} as pairs"
            )
        if segments.device.type == "cpu":
            for segment in segments.tolist():
                _check_segment(segment, sizes)
            self._check_segments(segments.numpy())
        return len(segments)

    def _check_segments(self, segments: np.ndarray) -> None:
        """What a segment writes no other writes, nor reads where slots are read and written."""
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
            raise ValueError(f"pairs has strides {pairs.stride()}: contiguous")
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
        """What a pair writes no other pair reads or writes."""
        require_once("pairs of the target", pairs[:, 1])
        if self.source is not None:
            source, target = spans_of(self.source), spans_of(self.target)
            if source != target:
                require_apart({"source": source}, {"target": target})
                return
        elif self.segments is not None:
            return  # of one slot parts may be read and others written
        both = torch.isin(pairs[:, 0], pairs[:, 1]) & (pairs[:, 0] != pairs[:, 1])
        if both.any():
            slot = int(pairs[both][0, 0])
            raise ValueError(f"pairs read slot {slot} and write it: what is written is not read")


@dataclass(frozen=True)
class Checksum:
    """Of `kvcache.checksum`."""

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
    for tensor_name, (rows, tensor) in pairs.items():
        require_tensors(pool=rows.pool, x=tensor, **{name: mapping})
        _check_tokens(tensor_name, tensor, tokens, rows)
    _check_table(name, mapping, tokens, first)


def _check_latent(
    name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], latent: Latent
) -> None:
    layout = f"[T, {latent.elements}]"
    require_rank(name, x, layout)
    if x.dtype not in dtypes or x.shape[1] != latent.elements:
        raise ValueError(f"{name} is {x.dtype} {tuple(x.shape)}: {dtypes} {layout}")
    require_tma(name, x)


def _check_entries(name: str, mapping: torch.Tensor, tokens: int, rows: Rows) -> None:
    """Refuse rows that do not lie in their pool, or a mapping that is not of `tokens` entries."""
    rows.check(VECTOR_BYTES)
    _check_table(name, mapping, tokens, rows)


def _check_table(name: str, mapping: torch.Tensor, tokens: int, rows: Rows) -> None:
    """Refuse a mapping that is not of `tokens` entries."""
    require_table(name, mapping, torch.int64, (tokens,))
    limit = f"{len(rows.pool)} slots of {rows.rows} rows have 0 to {rows.entries - 1}"
    check_mapping(name, mapping, rows.entries, limit)


def _check_tokens(name: str, x: torch.Tensor, tokens: int, rows: Rows) -> None:
    """Refuse what is not [T, ...] with the bytes of a row in one piece for every token."""
    if not x.ndim or len(x) != tokens:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [{tokens}, ...]")
    row_bytes = x.numel() // tokens * x.itemsize if tokens else rows.record.data_bytes
    if row_bytes != rows.record.data_bytes:
        raise ValueError(
            f"{name} has {row_bytes} bytes for a token, {rows.record.name} has "
            f"{rows.record.data_bytes}"
        )
    if tokens and (not has_whole_rows(x) or is_broadcast(x)):
        raise ValueError(f"{name} has strides {x.stride()}: a token's elements in one piece")


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
        raise ValueError(f"{name} is on {pool.device}: on {device} as {table}, or pinned memory")


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
