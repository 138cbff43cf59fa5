"""Random attention to latent keys, reproducible by a seed, and a trial of each against fp64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.numerics import tolerance
from lab.problems import draws
from lab.problems.draws import Kernel
from lab.problems.latent import (
    MANY,
    Cache,
    Case,
    Dense,
    Sparse,
    arguments_of,
    moved,
    senders_of,
)
from lab.soak import campaign
from lab.soak.campaign import Family, Feature, Results
from mla import decode, sparse_decode, sparse_prefill
from mla.attention.choose import ARCHS, KERNELS, WARP, plan_of
from mla.attention.config import LatentConfig
from mla.attention.launch import forward, prepare

HEADS = (1, 2, 3, 8, 16, 16, 17, 32, 40, 64, 64, 65, 100, 128, 128)
TOKENS = (1, 1, 1, 2, 3, 4, 8)  # of an entry of `decode`
PAGES = (1, 2, 7, 8, 16, 32, 64, 64, 128, 256)
RECORDS = {576: ("fp8_656", "bf16_576", "tensor"),
           512: ("fp8_584", "fp8_584", "fp8_528", "fp4_288", "bf16_512")}  # fmt: skip
EDGES = (0, 8, 32, 64, 128, 256, 512)  # of tiles, and of what a CTA takes
# (factor of q, scale): scores of about 1, of 0, and larger ones.
# Exponents of the powers of two by which entries differ.
SPREADS = (0, 0, 0, 0, 6, 24)
SCORES = ((1.0, None),) * 3 + ((0.0, None), (4.0, None), (20.0, None), (1.0, 0.3), (1.0, 1e-6))


@dataclass(frozen=True)
class Sizes:
    """The most keys of an entry, query entries, and rows (heads times tokens) of an entry."""

    keys: int
    entries: int
    rows: int


SIZES = {"small": Sizes(150, 3, 72), "usual": Sizes(3000, 12, 1024), "long": Sizes(40_000, 6, 1024)}


class Draws(draws.Draws):
    """Kinds of calls, each of a few kernels: sizes choose cluster and parts if nothing does."""

    sizes: Sizes

    def kind(self, pick: random.Random) -> Case:
        case = _dense(pick, self.sizes) if pick.random() < 0.4 else _sparse(pick, self.sizes)
        kernel = pick.choice([*KERNELS[written_for(self.arch)]])
        return replace(case, sinks=pick.random() < 0.4, options=_options(pick, case, kernel))

    def config(self, kind: Case, pick: random.Random) -> LatentConfig:
        _, decision = prepare(arguments_of(kind, {"arch": self.arch}))
        if decision.kernel != WARP:
            plan_of(decision.kernel, decision.config).check()
        return decision.config

    def drawn(self, kernel: Kernel, pick: random.Random) -> Case:
        return drawn_problem(kernel.case, pick, self.sizes)

    def keys(self, kernel: Kernel, numbers: Sequence[int]) -> list[KernelKey]:
        with collecting() as found:
            for number in numbers:
                forward(arguments_of(self.problem(kernel, number), {"arch": self.arch}))
        return [*dict.fromkeys(found)]


def _dense(pick: random.Random, sizes: Sizes) -> Dense:
    """Draw what is compiled of `decode`; lengths only show whether they are given."""
    tokens = pick.choice(TOKENS)
    return Dense(
        heads=_heads(pick, sizes.rows // tokens),
        tokens=tokens,
        page=pick.choice((*PAGES, pick.randint(1, 256))),
        causal=pick.random() < 0.7,
        scaled=pick.random() < 0.25,
        full=pick.random() < 0.15,
    )


def _sparse(pick: random.Random, sizes: Sizes) -> Sparse:
    """Draw what is compiled of `sparse_decode`."""
    records = RECORDS[pick.choice((512, 512, 576))]
    return Sparse(
        heads=_heads(pick, sizes.rows),
        tokens=1,
        cache=_cache(pick, records),
        extra=_cache(pick, records) if pick.random() < 0.5 else None,
        rope=pick.random() < 0.4,
    )


def _heads(pick: random.Random, most: int) -> int:
    return pick.choice([heads for heads in HEADS if heads <= most])


def _cache(pick: random.Random, records: Sequence[str]) -> Cache:
    counts = (0,) if pick.random() < 0.5 else None
    rows = pick.choice((*PAGES, pick.randint(1, 256)))
    return Cache(pick.choice(records), rows, 40, counts, wide=pick.random() < 0.5)


def _options(pick: random.Random, case: Case, kernel: str) -> tuple[tuple[str, Any], ...]:
    """Draw arguments that change no result; some of them are refused."""
    found = {
        "kernel": kernel,
        "parts": pick.choice((0, 0, 1, 2, 3, 7)),
        "pdl": pick.random() < 0.25,
        "batch_invariant": pick.random() < 0.2,
    }
    if kernel != "warp":
        found["cluster"] = pick.choice((0, 0, 1, 2, 3, 4, 5, 8, 16))
    if isinstance(case, Sparse) and pick.random() < 0.2:
        found |= {MANY: True, "parts": 0}
    return tuple((name, value) for name, value in found.items() if value)


def drawn_problem(kind: Case, pick: random.Random, sizes: Sizes) -> Case:
    """Draw a problem of a kind of call."""
    amplitude, scale = pick.choice(SCORES)
    entries = pick.choice((1, 1, 2, 3, pick.randint(1, sizes.entries), sizes.entries))
    if isinstance(kind, Dense):
        lens = tuple(_length(pick, sizes.keys) for _ in range(entries))
        return replace(kind, lens=lens, amplitude=amplitude, scale=scale)
    extra = kind.extra and _sized(kind.extra, pick, entries, sizes)
    batch = pick.choice((0, 0, *(n for n in (1, 2, 3) if entries % n == 0)))
    return replace(
        kind,
        tokens=entries,
        batch=batch,
        cache=_sized(kind.cache, pick, entries, sizes),
        extra=extra,
        amplitude=amplitude,
        scale=scale,
    )


def _sized(cache: Cache, pick: random.Random, tokens: int, sizes: Sizes) -> Cache:
    """Draw how many entries there are, how many tokens list, and how many of these count."""
    k = max(1, _length(pick, sizes.keys // 2))
    most = pick.choice((1, 50, 2 * k))
    counts = None
    if cache.counts is not None:
        counts = tuple(pick.choice((0, 1, k, pick.randint(0, k))) for _ in range(tokens))
    pages, spread = max(1, -(-most // cache.rows)), pick.choice(SPREADS)
    return replace(cache, k=k, counts=counts, pages=pages, spread=spread)


def _length(pick: random.Random, most: int) -> int:
    """Draw a length: zero, small, near an edge, near the maximum, or any."""
    length = pick.choice((
        0, pick.randint(1, 16), pick.choice(EDGES) + pick.randint(-1, 1),
        most - pick.choice((0, 0, 1, 7)), pick.randint(1, most),
    ))  # fmt: skip
    return min(max(length, 0), most)


class Trial(campaign.Trial):
    """A problem against fp64 on the same device."""

    case: Case

    def prepare(self) -> Results:
        (q, *rest), options = moved(self.case.inputs(), self.place.device)
        launched = dict(self.case.options)
        self.function = decode
        if isinstance(self.case, Sparse):
            self.function = sparse_prefill if launched.pop(MANY, False) else sparse_decode
        self.rest, self.options = rest, options | launched | self.place.given
        return (q,)

    def step(self, *inputs: torch.Tensor) -> Results:
        return self.function(*inputs, *self.rest, return_lse=True, **self.options)

    def reports(self) -> Sequence[tolerance.Report]:
        device = self.place.device
        senders = senders_of(self.case, self.place.given, device)
        return self.case.judge(self.first, device, senders=senders)

    def change(self) -> None:
        self.inputs[0].neg_()


def _option(name: str) -> Feature:
    return lambda case: dict(case.options).get(name)


def _caches(case: Case) -> list[Cache]:
    """Return the caches of a sparse problem."""
    return [each for each in (case.cache, case.extra) if each] if isinstance(case, Sparse) else []


def _is_dense(field: str) -> Feature:
    return lambda case: isinstance(case, Dense) and getattr(case, field)


FEATURES: dict[str, Feature] = {
    **{name: lambda case, name=name: _option("kernel")(case) == name
       for name in ("warp", "wgmma", "umma")},
    "decode": lambda case: isinstance(case, Dense),
    "sparse_decode": lambda case: isinstance(case, Sparse) and not _option(MANY)(case),
    "sparse_prefill": _option(MANY),
    **{f"{name} entries": lambda case, name=name: any(each.record == name for each in _caches(case))
       for name in dict.fromkeys(name for names in RECORDS.values() for name in names)},
    "two caches": lambda case: len(_caches(case)) > 1,
    "entries of all sizes": lambda case: any(each.spread for each in _caches(case)),
    "counts": lambda case: any(each.counts is not None for each in _caches(case)),
    "int32 indices": lambda case: any(not each.wide for each in _caches(case)),
    "tokens of a batch": lambda case: isinstance(case, Sparse) and case.batch,
    "rope": lambda case: isinstance(case, Sparse) and case.rope,
    "e4m3 keys": _is_dense("scaled"),
    "several tokens": lambda case: isinstance(case, Dense) and case.tokens > 1,
    "not causal": lambda case: isinstance(case, Dense) and not case.causal,
    "no lengths": _is_dense("full"),
    "pages of one row": lambda case: isinstance(case, Dense) and case.page == 1,
    "entries without keys": lambda case: isinstance(case, Dense) and 0 in case.lens,
    "sinks": lambda case: case.sinks,
    "more heads than a tile": lambda case: case.heads > 64,
    "scores of 0": lambda case: case.amplitude == 0.0,
    "large scores": lambda case: case.amplitude > 1.0,
    "a drawn cluster": _option("cluster"),
    "several parts": lambda case: dict(case.options).get("parts", 0) > 1,
    "the same bits in any batch": _option("batch_invariant"),
    "pdl": _option("pdl"),
}  # fmt: skip


FAMILY = Family(
    "mla",
    ARCHS,
    Draws,
    SIZES,
    Trial,
    FEATURES,
    {"O": "output", "LSE": "lse"},
)
