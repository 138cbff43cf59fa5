"""Products of q8_0: a row is a token of x, or a row of the weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import q8_0
from lab.soak.rows import hostile
from lab.soak.rows.subject import Given, Problem, Results, Subject, without
from q8_0 import reference
from q8_0.blocks import BLOCK, LAYOUTS
from q8_0.launch import ARCHS
from q8_0.weights import Weights

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Product:
    """dtype: of x, None for integers. of_weights: a row of the weights is replaced, not of x."""

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
                hostile.spoil(weights.scales[self.row], self.contents)
            else:
                hostile.spoil(weights.data[self.row], self.contents)
        elif self.kind.dtype is None:
            hostile.spoil(given["x"].scales[self.row], self.contents)
        else:
            hostile.spoil(given["x"][self.row], self.contents)

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
    return ProductProblem(kind, pick.getrandbits(32), row, hostile.draw(pick), rows, cols)


SUBJECTS = (Subject("q8_0.matvec", ARCHS, _kind, _problem),)
