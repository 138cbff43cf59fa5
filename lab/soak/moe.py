"""Random products and layers of the experts of Hopper by a seed, and a trial of each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import moe
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.numerics import tolerance
from lab.problems import draws, hostile, mixed_gemm
from lab.problems.draws import Kernel
from lab.problems.mixed_gemm import Case, Layer, empty, empty_fragments
from lab.soak import campaign
from lab.soak.campaign import Family, Feature, Results
from moe.arguments import range_fields
from moe.formats import format_of
from moe.mixed.config import (
    ARCHS,
    NUMBERS,
    PARTS,
    ROWS_OF,
    SPLIT_ARCH,
    SPLIT_ROWS,
    SPLITS,
    TEAMS,
    TILE_ROWS,
    WEIGHTS,
    MixedConfig,
    fits,
)
from moe.mixed.fragments import ArrangedExperts
from moe.mixed.launch import KERNELS
from moe.mixed.layer import MixedLayer, run_layer

FORMS = ((1.0, 0.0, None), (1.0, 0.0, 10.0), (1.702, 1.0, 7.0), (1.702, 1.0, 0.25))
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
SHARE = 2 / 3  # of what is drawn; the rest are layers
UNIT = 32  # of sizes that a layer packs


@dataclass(frozen=True)
class Sizes:
    """The most experts, rows of one, K or hidden size, columns, numbers of all weights together,
    and products of numbers."""

    experts: int
    rows: int
    k: int
    columns: int
    weights: int
    work: int


SIZES = {
    "small": Sizes(40, 40, 400, 160, 1 << 18, 1 << 20),
    "usual": Sizes(80, 500, 1500, 1500, 1 << 22, 1 << 27),
    "large": Sizes(128, 3000, 2880, 5760, 1 << 28, 1 << 32),
}


class Draws(draws.Draws):
    """Kernels of `mixed_gemm`, and layers, each of a few kernels."""

    sizes: Sizes

    def kind(self, pick: random.Random) -> Case | Layer:
        draw = _product if pick.random() < SHARE else _layer
        return draw(pick, self.arch)

    def config(self, kind: Case | Layer, pick: random.Random) -> MixedConfig | Layer:
        if isinstance(kind, Layer):
            return kind
        return mixed_gemm.plan_of(kind).config

    def drawn(self, kernel: Kernel, pick: random.Random) -> Case | Layer:
        if isinstance(kernel.case, Layer):
            return _of_layer(kernel.case, pick, self.sizes)
        return _of_product(kernel.case, pick, self.sizes)

    def keys(self, kernel: Kernel, numbers: Sequence[int]) -> list[KernelKey]:
        if not isinstance(kernel.case, Layer):
            return [KernelKey(KERNELS[self.arch], kernel.config, self.arch)]
        with collecting() as found:
            for number in numbers:
                run_layer(arguments_of(self.problem(kernel, number), self.arch))
        return [*dict.fromkeys(found)]


def arguments_of(case: Layer, arch: str) -> MixedLayer:
    """Return the arguments of `fused_moe` without memory; they decide which kernels are
    compiled."""
    first, end = case.here
    count, rows = end - first, 2 * case.intermediate
    both = (
        empty_fragments(count, rows, case.hidden, case.fmt, swiglu=True),
        empty_fragments(count, case.hidden, case.intermediate, case.fmt, swiglu=False),
    )
    biases = (empty(count, n, dtype=torch.float32) for n in (rows, case.hidden))
    experts = ArrangedExperts(*both, *(biases if case.bias else ()))
    x = empty(case.tokens, case.hidden, dtype=torch.bfloat16)
    logits = empty(case.tokens, case.experts, dtype=torch.float32)
    given = {"activation": case.activation, "tile_rows": case.tile_rows, "arch": arch}
    return MixedLayer(x, logits, experts, case.router, **given, **range_fields(case.rank))


def _product(pick: random.Random, arch: str) -> Case:
    """Counts, sizes and hostile numbers come with the problem."""
    tile_rows = pick.choice(ROWS_OF[arch])
    possible = [each for each in itertools.product(TEAMS, PARTS) if fits(arch, tile_rows, *each)]
    teams, parts = pick.choice(possible)
    case = Case(
        (1,),
        fmt=pick.choice(WEIGHTS),
        form=pick.choice((None, None, *FORMS)),
        bias=pick.random() < 0.5,
        slots=int(pick.random() < 0.5),
        out=pick.choice(NUMBERS),
        tile_rows=tile_rows,
        teams=teams,
        parts=parts,
        pdl=pick.random() < 0.25,
        arch=arch,
    )
    if case.fmt == "nvfp4" and case.form:
        case = replace(case, pairs=pick.random() < 0.5)
    may_split = arch == SPLIT_ARCH and tile_rows <= SPLIT_ROWS
    return replace(case, split=pick.choice(SPLITS) if may_split else 1)


def _of_product(kind: Case, pick: random.Random, sizes: Sizes) -> Case:
    k, columns = _size(pick, sizes.k, format_of(kind.fmt).block), _size(pick, sizes.columns, 8)
    matrix = k * columns * (2 if kind.form else 1)
    experts = min(_size(pick, sizes.experts), max(sizes.weights // matrix, 1))
    most = max(min(sizes.work // matrix, sizes.rows * experts), 1)
    counts = _counts(pick, experts, sizes.rows, kind.tile_rows or 0)
    while sum(counts) > most:
        counts = [count // 2 for count in counts]
    form = kind.form and pick.choice([f for f in FORMS if (f[2] is None) == (kind.form[2] is None)])
    return replace(
        kind,
        counts=tuple(counts),
        k=k,
        columns=columns,
        form=form,
        slots=kind.slots and pick.choice((1, 2, 4, 9)),
        room=pick.choice((0, 0, 1, 70)),
        amplitude=pick.choice((1.0, 1.0, 30.0)),
        w_like=pick.choice(("normal", *hostile.KINDS)),
    )


def _layer(pick: random.Random, arch: str) -> Layer:
    """Sizes, ranks and hostile logits come with the problem, but whether there is a rank."""
    return Layer(
        1,
        top_k=pick.choice((1, 2, 4, 8)),
        fmt=pick.choice(WEIGHTS),
        scoring=pick.choice(SCORINGS),
        shared=pick.choice((0, 0, 1, 2)),
        rank=(0, 1) if pick.random() < 0.5 else None,
        form=pick.choice(FORMS),
        bias=pick.random() < 0.5,
        tile_rows=pick.choice((None, None, ROWS_OF[arch][0], 16, 64)),
    )


def _of_layer(kind: Layer, pick: random.Random, sizes: Sizes) -> Layer:
    hidden, intermediate = (_size(pick, most, UNIT) for most in (sizes.k, sizes.columns))
    matrices = 3 * hidden * intermediate
    most = max(min(sizes.experts, sizes.weights // matrices), kind.top_k)
    experts = pick.randint(kind.top_k, most)
    rank = kind.rank
    if rank is not None:
        first = pick.randrange(experts + kind.shared)
        rank = first, pick.randint(first + 1, experts + kind.shared)
    tokens = _size(pick, max(min(sizes.rows, sizes.work // (matrices * kind.router.slots)), 1))
    others = experts - (min(rank[1], experts) - rank[0] if rank else experts)
    elsewhere = ("elsewhere",) if rank and rank[0] < experts and others >= kind.top_k else ()
    return replace(
        kind,
        tokens=pick.choice((1, 2, tokens, tokens)),
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        rank=rank,
        routing=pick.choice(("any", "any", "one", *elsewhere)),
        amplitude=pick.choice((1.0, 1.0, 10.0)),
    )


def _size(pick: random.Random, most: int, unit: int = 1) -> int:
    """A few units, about the most, or anything, in whole units."""
    units = max(most // unit, 1)
    return unit * pick.choice((min(pick.randint(1, 4), units), units, *_any(pick, units)))


def _any(pick: random.Random, most: int) -> tuple[int, int]:
    return pick.randint(1, most), pick.randint(1, most)


def _counts(pick: random.Random, experts: int, most: int, tile_rows: int) -> list[int]:
    """Rows of each: none, a few, those beside the edge of a tile, or anything."""
    sizes = [0, 0, 1, pick.randint(1, 9), tile_rows - 1, tile_rows, tile_rows + 1]
    sizes += [pick.randint(0, most), most if pick.random() < 0.2 else 0]
    return [min(max(pick.choice(sizes), 0), most) for _ in range(experts)]


class Trial(campaign.Trial):
    """Against fp64 on the same device."""

    case: Case | Layer

    def prepare(self) -> Results:
        is_layer = isinstance(self.case, Layer)
        self.function, self.judge = (
            (moe.fused_moe, mixed_gemm.judge_layer)
            if is_layer
            else (moe.mixed_gemm, mixed_gemm.judge)
        )
        self.given = self.case.inputs(self.place.device)
        self.keywords = self.given.tensors | self.case.options() | self.place.given
        return (self.keywords.pop("x"),)

    def step(self, *inputs: torch.Tensor) -> Results:
        return (self.function(*inputs, **self.keywords),)

    def reports(self) -> Sequence[tolerance.Report]:
        (result,) = self.first
        return self.judge(self.case, result, self.given, aligned_sums=self.is_native)

    def change(self) -> None:
        """x, and experts without rows, or other ones for each token."""
        given = self.given
        given.x.mul_(-0.5)
        if isinstance(given, mixed_gemm.LayerInputs):
            given.logits.copy_(given.logits.flip(0))
        elif len(given.offsets) > 2:
            given.offsets[1 : len(given.offsets) // 2] = 0


LARGE = 10.0  # amplitude
MANY = 32  # experts, of which a warp looks at so many at a time
Problem = Case | Layer


def _of(kind: type, has: Feature) -> Feature:
    return lambda case: isinstance(case, kind) and has(case)


PRODUCTS: dict[str, Feature] = {
    "a product": lambda case: True,
    **{f"tiles of {n} rows": lambda case, n=n: case.tile_rows == n for n in TILE_ROWS},
    **{f"warpgroups: {n}": lambda case, n=n: case.teams == n for n in TEAMS},
    **{f"times 64 rows of weights: {n}": lambda case, n=n: case.parts == n for n in PARTS},
    **{f"CTAs that share a tile: {n}": lambda case, n=n: case.split == n for n in SPLITS},
    **{f"output in {out}": lambda case, out=out: case.out == out for out in NUMBERS},
    "no activation": lambda case: case.form is None,
    "rows of x in order": lambda case: not case.slots,
    "rows that are gathered": lambda case: case.slots,
    "room behind the rows": lambda case: case.room,
    "no rows": lambda case: not case.rows,
    "experts without rows": lambda case: 0 in case.counts,
    "an odd number of units of K": lambda case: -(-case.k // 64) % 2,
    "a tail of K": lambda case: case.k % 64,
    "K within a unit": lambda case: case.k <= 64,
    "a global scale of up": lambda case: case.pairs,
    "hostile weights": lambda case: case.w_like != "normal",
    "pdl": lambda case: case.pdl,
}
LAYERS: dict[str, Feature] = {
    "a layer": lambda case: True,
    "shared experts": lambda case: case.shared,
    "experts of a rank": lambda case: case.rank,
    "one expert for all tokens": lambda case: case.routing == "one",
    "no expert that is here": lambda case: case.routing == "elsewhere",
    "tiles that are chosen": lambda case: case.tile_rows is None,
}
FEATURES: dict[str, Feature] = {
    **{fmt: lambda case, fmt=fmt: case.fmt == fmt for fmt in WEIGHTS},
    "a limit": lambda case: case.form and case.form[2] is not None,
    "biases": lambda case: case.bias,
    "huge activations": lambda case: case.amplitude >= LARGE,
    "more than 32 experts": lambda case: (
        (len(case.counts) if isinstance(case, Case) else case.total) > MANY
    ),
    **{name: _of(Case, has) for name, has in PRODUCTS.items()},
    **{name: _of(Layer, has) for name, has in LAYERS.items()},
}


FAMILY = Family(
    "moe",
    ARCHS,
    Draws,
    SIZES,
    Trial,
    FEATURES,
    {"O": "output"},
)
