"""Layers of experts in every format, from the logits to the weighted sum."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil, without
from moe import (
    ArrangedExperts,
    PackedExperts,
    Router,
    RouterLinear,
    Scales,
    SwiGLU,
    arrange,
    fused_moe,
    pack,
)
from moe.mixed.config import ROWS_OF
from moe.reference_routing import SCORING

ARCHS = ("sm_100a", "sm_90a")
EXPERTS, HIDDEN, INTERMEDIATE = 5, 128, 128
NUMBERS = {"sm_100a": (("bf16", "nvfp4"), ("bf16", "mxfp4")),
           "sm_90a": (("bf16", "nvfp4"), ("bf16", "mxfp4"), ("e4m3", "mxfp4"))}  # fmt: skip
# Activations and weights of Blackwell's block-scaled products.
BLOCKS = (("nvfp4", "nvfp4"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("mxfp8", "mxfp4"))
SCALES = ("default", "token", "known", "known h")
FORMS = (SwiGLU(), SwiGLU(1.702, 1.0, 7.0))
KEPT = 4  # experts of so many kinds


@dataclass(frozen=True)
class Layer:
    """Kind of a layer.

    x, w: formats of activations and weights.
    scales: scales of nvfp4.
    linear: whether logits are made in the layer.
    tile_rows: option of `fused_moe`."""

    x: str
    w: str
    scales: str
    form: SwiGLU
    bias: bool
    top_k: int
    scoring: str
    shared: int
    rank: tuple[int, int] | None
    linear: bool
    tile_rows: int | None

    @property
    def total(self) -> int:
        """Experts, here or elsewhere."""
        return EXPERTS + self.shared

    def experts(self) -> PackedExperts | ArrangedExperts:
        """Experts, identical for every problem of the layer."""
        return _experts(self)


@lru_cache(maxsize=KEPT)
def _experts(layer: Layer) -> PackedExperts | ArrangedExperts:
    generator = torch.Generator().manual_seed(len(str(layer)))
    first, end = layer.rank or (0, layer.total)
    count = end - first

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    w13 = normal(count, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5
    w2 = normal(count, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
    biases = (normal(count, 2 * INTERMEDIATE), normal(count, HIDDEN)) if layer.bias else None
    packed = pack(w13, w2, layer.w, granularity=8, biases=biases)
    return arrange(packed, layer.x) if layer.x in ("bf16", "e4m3") else packed


@dataclass(frozen=True)
class LayerProblem(Problem):
    """what: of the token is replaced: 'x', its 'logits', so that other experts are chosen, or
    'both'."""

    subject: ClassVar[str] = "moe.fused_moe"
    kind: Layer
    tokens: int
    what: str

    def given(self) -> Given:
        kind, generator = self.kind, self.generator
        given: Given = {"x": torch.randn(self.tokens, HIDDEN, generator=generator).bfloat16()}
        if kind.linear:
            weight = torch.randn(EXPERTS, HIDDEN, generator=generator) * HIDDEN**-0.5
            given["router_logits"] = RouterLinear(weight.bfloat16())
        else:
            given["router_logits"] = torch.randn(self.tokens, EXPERTS, generator=generator)
        if kind.x == "nvfp4":
            x, h = torch.tensor([500.0]), torch.tensor([300.0])
            given["scales"] = {
                "default": None, "token": Scales("token", "token"), "known": Scales(x, h),
                "known h": Scales(h=h),
            }[kind.scales]  # fmt: skip
        return given | {"experts": kind.experts()}

    def spoil(self, given: Given) -> None:
        logits = given["router_logits"]
        if self.what != "logits" or self.kind.linear:
            spoil(given["x"][self.row], self.contents)
        if self.what != "x" and not self.kind.linear:
            spoil(logits[self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        kind = self.kind
        options: Given = {"activation": kind.form, "expert_range": kind.rank}
        options |= {"tile_rows": kind.tile_rows, "activations": kind.x}
        router = Router(kind.top_k, kind.scoring, shared=kind.shared)
        return (fused_moe(**given, router=router, **options, **where),)

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


def _kind(pick: random.Random, arch: str) -> Layer:
    pairs = NUMBERS[arch] + (BLOCKS if arch == "sm_100a" else ())
    x, w = pick.choice(pairs)
    tiles = ROWS_OF[arch] if (x, w) in NUMBERS[arch] else (64, 128, 256)
    rank = sorted(pick.sample(range(EXPERTS + 1), 2)) if pick.random() < 0.4 else None
    return Layer(
        x,
        w,
        pick.choice(SCALES) if x == "nvfp4" else "",
        pick.choice(FORMS),
        pick.random() < 0.5,
        pick.choice((1, 2, 3)),
        pick.choice(SCORING),
        pick.choice((0, 0, 1)),
        None if rank is None else (rank[0], rank[1]),
        pick.random() < 0.3,
        pick.choice((None, None, pick.choice(tiles))),
    )


def _problem(kind: Layer, pick: random.Random, small: bool) -> LayerProblem:
    tokens = pick.choice((2, 4, 6) if small else (2, 6, 40, 200))
    what = pick.choice(("x", "logits", "both"))
    seed, row = pick.getrandbits(32), pick.randrange(tokens)
    return LayerProblem(kind, seed, row, drawn_contents(pick), tokens, what)


SUBJECTS = (Subject("moe.fused_moe", ARCHS, _kind, _problem),)
