"""Arguments of attention to latent keys, and every check that needs no config.

Shapes, dtypes and options are checked everywhere. What tensors say (lengths, page numbers, sinks)
is checked on the CPU, where reading it costs nothing; on a GPU that would make the host wait.
Numbers of listed entries are never checked: one that the cache does not have is no entry.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from kernelkit.attention import check_factors, check_sinks
from kernelkit.call.tensors import (
    in_sequence,
    is_broadcast,
    require_pages,
    require_rank,
    require_table,
    require_tma,
)
from kernelkit.plan.limits import MAX_POSITION
from kvcache.layouts.rows import MAX_ENTRIES, Rows, check_range
from kvcache.movement.arguments import check_angles, check_positions
from mla.attention.codec import RECORDS, form_of
from mla.attention.config import KERNEL_NAMES, MAX_CLUSTER, MAX_HEADS, MAX_TOKENS, Keys
from mla.attention.formats import LATENT, Form

MAX_PARTS = 64  # clusters that share a query entry; the last one to finish adds up their sums
MAX_PAGE = 256  # rows of a page that a table lists
E4M3 = torch.float8_e4m3fn
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Source:
    """Keys as a launch takes them: tensors of `kernel_arguments.Source`, and what is compiled.

    store: bf16 or e4m3 [slots, rows, columns], or uint8 [slots, slot_bytes].
    places: [N, k], or [N, pages].
    counts: int32 [N] or None.
    """

    store: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor | None
    keys: Keys
    data_offset: int = 0
    scale_offset: int = 0

    @property
    def capacity(self) -> int:
        """Keys that an entry can have at most; 0 of an empty cache."""
        if not self.store.numel():
            return 0
        return self.places.shape[1] * (1 if self.keys.listed else self.keys.rows)


@dataclass(frozen=True)
class Listed:
    """A cache and the entries that queries list, see `mla.sparse_decode`.

    pool: uint8 [slots, slot_bytes] of `kvcache.Rows`, or bf16 entries.
    indices: int32 or int64, shaped like q without heads and columns, then k.
    counts: int32, shaped like q without heads and columns.
    record, rows, data_offset, scale_offset: those of `kvcache.Rows`; "" and 0 for bf16 entries.
    paged: indices are pages, int32, of a query's keys 0, 1, 2, ...; counts are keys. A page that
        the cache does not have holds no keys.
    """

    pool: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor | None = None
    record: str = ""
    rows: int = 0
    data_offset: int = 0
    scale_offset: int = 0
    paged: bool = False

    @property
    def form(self) -> Form:
        """Form of an entry."""
        return form_of(RECORDS[self.record or f"bf16_{self.pool.shape[-1]}"])

    def check(self, name: str, q: torch.Tensor) -> None:
        """Raise TypeError, ValueError or NotImplementedError for what q cannot be used with."""
        lead = tuple(q.shape[:-2])
        dtypes = INDEX_DTYPES[:1] if self.paged else INDEX_DTYPES
        if self.indices.dtype not in dtypes:
            raise ValueError(f"{name}indices is {self.indices.dtype}, expected one of {dtypes}")
        require_table(f"{name}indices", self.indices, self.indices.dtype, (*lead, None))
        if self.counts is not None:
            require_table(f"{name}counts", self.counts, torch.int32, lead)
            most, what = self.indices.shape[-1], "indices"
            if self.paged:
                most, what = most * (self.rows or self.pool.shape[1]), "keys of all pages"
            check_range(f"{name}counts", self.counts, (0, most + 1), f"0 to the {most} {what}")
        if self.record:
            self._check_rows(name)
        else:
            _check_plain(f"{name}rows", self.pool, (torch.bfloat16,))
        if self.form.columns != q.shape[-1]:
            raise ValueError(
                f"q has {q.shape[-1]} columns, entries of {name}rows have {self.form.columns}"
            )

    def _check_rows(self, name: str) -> None:
        if self.record not in RECORDS:
            raise NotImplementedError(f"record {self.record!r}: attention reads {[*RECORDS]}")
        record = RECORDS[self.record]
        Rows(self.pool, self.data_offset, self.scale_offset, self.rows, record).check()
        unit = min(record.scale_bytes, 16)
        if unit and self.scale_offset % unit:
            raise ValueError(
                f"scale_offset {self.scale_offset} of {name}rows: a multiple of {unit} bytes"
            )

    def source(self) -> Source:
        """Return the keys as a launch takes them, one row of places for each token.

        Listed entries may become slots of one row; a table needs the rows of its pages.
        """
        places = self.indices.reshape(-1, self.indices.shape[-1])
        counts = None if self.counts is None else in_sequence(self.counts)
        form, store = self.form, self.pool
        if self.record and form.plain:
            store = (
                Rows(self.pool, self.data_offset, 0, self.rows, RECORDS[self.record])
                .data()
                .view(torch.bfloat16)
            )
        if form.plain:
            store = store.squeeze(2) if store.ndim == 4 else store
            store = store if self.paged else _in_one_row(store)
        keys = Keys(
            record=self.record or f"bf16_{form.columns}",
            rows=store.shape[1] if form.plain else self.rows,
            listed=not self.paged,
            wide_index=places.dtype == torch.int64,
            counts=counts is not None,
        )
        offsets = (0, 0) if form.plain else (self.data_offset, self.scale_offset)
        return Source(store, places, counts, keys, *offsets)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Arguments of dense and of sparse attention; `mla.decode` explains them."""

    q: torch.Tensor
    sinks: torch.Tensor | None = None
    out: torch.Tensor | None = None
    scale: float | None = None
    batch_invariant: bool = False
    cluster: int = 0
    parts: int = 0
    kernel: str = "auto"
    pdl: bool = False
    backend: str = "auto"
    arch: str | None = None

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[-2]

    @property
    def columns(self) -> int:
        """Columns of Q and K."""
        return self.q.shape[-1]

    @property
    def softmax_scale(self) -> float:
        """Factor of q.k."""
        return float(self.scale) if self.scale is not None else self.columns**-0.5

    def check_shared(self) -> None:
        """Raise for q, out, sinks and options that no kernel takes."""
        q = self.q
        if q.dtype != torch.bfloat16:
            raise NotImplementedError(f"dtype {q.dtype} of q: supported is torch.bfloat16")
        if not 1 <= self.heads <= MAX_HEADS:
            raise ValueError(f"q has {self.heads} heads: from 1 to {MAX_HEADS}")
        require_tma("q", q)
        if self.out is not None:
            shape = (*q.shape[:-1], LATENT)
            if self.out.dtype != torch.bfloat16 or tuple(self.out.shape) != shape:
                raise ValueError(
                    f"out is {self.out.dtype} {tuple(self.out.shape)}, expected torch.bfloat16 "
                    f"{shape}"
                )
            require_tma("out", self.out)
        check_factors(self.softmax_scale, 0.0)
        if self.sinks is not None:
            require_table("sinks", self.sinks, torch.float32, (self.heads,))
            if q.device.type == "cpu":
                check_sinks(self.sinks)
        if not 0 <= self.parts <= MAX_PARTS:
            raise ValueError(f"{self.parts} parts: from 1 to {MAX_PARTS}, 0 for automatic")
        if not 0 <= self.cluster <= MAX_CLUSTER:
            raise ValueError(f"cluster {self.cluster}: from 1 to {MAX_CLUSTER}, 0 for automatic")
        if self.kernel not in KERNEL_NAMES:
            raise ValueError(f"kernel {self.kernel!r}: one of {KERNEL_NAMES}")


