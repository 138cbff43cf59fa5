"""Problems of `bench.py mla`, their reference in fp32, and who solves them: mla and FlashMLA.

A peer makes, for a problem and the input sets of a rotation, one launch per set; a launch returns
(O [N, H, 512], LSE [N, H]) of N query entries of one token. It raises where it cannot.

FlashMLA is the package sgl-flash-mla, whose legacy half has the kernels for Hopper.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvcache.layouts.rows import Rows
from lab.measure.timing import MAX_SETS, rotation
from lab.tools.groups import spelt
from mla import decode_plan, sparse_decode, sparse_prefill
from mla.attention import codec
from mla.attention.formats import FORMS, LATENT

PAGE, WINDOW = 64, 128  # rows of a page, and of a page of the window
LEAST_ENTRIES, MOST_ENTRIES = 1 << 15, 1 << 20  # of a cache from which tokens choose
PREFILL_ENTRIES = 1 << 15
CHUNK_BYTES = 1 << 30  # of decoded keys that the reference and the drawing hold at a time
MAX_ERROR, MAX_LSE_ERROR = 0.02, 0.02  # norm of the worst row, relative; difference of the LSE
INPUTS = "q and keys standard normal, in bf16 or encoded; entries of a token all different"

Results = tuple[torch.Tensor, torch.Tensor]
Launch = Callable[[], Results]


@dataclass(frozen=True)
class Problem:
    """Attention of `entries` query entries of one token.

    rows: name of the set.
    keys: keys of an entry, or entries that a token lists of the cache.
    record: name of FORMS; the cache of `decode` has pages of bf16_576.
    window: entries that it lists of a second cache, whose record is window_record.
    """

    rows: str
    entries: int
    heads: int
    keys: int
    record: str = "bf16_576"
    window: int = 0
    window_record: str = "fp8_584"

    def __str__(self) -> str:
        kind = f"{self.entries} x {spelt(self.keys)}" + f" + {self.window}" * bool(self.window)
        records = self.record + f" + {self.window_record}" * bool(self.window)
        return f"{self.rows}: {kind}, {self.heads} heads, {records}"

    @property
    def dense(self) -> bool:
        """Whether the keys are those of a page table."""
        return self.rows == "dense"

    @property
    def columns(self) -> int:
        """Columns of Q and K."""
        return FORMS[self.record].columns

    @property
    def flop(self) -> int:
        """Operations of both products."""
        pairs = self.entries * self.heads * (self.keys + self.window)
        return 2 * pairs * (self.columns + LATENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys of every entry, and of Q and O."""
        keys = self.keys * entry_bytes(self.record)
        if self.window:
            keys += self.window * entry_bytes(self.window_record)
        return self.entries * (keys + 2 * self.heads * (self.columns + LATENT))

    @property
    def sizes(self) -> dict[str, Any]:
        """Fields of the problem in a row."""
        names = ("rows", "entries", "heads", "keys", "record", "window")
        found = {name: getattr(self, name) for name in names}
        found["window_record"] = self.window_record if self.window else ""
        return found | {"problem": str(self), "flop": self.flop, "nbytes": self.nbytes}

    def sets(self, cache_bytes: int) -> int:
        """Return the sets of a rotation after which nothing of the first is left in the cache."""
        return min(rotation(self.nbytes, cache_bytes), MAX_SETS)


def entry_bytes(record: str) -> int:
    """Return the bytes of an entry."""
    return FORMS[record].data_bytes + FORMS[record].scale_bytes


def _dense() -> Iterator[Problem]:
    sizes = ((1, 4096), (1, 16384), (1, 65536), (8, 8192), (32, 8192), (128, 4096))
    for heads, (entries, keys) in itertools.product((128, 64, 16), sizes):
        yield Problem("dense", entries, heads, keys)


