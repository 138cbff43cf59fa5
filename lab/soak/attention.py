"""Random attention problems, reproducible by a seed: kernels from anywhere in the space of what
`attention` takes, for each of them problems of any size, and a trial of each against fp64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmha import attention
from fmha.config import (
    FP8,
    HEAD_DIMS,
    IO_DTYPES,
    PAGE_SIZES,
    PORTABLE_DIMS,
    PORTABLE_PAGE_SIZES,
    Q_DTYPES_OF_FP8,
    AttentionConfig,
)
from fmha.launch import ARCHS
from fmha.plan import kernel_of
from kernelkit.compile.keys import KernelKey
from kernelkit.numerics import tolerance
from lab.flags.attention import OPTIONS
from lab.problems import draws, extremes
from lab.problems.attention import Case, judge
from lab.problems.draws import Kernel
from lab.problems.fmha import arguments_of, config_of, moved, plan_of
from lab.soak import campaign
from lab.soak.campaign import Family, Feature, Results

GROUPS = (1, 1, 2, 3, 4, 5, 8, 16, 40, 128)  # query heads of a KV head
EDGES = (0, 48, 64, 80, 112, 128, 192, 256, 384)  # of tiles
# (amplitude of q, growth of k, scale, depth): maxima that stay, that move, that are exceeded tile
# by tile, and that are so low that a weight beside 0 would be none.
SCORES = (
    *((1.0, 0.0, None, 0.0),) * 4,
    *((1.0, 0.0, 0.05, 0.0), (1.0, 0.0, 1.0, 0.0), (0.0, 0.0, None, 0.0), (4.0, 0.0, None, 0.0)),
    *((20.0, 0.0, None, 0.0), (20.0, 0.0, 1.0, 0.0), (1000.0, 0.0, None, 0.0)),
    *((1.0, 30.0, None, 0.0), (4.0, -30.0, None, 0.0), (1.0, 8.0, 1.0, 0.0)),
    *((1.0, -8.0, None, 0.0), (1.0, 0.0, 1.0, 16.0)),
)  # fmt: skip
TUNING = {option.name: option.drawn for option in OPTIONS if option.drawn}
PORTABLE_TUNING = {option.name: option.portable for option in OPTIONS if option.portable}
EXTREME = 0.25  # of problems: their numbers are at the ends of what is accepted
RAW_FP16_KEYS = 900  # whose sums stay in the range of fp16 while the maximum hardly lags


@dataclass(frozen=True)
class Sizes:
    """The most of an entry; of all entries and heads together, rows of q or of k, and scores."""

    queries: int
    keys: int
    rows: int
    scores: int


SIZES = {
    "small": Sizes(140, 600, 1 << 11, 1 << 17),
    "usual": Sizes(1500, 5000, 1 << 16, 1 << 25),
    "long": Sizes(4096, 1 << 17, 1 << 19, 1 << 31),
}


class Draws(draws.Draws):
    """Draws of attention."""

    sizes: Sizes

    def kind(self, pick: random.Random) -> Case:
        return drawn_kernel(pick)

    def config(self, kind: Case, pick: random.Random) -> AttentionConfig:
        case = self._drawn(kind, pick)
        arguments_of(case, "meta").check()
        return plan_of(case, self.arch).config

    def drawn(self, kernel: Kernel, pick: random.Random) -> Case:
        while True:
            case = self._drawn(kernel.case, pick)
            if config_of(case, self.arch) == kernel.config:
                return case

    def keys(self, kernel: Kernel, numbers: Sequence[int]) -> list[KernelKey]:
        return [KernelKey(kernel_of(kernel.config, self.arch), kernel.config, self.arch)]

    def _drawn(self, kind: Case, pick: random.Random) -> Case:
        while True:
            case, sizes = drawn_problem(kind, pick, self.sizes), self.sizes
            rows = max(sum(case.queries) * case.heads[0], sum(case.keys) * case.heads[1])
            scores = sum(map(math.prod, zip(case.queries, case.keys, strict=True)))
            if rows <= sizes.rows and scores * case.heads[0] <= sizes.scores:
                return case


def drawn_kernel(pick: random.Random) -> Case:
    """Draw what is compiled; runtime values only show whether they are given."""
    keys = pick.choice(("dense", "lens", "lens", "packed", "packed, lens", "pages", "pages"))
    left, right = pick.random() < 0.4, pick.choice(("all", "all", "causal", "causal", "window"))
    normalize, dims = pick.random() < 0.8, pick.choice(HEAD_DIMS)
    portable, tuned = pick.random() < 0.3, pick.random() < 0.4
    if portable:
        dims = pick.choice(PORTABLE_DIMS), pick.choice(PORTABLE_DIMS)
        dims = dims if pick.random() < 0.3 else (dims[0], dims[0])
    return Case(
        *(1, 1, (pick.choice(GROUPS), 1)),
        dims=dims,
        **({"dtype": pick.choice(IO_DTYPES)} if portable else _dtypes(pick)),
        out_dtype=pick.choice(("", "", *IO_DTYPES, "fp32")),
        normalize=normalize,
        causal=right == "causal",
        window=(1 if left else None, 1 if right == "window" else None),
        sink_tokens=int(left and pick.random() < 0.5),
        softcap=float(pick.random() < 0.25),
        sinks=normalize and pick.random() < 0.3,
        q_offset=0 if pick.random() < 0.3 else None,
        q_lens=(1,) if pick.random() < 0.4 else None,
        k_lens=(1,) if keys.startswith("packed") else None,
        kv_lens=None if keys in ("dense", "packed") else (1,),
        page_size=pick.choice(PORTABLE_PAGE_SIZES if portable else PAGE_SIZES)
        if keys == "pages"
        else 0,
        rope_dim=min(pick.choice((2, 32, 64, 512)), dims[1]) if pick.random() < 0.25 else 0,
        pack_heads=pick.choice((None, False, True)),
        pdl=pick.random() < 0.1,
        k_is_v=not portable and dims == (512, 512) and pick.random() < 0.5,
        instructions="mma.sync" if portable else "",
        **(_tuning(pick, PORTABLE_TUNING if portable else TUNING) if tuned else {}),
    )


def _dtypes(pick: random.Random) -> dict[str, Any]:
    """Every third one with keys in e4m3."""
    if pick.random() < 2 / 3:
        return {"dtype": pick.choice(IO_DTYPES)}
    dtype = pick.choice(Q_DTYPES_OF_FP8)
    kv_dtype = "" if dtype == FP8 else FP8
    return {"dtype": dtype, "kv_dtype": kv_dtype, "scales": pick.random() < 0.5}


def _tuning(pick: random.Random, tuning: dict[str, tuple]) -> dict[str, Any]:
    return {name: pick.choice(values) for name, values in tuning.items() if pick.random() < 0.4}


def drawn_problem(kind: Case, pick: random.Random, sizes: Sizes) -> Case:
    """A problem of a kind of kernel."""
    batch, kv_heads = pick.choice((1, 1, 2, 3, 5)), pick.choice((1, 1, 2, 3))
    group = pick.choice(GROUPS) if kind.pack_heads is False else kind.heads[0]
    amplitude, climb, scale, depth = pick.choice(SCORES)
    most = sizes.keys
    if not kind.normalize and kind.out_dtype == "fp16":
        most = min(most, RAW_FP16_KEYS)
        amplitude, climb, scale, depth = SCORES[0]
    n_q = _lengths(pick, batch, sizes.queries, differ=kind.q_lens is not None)
    n_k = _lengths(pick, batch, most, differ=(kind.k_lens or kind.kv_lens) is not None)
    offsets = [pick.choice((0, pick.randint(-60, length + 60))) for length in n_k]
    if kind.rope_dim:  # a table has no row for positions before the first key
        n_k = [max(lengths) for lengths in zip(n_q, n_k, strict=True)]
        offsets = [max(offset, 0) for offset in offsets]
    surplus = pick.choice((0, 1, 140)) if kind.kv_lens is not None else 0
    stored = [length + surplus for length in n_k]
    case = replace(
        kind,
        sq=max(n_q),
        skv=max(stored),
        heads=(kv_heads * group, kv_heads),
        batch=batch,
        kv_lens=None if kind.kv_lens is None else tuple(n_k),
        q_lens=None if kind.q_lens is None else tuple(n_q),
        k_lens=None if kind.k_lens is None else tuple(stored),
        window=tuple(None if side is None else _width(pick, most) for side in kind.window),
        sink_tokens=pick.choice((1, 4, 129, 300)) if kind.sink_tokens else 0,
        q_offset=None if kind.q_offset is None else tuple(offsets),
        softcap=pick.choice((0.5, 15.0, 50.0)) if kind.softcap else 0.0,
        sink_value=pick.choice((None, None, -math.inf, 90.0)) if kind.sinks else None,
        amplitude=amplitude,
        climb=climb,
        depth=depth,
        scale=scale,
        tokens_first=pick.random() < 0.4,
    )
    # A raw O with an LSE of 1e6 cannot be normalised, and infinities cannot be turned.
    turned = kind.rope_dim and kind.scales
    fits = kind.normalize and not turned
    return extremes.of_case(case, pick) if fits and pick.random() < EXTREME else case


def _lengths(pick: random.Random, batch: int, most: int, *, differ: bool) -> list[int]:
    return [_length(pick, most) for _ in range(batch)] if differ else [_length(pick, most)] * batch


def _length(pick: random.Random, most: int) -> int:
    """Draw a length: zero, small, near the edge of a tile, near the maximum, or any."""
    length = pick.choice((
        0, pick.randint(1, 16), pick.choice(EDGES) + pick.randint(-1, 1),
        pick.choice(EDGES) + pick.choice(EDGES) + pick.randint(-1, 1),
        most - pick.choice((0, 0, 1, 7, 129)), pick.randint(1, most), pick.randint(1, most),
    ))  # fmt: skip
    return min(max(length, 0), most)


def _width(pick: random.Random, most: int) -> int:
    return pick.choice((0, 1, 63, 128, pick.randint(0, 400), pick.randint(0, most), 1 << 40))


class Trial(campaign.Trial):
    """Against fp64 on the same device."""

    case: Case

    def prepare(self) -> Results:
        device = self.place.device
        self.arguments = moved(self.case.arguments(), device) | self.place.given
        return self.case.inputs(device)

    def step(self, *inputs: torch.Tensor) -> Results:
        return attention(*inputs, **self.arguments)

    def reports(self) -> Sequence[tolerance.Report]:
        return judge(self.case, self.first, self.inputs, aligned_sums=self.is_native)

    def change(self) -> None:
        campaign.change_q_and_v(self.inputs)
        if self.case.kv_lens is not None:
            self.arguments["kv_lens"].floor_divide_(2)


LARGE = 100.0  # amplitude

FEATURES: dict[str, Feature] = {
    **{
        f"head dim {d}": lambda case, d=d: case.dims[0] == d
        for d in (64, 96, 128, 192, 256, 512)
    },
    "bf16": lambda case: case.dtype == "bf16",
    "fp16": lambda case: case.dtype == "fp16",
    "e4m3 keys, bf16 queries": lambda case: case.kv_dtype == "e4m3",
    "e4m3": lambda case: case.dtype == "e4m3",
    "O of another dtype": lambda case: case.out_dtype not in ("", case.dtype),
    "raw O": lambda case: not case.normalize,
    "causal": lambda case: case.causal,
    "left window": lambda case: case.window[0] is not None,
    "right window": lambda case: case.window[1] is not None,
    "sink tokens": lambda case: case.sink_tokens,
    "learned sinks": lambda case: case.sinks,
    "sinks of -inf or 90": lambda case: case.sink_value is not None,
    "softcap": lambda case: case.softcap,
    "rope": lambda case: case.rope_dim,
    "q_offset": lambda case: case.q_offset is not None,
    "kv_lens": lambda case: case.kv_lens is not None,
    "pages": lambda case: case.page_size,
    "packed q": lambda case: case.q_lens is not None,
    "packed k and v": lambda case: case.k_lens is not None,
    "packed heads": lambda case: case.pack_heads,
    "groups of heads": lambda case: case.heads[0] > case.heads[1],
    "tokens first in memory": lambda case: case.tokens_first,
    "entries without queries": lambda case: 0 in case.queries,
    "entries without keys": lambda case: 0 in case.keys,
    "rows of 100k keys": lambda case: max(case.queries) and max(case.keys) >= 100_000,
    "scores of 0": lambda case: case.amplitude == 0.0,
    "huge scores": lambda case: case.amplitude >= LARGE,
    "scores that climb": lambda case: case.climb,
    "scores far below 0": lambda case: case.depth,
    "extremes": lambda case: case.extreme,
    "a tuned tile": lambda case: case.tile_m or case.tile_n,
    "tuned CTAs": lambda case: case.ctas,
    "tuned rings": lambda case: case.k_stages or case.v_stages,
    "a tuned schedule": lambda case: case.schedule,
    "a tuned polynomial": lambda case: case.polynomial >= 0,
    "a tuned lag": lambda case: case.rescale_log2 != Case.rescale_log2,
    "pdl": lambda case: case.pdl,
    "K is V": lambda case: case.k_is_v,
}  # fmt: skip


FAMILY = Family(
    "fmha",
    ARCHS,
    Draws,
    SIZES,
    Trial,
    FEATURES,
    {"O": "output", "LSE": "lse"},
)
