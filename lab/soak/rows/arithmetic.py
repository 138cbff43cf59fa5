"""The merge of attention results, where a row is a position, and products of q8_0, where a row is a
token of x or a row of the weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import q8_0
from kernelkit.merge.api import merge
from kernelkit.merge.launch import ARCHS as ARCHS_OF_MERGE
from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil, without
from q8_0 import reference
from q8_0.blocks import BLOCK, LAYOUTS
from q8_0.launch import ARCHS
from q8_0.weights import Weights

MERGED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = 3


@dataclass(frozen=True)
class Merge:
    """Kind of a merge.

    dtype: dtype of O.
    raw: whether parts have a row_max.
    sinks: whether a sink joins."""

    dtype: torch.dtype
    columns: int
    raw: bool
    sinks: bool


@dataclass(frozen=True)
class MergeProblem(Problem):
    """A problem of merge.

    parts, positions: sizes of a stack.
    spoiled: which of its tensors has the hostile row, in one part."""

    subject: ClassVar[str] = "merge"
    kind: Merge
    parts: int
    positions: int
    spoiled: str

    def given(self) -> Given:
        kind, generator = self.kind, self.generator
        shape = (self.parts, 1, HEADS, self.positions)
        lse = torch.randn(shape, generator=generator)
        o = torch.randn(self.parts, 1, self.positions, HEADS, kind.columns, generator=generator)
        given = {"o": o.to(kind.dtype), "lse": lse}
        if kind.raw:
            given["row_max"] = lse - torch.rand(shape, generator=generator)
        if kind.sinks:
            given["sinks"] = torch.randn(HEADS, generator=generator)
        return given

    @property
    def place(self) -> tuple[int, int]:
        """Position and head of the row."""
        return divmod(self.row, HEADS)

    def spoil(self, given: Given) -> None:
        (position, head), part = self.place, self.seed % self.parts
        if self.spoiled == "o":
            spoil(given["o"][part, 0, position, head], self.contents)
        else:
            spoil(given[self.spoiled][part, 0, head, position], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        names = ("o", "lse", "row_max") if self.kind.raw else ("o", "lse")
        return merge(tuple(given[name] for name in names), sinks=given.get("sinks"), **where)

    def others(self, results: Results) -> Results:
        o, lse = results
        position, head = self.place
        other = torch.ones(o.shape[:3], dtype=torch.bool, device=o.device)
        other[0, position, head] = False
        return o[other], lse.transpose(1, 2)[other]


def _kind_of_merge(pick: random.Random, _arch: str) -> Merge:
    columns = pick.choice((8, 64, 128, 512))
    return Merge(pick.choice(MERGED_DTYPES), columns, pick.random() < 0.5, pick.random() < 0.5)


def _merge(kind: Merge, pick: random.Random, small: bool) -> MergeProblem:
    positions = pick.choice((1, 2, 7) if small else (2, 30, 300))
    spoiled = pick.choice(("o", "o", "lse", *["row_max"] * kind.raw))
    return MergeProblem(
        kind, pick.getrandbits(32), pick.randrange(positions * HEADS), drawn_contents(pick),
        pick.choice((1, 2, 5, 9)), positions, spoiled,
    )  # fmt: skip


MERGES = (Subject("merge", ARCHS_OF_MERGE, _kind_of_merge, _merge),)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Product:
    """Kind of a product.

    dtype: dtype of x, None for integers.
    of_weights: whether a row of the weights is replaced, not of x."""

    tokens: int
    dtype: torch.dtype | None
    layout: str
    of_weights: bool


@dataclass(frozen=True)
class ProductProblem(Problem):
    """rows, cols: of the weights."""

    subject: ClassVar[str] = "q8_0.matvec"
    kind: Product
    rows: int
    cols: int

    def given(self) -> Given:
        kind, generator = self.kind, self.generator
        shape = self.rows, self.cols
        quants = torch.randint(-127, 128, shape, generator=generator).to(torch.int8)
        scales = torch.rand(self.rows, self.cols // BLOCK, generator=generator).half()
        weights = reference.packed(quants, scales, kind.layout)
        x = torch.randn(kind.tokens, self.cols, generator=generator)
        if kind.dtype is None:
            return {"weights": weights, "x": reference.quantise(x)}
        return {"weights": weights, "x": x.to(kind.dtype)}

    def spoil(self, given: Given) -> None:
        if self.kind.of_weights:
            weights: Weights = given["weights"]
            if weights.layout == "soa":
                spoil(weights.scales[self.row], self.contents)
            else:
                spoil(weights.data[self.row], self.contents)
        elif self.kind.dtype is None:
            spoil(given["x"].scales[self.row], self.contents)
        else:
            spoil(given["x"][self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        y = q8_0.matvec(**given, **where)
        return (y.T if self.kind.of_weights else y,)

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


def _kind(pick: random.Random, _arch: str) -> Product:
    return Product(
        pick.choice((1, 2, 4, 9, 16)), pick.choice((*DTYPES, None)), pick.choice(LAYOUTS),
        pick.random() < 0.4,
    )  # fmt: skip


def _problem(kind: Product, pick: random.Random, small: bool) -> ProductProblem:
    rows = pick.choice((3, 17, 40) if small else (3, 130, 1000))
    cols = BLOCK * pick.choice((1, 3, 8) if small else (3, 64, 90))
    row = pick.randrange(rows if kind.of_weights else kind.tokens)
    return ProductProblem(kind, pick.getrandbits(32), row, drawn_contents(pick), rows, cols)


SUBJECTS = (Subject("q8_0.matvec", ARCHS, _kind, _problem),)