def _chosen(rows: str, chosen: Sequence[int], record: str, window_record: str) -> Iterator[Problem]:
    """Problems of decoding whose tokens choose entries, and see a window if it has a record."""
    window = WINDOW if window_record else 0
    for heads, tokens, keys in itertools.product((128, 64), (1, 8, 32, 128), chosen):
        yield Problem(rows, tokens, heads, keys, record, window, window_record)


def _prefill() -> Iterator[Problem]:
    for heads in (128, 64):
        yield Problem("prefill", 4096, heads, 2048)
        for chosen in (640, 1152):
            yield Problem("prefill", 4096, heads, chosen, "bf16_512")


ROWS = {
    "dense": tuple(_dense()),
    "v4": tuple(_chosen("v4", (512, 1024), "fp8_584", "fp8_584")),
    "v3.2": tuple(_chosen("v3.2", (2048,), "fp8_656", "")),
    "v4.1": tuple(_chosen("v4.1", (512, 1024), "fp4_288", "fp8_528")),
    "prefill": tuple(_prefill()),
}


# -- inputs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    """Entries of a cache, and what each query entry sees of it.

    store: pages [pages, rows, columns] in bf16, or records.
    places: int32 [N, k], entries; or [N, pages] of a dense problem.
    """

    store: torch.Tensor | Rows
    places: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    """Input set.

    q: bf16 [N, H, columns].
    caches: one, or the window and the chosen ones.
    """

    q: torch.Tensor
    caches: tuple[Cache, ...]

    @property
    def lengths(self) -> torch.Tensor:
        """Return int32 [N], the keys of each entry of a dense problem."""
        table = self.caches[0].places
        return torch.full_like(table[:, 0], table.shape[1] * PAGE)


def drawn(problem: Problem, count: int, device: str, *, empty: bool = False) -> list[Inputs]:
    """Draw the input sets of a rotation, which share caches and differ in what they see of them.

    empty: keys are zeros in memory that nobody has touched, for a model of time.
    """
    generator = torch.Generator(device).manual_seed(0)
    caches = _caches(problem, count, generator, _untouched if empty else _store)
    shape = (problem.entries, problem.heads, problem.columns)
    how = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    return [Inputs(torch.randn(shape, **how), next(caches)) for _ in range(count)]


def _caches(
    problem: Problem, count: int, generator: torch.Generator, make: Callable[..., Any]
) -> Iterator[tuple[Cache, ...]]:
    """Yield the caches of each set."""
    tokens, keys, device = problem.entries, problem.keys, generator.device
    if problem.dense:
        pages = tokens * keys // PAGE
        store = make("bf16_576", count * pages, PAGE, generator)
        order = torch.randperm(count * pages, generator=generator, device=device).int()
        for table in order.view(count, tokens, -1):
            yield (Cache(store, table),)
        return
    wanted = PREFILL_ENTRIES
    if problem.rows != "prefill":
        wanted = min(max(count * tokens * keys, LEAST_ENTRIES), MOST_ENTRIES)
    store = make(problem.record, wanted // PAGE, PAGE, generator)
    near = None
    if problem.window:
        near = make(problem.window_record, count * tokens, problem.window, generator)
    for number in range(count):
        chosen = Cache(store, _distinct(tokens, keys, wanted // PAGE * PAGE, generator))
        if near is None:
            yield (chosen,)
            continue
        slot = torch.arange(number * tokens, (number + 1) * tokens, device=device)
        ring = slot[:, None] * problem.window + torch.arange(problem.window, device=device)
        yield Cache(near, ring.int()), chosen


def _distinct(tokens: int, k: int, most: int, generator: torch.Generator) -> torch.Tensor:
    """Draw int32 [tokens, k], numbers below `most`, those of a token all different."""
    device, stride = generator.device, most // k
    first = torch.randperm(k, generator=generator, device=device) * stride
    how = {"generator": generator, "device": device}
    return (first + torch.randint(stride, (tokens, k), **how)).int()


def _store(record: str, pages: int, rows: int, generator: torch.Generator) -> torch.Tensor | Rows:
    """Draw a cache; bf16 entries are a tensor."""
    columns, device = FORMS[record].columns, generator.device
    step = max(1, CHUNK_BYTES // (4 * rows * columns))
    values = torch.empty(pages, rows, columns, dtype=torch.bfloat16, device=device)
    for part in values.split(step):
        part.normal_(generator=generator)
    if FORMS[record].plain:
        return values
    packed = [codec.pack(part, record) for part in values.split(step)]
    first = packed[0]
    pool = first.pool if len(packed) == 1 else torch.cat([each.pool for each in packed])
    return Rows(pool, first.data_offset, first.scale_offset, rows, first.record)


def _untouched(record: str, pages: int, rows: int, generator: torch.Generator) -> Any:
    """Return a cache of zeros."""
    form, device = FORMS[record], generator.device
    if form.plain:
        return torch.zeros(pages, rows, form.columns, dtype=torch.bfloat16, device=device)
    stored = codec.RECORDS[record]
    pool = torch.zeros(pages, stored.page_bytes(rows), dtype=torch.uint8, device=device)
    return Rows(pool, 0, rows * stored.data_bytes if stored.scale_bytes else 0, rows, stored)


# -- reference ------------------------------------------------------------------------------------


def reference(inputs: Inputs, problem: Problem) -> Results:
    """Compute O and LSE in fp32, some query entries at a time."""
    q, scale = inputs.q, problem.columns**-0.5
    o = torch.empty(*q.shape[:2], LATENT, device=q.device)
    lse = torch.empty(q.shape[:2], device=q.device)
    step = max(1, CHUNK_BYTES // (4 * problem.columns * (problem.keys + problem.window)))
    for begin in range(0, len(q), step):
        part = slice(begin, begin + step)
        keys = torch.cat([_seen(cache, part, problem.dense) for cache in inputs.caches], 1).float()
        scores = q[part].float() @ keys.transpose(1, 2) * scale
        lse[part] = scores.logsumexp(-1)
        o[part] = torch.softmax(scores, -1) @ keys[..., :LATENT]
    return o, lse


def _seen(cache: Cache, part: slice, dense: bool) -> torch.Tensor:
    """Return the keys of some query entries, bf16 [n, k, columns]."""
    places = cache.places[part].long()
    if isinstance(cache.store, Rows):
        return codec.unpack(cache.store, places)
    return (cache.store[places] if dense else cache.store.flatten(0, 1)[places[..., None]]).flatten(
        1, 2
    )


def errors_of(found: Results, expected: Results) -> tuple[float, float]:
    """Return (norm of the worst row of O, relative; largest difference of the LSE); infinite where
    a value is not finite."""
    o, lse = found[0].reshape(expected[0].shape).float(), found[1].reshape(expected[1].shape)
    row = (o - expected[0]).norm(dim=-1) / expected[0].norm(dim=-1)
    errors = row.max().item(), (lse.float() - expected[1]).abs().max().item()
    return tuple(error if error == error else float("inf") for error in errors)


def checked(launches: Sequence[Launch], expected: Sequence[Results]) -> dict[str, float]:
    """Return the largest errors of the first and the last launch; ValueError beyond the limits."""
    ends = (launches[0], launches[-1])
    found = [errors_of(launch(), e) for launch, e in zip(ends, expected, strict=True)]
    o, lse = (max(each) for each in zip(*found, strict=True))
    if not (o <= MAX_ERROR and lse <= MAX_LSE_ERROR):
        raise ValueError(
            f"wrong: O is {o:.1%} off the reference, limit {MAX_ERROR:.0%}; LSE {lse:.2g}, limit "
            f"{MAX_LSE_ERROR:g}"
        )
    return {"error": o, "lse_error": lse}


# -- peers ----------------------------------------------------------------------------------------


def ours(**options: Any) -> Callable[[Problem, Sequence[Inputs]], list[Launch]]:
    """`mla` with these options."""

    def make(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
        launch = _ours_dense if problem.dense else _ours_sparse
        return [launch(problem, inputs, options) for inputs in sets]

    return make


def _ours_dense(problem: Problem, inputs: Inputs, options: dict[str, Any]) -> Launch:
    store, table = inputs.caches[0].store, inputs.caches[0].places
    given = {"page_table": table, "kv_lens": inputs.lengths}
    plan = decode_plan(inputs.q, store, **given, **options)
    out = inputs.q.new_empty(*inputs.q.shape[:2], LATENT)
    lse = inputs.q.new_empty(inputs.q.shape[:2], dtype=torch.float32)
    return partial(plan, inputs.q, store, **given, out=out, lse=lse)


def _ours_sparse(problem: Problem, inputs: Inputs, options: dict[str, Any]) -> Launch:
    function = sparse_prefill if problem.rows == "prefill" else sparse_decode
    first, *others = inputs.caches
    given = {"out": inputs.q.new_empty(*inputs.q.shape[:2], LATENT), "return_lse": True}
    for cache in others:
        given |= {"extra": cache.store, "extra_indices": cache.places}
    return partial(function, inputs.q, first.store, first.places, **given, **options)


def flashmla(problem: Problem, sets: Sequence[Inputs]) -> list[Launch]:
    """FlashMLA's kernels for Hopper, by sgl-flash-mla; the schedule is made before."""
    if problem.rows == "v4.1":
        raise NotImplementedError("FlashMLA has no kernel for records of V4.1 on Hopper")
    import flash_mla

    if problem.rows == "prefill":
        make = _flash_prefill
    else:
        make = _flash_dense if problem.dense else _flash_sparse
    return [make(flash_mla, problem, inputs) for inputs in sets]


