"""Arguments of the operator `mla_norm_rope_append`, and the checks of their values and limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernelkit.call.tensors import (
    is_broadcast,
    require_apart,
    require_own_elements,
    require_rank,
    require_table,
    require_tma,
)
from kernelkit.plan.limits import FLT_MAX, FLT_MIN
from kvcache.layouts.latent import NEIGHBOURS, PAIRS, ROPE
from kvcache.layouts.rows import MAX_ENTRIES, NO_ENTRY, Rows
from kvcache.movement.arguments import (
    Spans,
    check_angles,
    check_positions,
    require_once,
    spans_of,
    written_by,
)
from kvcache.movement.arguments import require_apart as require_spans_apart
from kvcache.movement.config import PIECE, VECTOR_BYTES
from mla.attention.formats import FORMS, LATENT
from mla.glue.config import MAX_RANK, STORED
from mla.indexer.formats import FORMATS, PLAIN, WIDTH, Rotation

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TABLES = (torch.int32, torch.int64)
WEIGHTS = (torch.bfloat16, torch.float32)
TENSORS = {BF16: {512: "bf16_512", 576: "bf16_576"}, E4M3: {576: "e4m3_576"}}


@dataclass(frozen=True)
class Keys:
    """`LatentKeys`. pool: uint8 [slots, slot_bytes] of `kvcache.Rows` with the other fields of it,
    or entries [pages, page_size, columns] with record ""."""

    x: torch.Tensor
    pool: torch.Tensor
    slots: torch.Tensor
    weight: torch.Tensor
    eps: float = 1e-6
    scale: torch.Tensor | None = None
    record: str = ""
    rows: int = 0
    data_offset: int = 0
    scale_offset: int = 0

    @property
    def stored(self) -> str:
        """Name of the record, in `config.STORED`."""
        return self.record or TENSORS[self.pool.dtype][self.pool.shape[-1]]

    @property
    def page(self) -> int:
        """Entries of a slot."""
        return self.rows if self.record else self.pool.shape[1]

    @property
    def entries(self) -> int:
        """Entries of the cache."""
        return len(self.pool) * self.page

    @property
    def stride(self) -> int:
        """Bytes between slots."""
        return self.pool.stride(0) * self.pool.itemsize

    @property
    def written(self) -> Spans:
        """Memory that is written."""
        return spans_of(self.pool) if not self.record else written_by(self.as_rows)

    @property
    def as_rows(self) -> Rows:
        """The entries of a pool."""
        places = self.data_offset, self.scale_offset, self.rows
        return Rows(self.pool, *places, STORED[self.record])

    def check(self, tokens: int) -> None:
        """Raise ValueError or NotImplementedError, naming the value and the limit."""
        if self.record:
            if self.record not in STORED:
                raise NotImplementedError(f"record {self.record!r}: keys are in {[*STORED]}")
            self.as_rows.check(VECTOR_BYTES)
        else:
            _check_pages(self.pool)
        columns = FORMS[self.stored].columns
        _check_rows("keys.x", self.x, tokens, columns)
        _check_norm("keys", self.weight, self.eps, LATENT)
        _check_slots("keys.slots", self.slots, tokens)
        if self.scale is None:
            return
        if self.stored != "e4m3_576":
            raise ValueError("keys.scale: only a tensor of entries in e4m3 has one scale")
        require_table("keys.scale", self.scale, torch.float32, (1,))
        if self.scale.device.type == "cpu" and not FLT_MIN <= self.scale.item() <= FLT_MAX:
            raise ValueError(f"keys.scale {self.scale.item()}: from {FLT_MIN:.4g} to {FLT_MAX:.4g}")


@dataclass(frozen=True)
class Index:
    """`IndexKeys`. pool: None if it is that of the latent keys, since an operator may not be given
    two outputs in one memory."""

    x: torch.Tensor
    slots: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    record: str
    rows: int
    pool: torch.Tensor | None = None
    data_offset: int = 0
    scale_offset: int = 0
    eps: float = 1e-6
    rotation: Rotation = PLAIN

    def as_rows(self, other: torch.Tensor | None) -> Rows:
        """The entries. other: pool of the latent keys."""
        pool = other if self.pool is None else self.pool
        if pool is None:
            raise TypeError("index_keys without a pool")
        places = self.data_offset, self.scale_offset, self.rows
        return Rows(pool, *places, FORMATS[self.record].record)

    def check(self, tokens: int, other: torch.Tensor | None) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        if self.record not in FORMATS:
            raise NotImplementedError(f"record {self.record!r} of index_keys: one of {[*FORMATS]}")
        rows = self.as_rows(other)
        rows.check(VECTOR_BYTES)
        unit = FORMATS[self.record].scale_size
        if unit and self.scale_offset % unit:
            raise ValueError(f"scales of index_keys at {self.scale_offset}: a multiple of {unit}")
        self.rotation.check()
        _check_rows("index_keys.x", self.x, tokens, WIDTH)
        _check_norm("index_keys", self.weight, self.eps, WIDTH)
        require_table("index_keys.bias", self.bias, self.weight.dtype, (WIDTH,))
        require_tma("index_keys.bias", self.bias)
        _check_slots("index_keys.slots", self.slots, tokens)


@dataclass(frozen=True)
class QueryHeads:
    """`Queries`. x: None if `out` is read and written in place."""

    out: torch.Tensor
    x: torch.Tensor | None = None
    eps: float | None = None

    @property
    def read(self) -> torch.Tensor:
        """What is read."""
        return self.out if self.x is None else self.x

    @property
    def columns(self) -> int:
        """Columns that are read and written, the last ones."""
        return ROPE if self.eps is None else LATENT

    def check(self, tokens: int) -> None:
        """Raise ValueError, naming the value and the limit."""
        heads = self.out.shape[1] if self.out.ndim == 3 else None
        for name, tensor in {"queries.out": self.out, "queries.q": self.read}.items():
            require_rank(name, tensor, "[T, H, columns]")
            fits = tensor.shape[:2] == (tokens, heads)
            if self.eps is None:
                fits = fits and tensor.shape[2] >= ROPE and tensor.shape[2] % PIECE == 0
                wanted = f"a multiple of {PIECE} from {ROPE}"
            else:
                fits, wanted = fits and tensor.shape[2] == LATENT, f"{LATENT}"
            if tensor.dtype != BF16 or not fits:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {BF16} "
                    f"({tokens}, {heads}, {wanted})"
                )
            require_tma(name, tensor)
        if self.eps is not None:
            _check_eps("queries", self.eps)
        require_own_elements("queries.out", self.out)


@dataclass(frozen=True)
class LowRankRows:
    """`LowRank`. x: None if `out` is read and written in place."""

    out: torch.Tensor
    weight: torch.Tensor
    x: torch.Tensor | None = None
    eps: float = 1e-6

    @property
    def read(self) -> torch.Tensor:
        """What is read."""
        return self.out if self.x is None else self.x

    def check(self, tokens: int) -> None:
        """Raise ValueError, naming the value and the limit."""
        for name, tensor in {"low_rank.out": self.out, "low_rank.x": self.read}.items():
            require_rank(name, tensor, "[T, rank]")
            width = tensor.shape[1]
            if width % PIECE or not PIECE <= width <= MAX_RANK:
                raise ValueError(
                    f"{name} has {width} columns: a multiple of {PIECE} up to {MAX_RANK}"
                )
            _check_rows(name, tensor, tokens, self.out.shape[1])
        _check_norm("low_rank", self.weight, self.eps, self.out.shape[1])
        require_own_elements("low_rank.out", self.out)


@dataclass(frozen=True)
class Arguments:
    """Arguments of the operator; `mla.norm_rope_append` explains them."""

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    keys: Keys | None = None
    index: Index | None = None
    queries: QueryHeads | None = None
    low_rank: LowRankRows | None = None
    pairs: str = NEIGHBOURS
    pdl: bool = False
    backend: str = "auto"
    arch: str | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.positions) if self.positions.ndim else 0

    @property
    def heads(self) -> int:
        """Heads of the queries, 0 without queries."""
        return 0 if self.queries is None else self.queries.out.shape[1]

    @property
    def keys_pool(self) -> torch.Tensor | None:
        """The pool of the latent keys."""
        return None if self.keys is None else self.keys.pool

    @property
    def index_rows(self) -> Rows | None:
        """The entries of the indexer's keys."""
        return None if self.index is None else self.index.as_rows(self.keys_pool)

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        parts = (self.low_rank, self.keys, self.index, self.queries)
        if all(part is None for part in parts):
            raise ValueError("nothing to do: give keys, index_keys, queries or low_rank")
        if self.pairs not in PAIRS:
            raise ValueError(f"pairs {self.pairs!r}: one of {PAIRS}")
        _check_slots("positions", self.positions, None)
        check_angles(self.cos, self.sin)
        if self.tokens and not len(self.cos):
            raise ValueError(
                f"cos has shape {tuple(self.cos.shape)}, expected a row for every position"
            )
        if self.keys is not None:
            self.keys.check(self.tokens)
        if self.index is not None:
            self.index.check(self.tokens, self.keys_pool)
        for part in (self.queries, self.low_rank):
            if part is not None:
                part.check(self.tokens)
        self._check_memory()
        if self.positions.device.type == "cpu":
            self._check_numbers()

    def _read(self) -> dict[str, torch.Tensor]:
        """Everything that is read and not written."""
        found = {"positions": self.positions, "cos": self.cos, "sin": self.sin}
        for name, part in (("keys", self.keys), ("index_keys", self.index)):
            if part is not None:
                found |= {f"{name}.x": part.x, f"{name}.slots": part.slots}
                found[f"{name}.weight"] = part.weight
        if self.index is not None:
            found["index_keys.bias"] = self.index.bias
        if self.keys is not None and self.keys.scale is not None:
            found["keys.scale"] = self.keys.scale
        if self.queries is not None and self.queries.x is not None:
            found["queries.q"] = self.queries.x
        if self.low_rank is not None:
            found["low_rank.weight"] = self.low_rank.weight
            if self.low_rank.x is not None:
                found["low_rank.x"] = self.low_rank.x
        return found

    def _check_memory(self) -> None:
        """Raise ValueError for memory that is written and read, or written as two things."""
        read, written, pools = self._read(), {}, {}
        if self.queries is not None:
            written["queries.out"] = self.queries.out
        if self.low_rank is not None:
            written["low_rank.out"] = self.low_rank.out
        others = dict(read)
        for name, tensor in written.items():
            for other, each in others.items():
                require_apart(name, tensor, other, each)
            others[name] = tensor
        if self.keys is not None:
            pools["the keys"] = self.keys.written
        if self.index_rows is not None:
            pools["the keys of the indexer"] = written_by(self.index_rows)
        spans = {name: spans_of(tensor) for name, tensor in (read | written).items()}
        require_spans_apart(spans, pools)

    def _check_numbers(self) -> None:
        """Raise ValueError for an entry that is written twice, and for positions out of range."""
        needed = torch.zeros(self.tokens, dtype=torch.bool)
        if self.queries is not None:
            needed[:] = True
        if self.keys is not None:
            needed |= _check_once("keys.slots", self.keys.slots, self.keys.entries)
        if self.index is not None and self.index_rows is not None:
            entries = self.index_rows.entries
            needed |= _check_once("index_keys.slots", self.index.slots, entries)
        check_positions(self.positions[needed], len(self.cos))


