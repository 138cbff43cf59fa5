"""Problems of attention to latent keys, their hostile inputs, and how a result is judged.

All that no query reads is NaN: pages after a length, entries that nobody lists, bytes between
records. Tables name pages and entries that do not exist.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kernelkit.numerics import tolerance
from kvcache.layouts.rows import Rows
from lab.problems.attention import NO_PAGES, SPARE_PAGES, nan_view
from mla.attention import codec, reference
from mla.attention.api import dense_fields, sparse_fields
from mla.attention.arguments import Arguments
from mla.attention.codec import RECORDS
from mla.attention.formats import FORMS
from mla.attention.launch import DECODE, SPARSE, prepare

MANY = "many"  # among the options of a case: `sparse_prefill`
NAN_BYTE = 0xFF  # of every code and scale, and of bf16
NO_ENTRIES = (-1, -(1 << 31), (1 << 31) - 1)
POSITIONS = 40
SPARE_BYTES = 48  # before the entries of a page
E4M3 = torch.float8_e4m3fn

Given = tuple[tuple[Any, ...], dict[str, Any]]  # by position, by name


def moved(value: Any, device: str) -> Any:
    """Move tensors to a device: also those of caches, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Rows):
        return replace(value, pool=value.pool.to(device))
    if isinstance(value, tuple):
        return tuple(moved(each, device) for each in value)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    return value


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Fields of all problems.

    amplitude: factor of Q.
    options: arguments that change no result, by name.
    """

    heads: int = 16
    scale: float | None = None
    sinks: bool = False
    amplitude: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def seed(self) -> int:
        """Return a seed that is equal in every process, and independent of `options`."""
        return zlib.crc32(repr(replace(self, options=(), **self.shape_alone)).encode())

    @property
    def shape_alone(self) -> dict[str, Any]:
        """Fields that change only the shape of tensors, at their default."""
        return {}

    def draw(self, *shape: int) -> torch.Tensor:
        """Draw Q, bf16 in a larger allocation full of NaN."""
        generator = torch.Generator().manual_seed(self.seed)
        q = nan_view((1, shape[0], *shape[1:]), torch.bfloat16, "cpu", tokens_first=True)[0]
        return q.copy_(torch.randn(shape, generator=generator) * self.amplitude)

    def shared(self) -> dict[str, Any]:
        """Return the arguments that a call and the reference share."""
        sinks = torch.linspace(-2.0, 4.0, self.heads) if self.sinks else None
        return {"scale": self.scale, "sinks": sinks}


@dataclass(frozen=True, kw_only=True)
class Dense(Shared):
    """Problem of `mla.decode`.

    lens: keys of each entry.
    scaled: whether keys are e4m3 with a scale.
    full: whether the call gives no lengths; all entries then have as many keys as pages have room.
    """

    lens: tuple[int, ...] = (70, 33)
    tokens: int = 1
    page: int = 16
    causal: bool = True
    scaled: bool = False
    full: bool = False

    def __str__(self) -> str:
        words = [f"h{self.heads}", f"t{self.tokens}", f"page{self.page}"]
        words += [".".join(map(str, self.lens))] + ["e4m3"] * self.scaled + ["full"] * self.full
        words += ["causal" if self.causal else "all"] + ["sinks"] * self.sinks
        words += [f"amp{self.amplitude:g}"] * (self.amplitude != 1.0)
        return "-".join(words + [f"{name}={value}" for name, value in self.options])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Keys of each entry that exist."""
        if not self.full:
            return self.lens
        return (-(-max(self.lens) // self.page) * self.page,) * len(self.lens)

    def inputs(self) -> Given:
        """Return the arguments of `mla.decode`."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        batch, flat = len(self.lens), self.draw(len(self.lens) * self.tokens, self.heads, 576)
        q = flat.unflatten(0, (batch, self.tokens))
        counts = [-(-length // self.page) for length in self.lengths]
        free = list(range(sum(counts) + SPARE_PAGES))
        random.Random(self.seed).shuffle(free)
        spare = 0 if self.full else 1
        rows = [
            [free.pop() for _ in range(count)]
            + [NO_PAGES[n % 3] for n in range(max(counts) + spare - count)]
            for count in counts
        ]
        table = torch.tensor(rows, dtype=torch.int32).view(batch, max(counts) + spare)
        pages = sum(counts) + SPARE_PAGES
        kv = nan_view((pages, self.page, 1, 576), torch.bfloat16, "cpu")
        for entry, length in enumerate(self.lengths):
            key = torch.arange(length)
            values = torch.randn(length, 1, 576, generator=generator).bfloat16()
            kv[table[entry, key // self.page].long(), key % self.page] = values
        options = self.shared() | {"page_table": table, "causal": self.causal}
        if not self.full:
            options["kv_lens"] = torch.tensor(self.lens, dtype=torch.int32)
        if self.scaled:
            kv = kv.to(E4M3)
            options["kv_scale"] = torch.tensor([0.75])
        return (q, kv), options

    def judge(
        self, results: Sequence[torch.Tensor], device: str = "cpu", *, senders: int = 0
    ) -> list[tolerance.Report]:
        """Return verdicts on O and LSE, computed on their device. senders: of `senders_of`."""
        (q, kv), options = moved(self.inputs(), device)
        table, lens = options.pop("page_table"), options.pop("kv_lens", None)
        source = reference.of_pages(kv.squeeze(2), table, lens)
        options["key_scale"] = options.pop("kv_scale", None)
        return _verdicts(q, [source], options, results, senders)


@dataclass(frozen=True)
class Cache:
    """Entries that each token lists of one cache.

    record: a name of RECORDS, or 'tensor': bf16 entries of a tensor.
    rows: rows of a page.
    counts: for each token, how many of its entries count; None for all.
    spread: an entry is multiplied by a power of two from 2^-spread to 1; every eighth is 0.
    spare: bytes before the entries of a page. Without them all entries of a record in bf16 lie at
        one distance, so that kernels see pages of one row.
    """

    record: str = "fp8_584"
    rows: int = 16
    k: int = 40
    counts: tuple[int, ...] | None = None
    wide: bool = True
    pages: int = 6
    spread: int = field(default=0, repr=False)  # not in the seed
    spare: int = field(default=SPARE_BYTES, repr=False)  # not in the seed

    def __str__(self) -> str:
        even = ("" if self.spare else "even") + (f"spread{self.spread}" if self.spread else "")
        counts = "" if self.counts is None else "of" + ".".join(map(str, self.counts))
        return f"{self.record}x{self.rows}k{self.k}{counts}{'' if self.wide else 'i32'}{even}"

    def columns(self) -> int:
        """Columns of an entry; a tensor has 576."""
        return FORMS[self.form].columns

    @property
    def form(self) -> str:
        return "bf16_576" if self.record == "tensor" else self.record

    def draw(self, tokens: int, seed: int) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
        """Return (cache, indices, counts)."""
        generator = torch.Generator().manual_seed(seed)
        most = self.pages * self.rows
        indices = torch.randint(most, (tokens, self.k), generator=generator)
        missing = torch.rand(tokens, self.k, generator=generator) < 0.1
        for number, beyond in enumerate((*NO_ENTRIES, most)):
            chosen = missing & (torch.arange(self.k) % 4 == number)
            indices[chosen] = beyond
        counts = None
        used = torch.ones_like(indices, dtype=torch.bool)
        if self.counts is not None:
            counts = torch.tensor(self.counts, dtype=torch.int32)
            used = torch.arange(self.k) < counts[:, None]
        entries = indices[used & (indices >= 0) & (indices < most)].unique()
        values = torch.randn(self.pages, self.rows, self.columns(), generator=generator)
        if self.spread:
            exponents = -torch.randint(self.spread + 1, values.shape[:2], generator=generator)
            values *= torch.exp2(exponents.float())[..., None]
            values.flatten(0, 1)[::8] = 0
        cache = self._cache(values.bfloat16(), entries)
        return cache, indices if self.wide else indices.int(), counts

    def _cache(self, values: torch.Tensor, entries: torch.Tensor) -> Rows | torch.Tensor:
        """Return the cache: NaN but for the entries that are used."""
        place = entries // self.rows, entries % self.rows
        if self.record == "tensor":
            store = nan_view((*values.shape[:2], 1, values.shape[2]), torch.bfloat16, "cpu")
            store = store.squeeze(2)
            store[place] = values[place]
            return store
        record = RECORDS[self.record]
        nbytes = self.spare + record.page_bytes(self.rows)
        pool = torch.full((self.pages, nbytes), NAN_BYTE, dtype=torch.uint8)
        behind = self.spare + self.rows * record.data_bytes if record.scale_bytes else 0
        rows = Rows(pool, self.spare, behind, self.rows, record)
        data, scales = codec.encode(values[place], self.record)
        if self.spread and FORMS[self.record].scale == "fp32":
            multiply_scales(data, self.spread)
        rows.data()[place] = data
        if record.scale_bytes:
            rows.scales()[place] = scales
        return rows


def multiply_scales(data: torch.Tensor, seed: int) -> None:
    """Multiply every second entry's scales in fp8_656 by numbers from 1 to 2, as other writers do,
    who round none to a power of two.
    """
    begin = FORMS["fp8_656"].scale_at
    scales = data[::2, begin : begin + 16].contiguous().view(torch.float32)
    generator = torch.Generator().manual_seed(seed)
    scales *= 1 + torch.rand(scales.shape, generator=generator)
    data[::2, begin : begin + 16] = scales.view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Sparse(Shared):
    """Problem of `mla.sparse_decode` and `mla.sparse_prefill`.

    batch: entries of q [B, T, H, D]; 0 for q [T, H, D].
    tokens: in all.
    """

    tokens: int = 3
    batch: int = 0
    cache: Cache = Cache()
    extra: Cache | None = None
    rope: bool = False

    def __str__(self) -> str:
        words = [f"h{self.heads}", f"t{self.tokens}", str(self.cache)]
        words += [f"b{self.batch}"] * bool(self.batch)
        words += [f"and{self.extra}"] * (self.extra is not None)
        words += ["rope"] * self.rope + ["sinks"] * self.sinks
        words += [f"amp{self.amplitude:g}"] * (self.amplitude != 1.0)
        return "-".join(words + [f"{name}={value}" for name, value in self.options])

    @property
    def shape_alone(self) -> dict[str, Any]:
        return {"batch": 0}

    def inputs(self) -> Given:
        """Return the arguments of `mla.sparse_decode`."""
        q = self.draw(self.tokens, self.heads, self.cache.columns())
        rows, indices, counts = self.cache.draw(self.tokens, self.seed + 2)
        options = self.shared() | {"counts": counts}
        if self.extra is not None:
            names = ("extra", "extra_indices", "extra_counts")
            drawn = self.extra.draw(self.tokens, self.seed + 3)
            options |= dict(zip(names, drawn, strict=True))
        if self.rope:
            generator = torch.Generator().manual_seed(self.seed + 4)
            angles = torch.rand(POSITIONS, 32, generator=generator) * 6.0
            options["rope"] = angles.cos(), angles.sin()
            options["positions"] = torch.randint(POSITIONS, (self.tokens,), generator=generator)
        if self.batch:
            lead = (self.batch, self.tokens // self.batch)
            q, indices = q.unflatten(0, lead), indices.unflatten(0, lead)
            for name in ("counts", "extra_indices", "extra_counts", "positions"):
                if options.get(name) is not None:
                    options[name] = options[name].unflatten(0, lead)
        return (q, rows, indices), options

    def judge(
        self, results: Sequence[torch.Tensor], device: str = "cpu", *, senders: int = 0
    ) -> list[tolerance.Report]:
        """Return verdicts on O and LSE, computed on their device. senders: of `senders_of`."""
        (q, rows, indices), options = moved(replace(self, batch=0).inputs(), device)
        o, lse = results
        if self.batch:
            o, lse = o.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        sources = [_listed(rows, indices, options.pop("counts"))]
        extra = [options.pop(f"extra{name}", None) for name in ("", "_indices", "_counts")]
        if self.extra is not None:
            sources.append(_listed(*extra))
        return _verdicts(q[:, None], sources, options, (o[:, None], lse[..., None]), senders)


Case = Dense | Sparse


def arguments_of(case: Case, place: Mapping[str, Any], device: str = "meta") -> Arguments:
    """Return the arguments of the operator for the case; without memory as it is.

    place: `backend` or `arch`, and options that replace those of the case.
    """
    given, options = moved(case.inputs(), device)
    options |= dict(case.options) | dict(place)
    many = options.pop(MANY, False)
    if isinstance(case, Dense):
        return DECODE.arguments(dense_fields(*given, options))
    return SPARSE.arguments(sparse_fields(*given, options) | {MANY: many})


def senders_of(case: Case, place: Mapping[str, Any], device: str = "meta") -> int:
    """Return how many CTAs share an entry and round what they send; arguments as above."""
    return prepare(arguments_of(case, place, device))[1].senders


def _listed(
    rows: Rows | torch.Tensor, indices: torch.Tensor, counts: torch.Tensor | None
) -> reference.Source:
    store = codec.unpack(rows) if isinstance(rows, Rows) else rows
    return reference.Source(store.flatten(0, 1), indices, counts)


def _verdicts(
    q: torch.Tensor,
    sources: Sequence[reference.Source],
    options: Mapping[str, Any],
    results: Sequence[torch.Tensor],
    senders: int,
) -> list[tolerance.Report]:
    """Compare O [N, T, H, 512] and LSE [N, H, T] with the definition."""
    exact = reference.definition(q, sources, **options)
    rounded = reference.rounded(q, sources, senders=senders, **options)
    return [
        tolerance.compare_output(results[0], exact.o, rounded.o, torch.bfloat16),
        tolerance.compare_lse(results[1], exact.lse, rounded.lse),
    ]
