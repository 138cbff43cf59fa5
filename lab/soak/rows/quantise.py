"""Rows that `moe.quantise` and `q8_0.quantise` make of tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import q8_0
from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil, without
from moe import quantise
from moe.formats import FORMATS
from moe.quantiser.launch import ARCHS
from moe.reference import encode_scale, unswizzle_scales
from q8_0.launch import ARCHS as Q8_ARCHS

DTYPES = (torch.bfloat16, torch.float16)
SCALINGS = ("default", "token", "given", "given rows")


@dataclass(frozen=True)
class Quantised:
    """Kind of a quantisation.

    scaling: source of the global scale; 'default' if unspecified.
    choices: rows per token, sorted by expert. If 0, the tokens keep their original order.
    """

    fmt: str
    dtype: torch.dtype
    scaling: str
    choices: int


@dataclass(frozen=True)
class BlockProblem(Problem):
    """A problem of quantisation.

    tokens, k: sizes of x.
    experts: number of experts by which rows are sorted."""

    subject: ClassVar[str] = "moe.quantise"
    kind: Quantised
    tokens: int
    k: int
    experts: int

    def given(self) -> Given:
        kind, generator = self.kind, self.generator
        x = torch.randn(self.tokens, self.k, generator=generator).to(kind.dtype)
        given: Given = {"x": x}
        count = self.tokens * max(kind.choices, 1)
        if kind.choices:
            rows = torch.randperm(count, generator=generator)
            edges = torch.randint(count + 1, (self.experts - 1,), generator=generator).sort()[0]
            given |= {"rows": rows.int(), "choices": kind.choices}
            given["offsets"] = torch.tensor([0, *edges.tolist(), count], dtype=torch.int32)
        if kind.scaling in ("token", "tensor"):
            given["global_scale"] = kind.scaling
        elif kind.scaling != "default":
            one = encode_scale(x.float().abs().amax().reshape(1), kind.fmt)
            given["global_scale"] = one if kind.scaling == "given" else one.repeat(count)
        return given

    def spoil(self, given: Given) -> None:
        spoil(given["x"][self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        made = quantise(**given, fmt=self.kind.fmt, **where)
        columns = made.format.columns(self.k)
        codes = unswizzle_scales(made.scales, made.rows, columns, given.get("offsets"))
        source = torch.arange(made.rows, device=codes.device)
        if "rows" in given:
            source = given["rows"] // self.kind.choices
        parts = [made.data.view(torch.uint8), codes.view(torch.uint8)]
        for scale in (made.encode_scale, made.decode_scale):
            if scale is not None:
                parts.append(scale[:, None].expand(made.rows, 1))
        return (source, *parts)

    def others(self, results: Results) -> Results:
        source, *parts = results
        return [part[source != self.row] for part in parts]


def _block_kind(pick: random.Random, _arch: str) -> Quantised:
    fmt = pick.choice([*FORMATS])
    scaling = pick.choice(SCALINGS) if FORMATS[fmt].has_global else "default"
    return Quantised(fmt, pick.choice(DTYPES), scaling, pick.choice((0, 0, 1, 2, 6)))


def _block_problem(kind: Quantised, pick: random.Random, small: bool) -> BlockProblem:
    tokens = pick.choice((2, 3, 9) if small else (2, 9, 130, 300))
    block = FORMATS[kind.fmt].block
    k = block * pick.choice((2, 4, 9) if small else (2, 9, 64, 180))
    return BlockProblem(
        kind, pick.getrandbits(32), pick.randrange(tokens), drawn_contents(pick), tokens, k,
        pick.randint(1, 5),
    )  # fmt: skip


@dataclass(frozen=True)
class Integers:
    """dtype: of the tokens."""

    dtype: torch.dtype


@dataclass(frozen=True)
class IntegerProblem(Problem):
    """tokens, k: sizes of x."""

    subject: ClassVar[str] = "q8_0.quantise"
    kind: Integers
    tokens: int
    k: int

    def given(self) -> Given:
        x = torch.randn(self.tokens, self.k, generator=self.generator)
        return {"x": x.to(self.kind.dtype)}

    def spoil(self, given: Given) -> None:
        spoil(given["x"][self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        made = q8_0.quantise(**given, **where)
        return made.quants, made.scales

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


def _integer_kind(pick: random.Random, _arch: str) -> Integers:
    return Integers(pick.choice((*DTYPES, torch.float32)))


def _integer_problem(kind: Integers, pick: random.Random, small: bool) -> IntegerProblem:
    tokens = pick.choice((2, 3, 9) if small else (2, 9, 130, 300))
    k = 32 * pick.choice((1, 3, 9) if small else (1, 9, 64, 180))
    seed, row = pick.getrandbits(32), pick.randrange(tokens)
    return IntegerProblem(kind, seed, row, drawn_contents(pick), tokens, k)


SUBJECTS = (
    Subject("moe.quantise", ARCHS, _block_kind, _block_problem),
    Subject("q8_0.quantise", Q8_ARCHS, _integer_kind, _integer_problem),
)