def _check_once(name: str, slots: torch.Tensor, entries: int) -> torch.Tensor:
    """Return which tokens have an entry; ValueError for one that two of them have."""
    there = (slots >= 0) & (slots < entries)
    require_once(name, torch.where(there, slots, NO_ENTRY))
    return there


def _check_pages(store: torch.Tensor) -> None:
    """Raise for what is no cache of unquantised entries, or of entries in e4m3."""
    require_rank("keys.rows", store, "[pages, page_size, columns]")
    columns = TENSORS.get(store.dtype)
    if columns is None:
        raise NotImplementedError(f"dtype {store.dtype} of keys.rows: one of {[*TENSORS]}")
    if store.shape[2] not in columns:
        raise ValueError(f"keys.rows has {store.shape[2]} columns in {store.dtype}: {[*columns]}")
    pages, rows, width = store.shape
    if rows < 1 or pages * rows > MAX_ENTRIES:
        raise ValueError(f"keys.rows has {pages} pages of {rows} rows: 1 to {MAX_ENTRIES} in all")
    if rows > 1 and store.stride(1) != width:
        raise ValueError(
            f"keys.rows has strides {store.stride()}: entries of a page have to be side by side"
        )
    require_tma("keys.rows", store)
    require_own_elements("keys.rows", store)


def _check_rows(name: str, x: torch.Tensor, tokens: int, columns: int) -> None:
    if x.dtype != BF16 or tuple(x.shape) != (tokens, columns):
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)}, expected {BF16} ({tokens}, {columns})"
        )
    require_tma(name, x)
    if is_broadcast(x):
        raise ValueError(f"{name} has strides {x.stride()}: broadcast is not supported")


def _check_norm(name: str, weight: torch.Tensor, eps: float, width: int) -> None:
    if weight.dtype not in WEIGHTS:
        raise ValueError(f"{name}.weight is {weight.dtype}, expected one of {WEIGHTS}")
    require_table(f"{name}.weight", weight, weight.dtype, (width,))
    require_tma(f"{name}.weight", weight)
    _check_eps(name, eps)


def _check_eps(name: str, eps: float) -> None:
    if not 0 <= eps <= FLT_MAX:
        raise ValueError(f"{name}.eps {eps}: from 0 to {FLT_MAX:.4g} (fp32)")


def _check_slots(name: str, table: torch.Tensor, tokens: int | None) -> None:
    if table.dtype not in TABLES:
        raise ValueError(f"{name} is {table.dtype}, expected one of {TABLES}")
    require_table(name, table, table.dtype, (tokens,))