@dataclass(frozen=True, kw_only=True)
class Dense(Shared):
    """Arguments of the op `blackwell_kernels::mla_decode`; `mla.decode` explains them."""

    kv: torch.Tensor
    page_table: torch.Tensor
    kv_lens: torch.Tensor | None = None
    causal: bool = True
    kv_scale: torch.Tensor | None = None
    max_kv_len: int | None = None

    @property
    def tokens(self) -> int:
        """Query tokens of an entry."""
        return self.q.shape[1] if self.q.ndim == 4 else 1

    @property
    def store(self) -> torch.Tensor:
        """Pages [pages, page_size, 576]."""
        return self.kv.squeeze(2) if self.kv.ndim == 4 else self.kv

    @property
    def capacity(self) -> int:
        """Keys that an entry can have at most."""
        return self.page_table.shape[1] * self.kv.shape[1] if self.kv.numel() else 0

    @property
    def longest(self) -> int:
        """Keys that the launch is laid out for."""
        return self.capacity if self.max_kv_len is None else self.max_kv_len

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """The cache."""
        store = self.store
        record = "e4m3_576" if store.dtype == E4M3 else "bf16_576"
        keys = Keys(record, store.shape[1], counts=self.kv_lens is not None)
        return (Source(store, self.page_table, self.kv_lens, keys),)

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        if self.q.ndim != 3:
            require_rank("q", self.q, "[B, T, H, 576]")
        self.check_shared()
        if self.columns != 576:
            raise ValueError(f"q has {self.columns} columns: 576, of 512 latent and 64 rotary ones")
        if not 1 <= self.tokens <= MAX_TOKENS:
            raise ValueError(f"{self.tokens} query tokens: from 1 to {MAX_TOKENS}")
        _check_plain("kv", self.kv, (torch.bfloat16, E4M3))
        if self.kv.shape[-1] != self.columns:
            raise ValueError(f"q has {self.columns} columns, kv has {self.kv.shape[-1]}")
        if not 1 <= self.kv.shape[1] <= MAX_PAGE:
            raise ValueError(f"pages of {self.kv.shape[1]} rows: from 1 to {MAX_PAGE}")
        self._check_tables()
        if self.q.device.type == "cpu":
            self._check_contents()

    def _check_tables(self) -> None:
        batch = len(self.q)
        require_table("page_table", self.page_table, torch.int32, (batch, None))
        if self.kv_lens is not None:
            require_table("kv_lens", self.kv_lens, torch.int32, (batch,))
        if self.capacity >= MAX_POSITION:
            raise ValueError(f"{self.capacity} keys of an entry, limit {MAX_POSITION - 1}")
        longest = self.max_kv_len
        if longest is not None and not 0 <= longest <= self.capacity:
            raise ValueError(f"max_kv_len {longest}: from 0 to {self.capacity}")
        if self.kv_lens is None and longest is not None and longest < self.capacity:
            raise ValueError(
                f"max_kv_len {longest} without kv_lens: entries have all {self.capacity} keys"
            )
        if self.kv_scale is not None:
            if self.kv.dtype != E4M3:
                raise ValueError(f"kv_scale with kv in {self.kv.dtype}: only e4m3 is scaled")
            require_table("kv_scale", self.kv_scale, torch.float32, (1,))

    def _check_contents(self) -> None:
        """Check values of the tables, on the CPU."""
        if self.kv_scale is not None:
            check_factors(self.softmax_scale * self.kv_scale.item(), 0.0)
        lens = [self.capacity] * len(self.q) if self.kv_lens is None else self.kv_lens.tolist()
        for entry, length in enumerate(lens):
            if not 0 <= length <= self.longest:
                raise ValueError(
                    f"kv_lens {length} of entry {entry}: from 0 to max_kv_len = {self.longest}"
                )
            used = -(-length // self.kv.shape[1])
            require_pages(entry, self.page_table[entry, :used].tolist(), len(self.kv))


@dataclass(frozen=True, kw_only=True)
class Sparse(Shared):
    """Arguments of the op `blackwell_kernels::mla_sparse_attention`; see `mla.sparse_decode`.

    many: whether there are many queries, as in `mla.sparse_prefill`.
    """

    keys: Listed
    extra: Listed | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    many: bool = False

    causal = False
    kv_scale = None
    tokens = 1

    @property
    def longest(self) -> int:
        """Keys that a query can have at most."""
        return sum(source.capacity for source in self.sources)

    @cached_property
    def sources(self) -> tuple[Source, ...]:
        """Caches that may have keys; one at least."""
        given = [self.keys] if self.extra is None else [self.keys, self.extra]
        found = [each.source() for each in given]
        return tuple(each for each in found if each.capacity) or (found[0],)

    def check(self) -> None:
        """Raise TypeError, ValueError or NotImplementedError, naming the value and the limit."""
        q = self.q
        if q.ndim not in (3, 4):
            require_rank("q", q, "[B, T, H, columns]")
        self.check_shared()
        if self.out is not None and q.ndim == 4 and not _is_even(self.out):
            raise ValueError(
                f"out has strides {self.out.stride()}: tokens of all entries of the batch have to "
                "lie at one distance"
            )
        self.keys.check("", q)
        if self.extra is not None:
            self.extra.check("extra_", q)
        if self.keys.paged:
            raise NotImplementedError("pages of the first cache: only those of extra")
        if self.longest >= MAX_POSITION:
            raise ValueError(f"{self.longest} entries of a query, limit {MAX_POSITION - 1}")
        given = [each is not None for each in (self.cos, self.sin, self.positions)]
        if any(given) and not all(given):
            raise ValueError("rope and positions: give both or neither")
        if self.cos is not None and self.sin is not None and self.positions is not None:
            check_angles(self.cos, self.sin)
            require_table("positions", self.positions, torch.int64, tuple(q.shape[:-2]))
            if len(self.cos) == 0:
                raise ValueError("rope has tables of 0 positions: at least 1")
            check_positions(self.positions, len(self.cos))


Arguments = Dense | Sparse


def _check_plain(name: str, store: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise for what is no tensor of unquantised entries."""
    if store.dtype not in dtypes:
        raise NotImplementedError(f"dtype {store.dtype} of {name}: supported are {dtypes}")
    if store.ndim == 4 and store.shape[2] != 1:
        raise ValueError(f"{name} has {store.shape[2]} heads: latent entries have one")
    if store.ndim not in (3, 4):
        require_rank(name, store, "[pages, page_size, columns]")
    if store.shape[-1] not in (512, 576):
        raise ValueError(f"{name} has {store.shape[-1]} columns: 512 or 576")
    if store.shape[0] * store.shape[1] > MAX_ENTRIES:
        raise ValueError(f"{name} has {store.shape[0] * store.shape[1]} entries: {MAX_ENTRIES}")
    require_tma(name, store)
    if is_broadcast(store):
        raise ValueError(f"{name} has strides {store.stride()}: not entries side by side")


def _is_even(tensor: torch.Tensor) -> bool:
    """Whether the first two dimensions are one of a view."""
    batch, tokens = tensor.shape[:2]
    return min(batch, tokens) <= 1 or tensor.stride(0) == tokens * tensor.stride(1)


def _in_one_row(store: torch.Tensor) -> torch.Tensor:
    """Return listed entries as slots of one row, if they lie evenly: one kernel for page sizes."""
    slots, rows, columns = store.shape
    if rows == 1 or (slots > 1 and store.stride(0) != rows * store.stride(1)):
        return store
    return store.as_strided((slots * rows, 1, columns), (store.stride(1), columns, 1))