def _flash_dense(library: Any, problem: Problem, inputs: Inputs) -> Launch:
    schedule, _ = library.get_mla_metadata()
    kv, table = inputs.caches[0].store.unsqueeze(2), inputs.caches[0].places
    given = (inputs.q.unsqueeze(1), kv, table, inputs.lengths, LATENT, schedule)
    launch = partial(library.flash_mla_with_kvcache, *given, use_legacy=True)
    launch()
    return launch


def _flash_sparse(library: Any, problem: Problem, inputs: Inputs) -> Launch:
    schedule, _ = library.get_mla_metadata()
    first, *others = inputs.caches
    options = {"is_fp8_kvcache": True, "use_legacy": True, "indices": first.places.unsqueeze(1)}
    for cache in others:
        options["extra_k_cache"] = _as_tokens(cache.store)
        options["extra_indices_in_kvcache"] = cache.places.unsqueeze(1)
    given = (inputs.q.unsqueeze(1), _as_tokens(first.store), None, None, LATENT, schedule)
    launch = partial(library.flash_mla_with_kvcache, *given, **options)
    launch()
    return launch


def _as_tokens(rows: Rows) -> torch.Tensor:
    """Return [pages, rows, 1, bytes of an entry] over the pool, as FlashMLA takes it."""
    nbytes = rows.record.bytes
    pages = rows.pool[:, : rows.rows * nbytes]
    return pages.view(len(pages), rows.rows, 1, nbytes)


def _flash_prefill(library: Any, problem: Problem, inputs: Inputs) -> Launch:
    store, places = inputs.caches[0].store, inputs.caches[0].places
    keys, scale = store.flatten(0, 1).unsqueeze(1), problem.columns**-0.5

    def launch() -> Results:
        o, _, lse = library.flash_mla_sparse_fwd(
            inputs.q, keys, places.unsqueeze(1), scale, LATENT, use_legacy=True
        )
        return o, lse

    return launch


PEERS = {
    "mla": ours(),
    "mla pdl": ours(pdl=True),
    "mla warp": ours(kernel="warp"),
    "mla wgmma": ours(kernel="wgmma"),
    "flashmla": flashmla,
}
