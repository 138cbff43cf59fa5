"""Rows that `kernelkit.merge.api` makes of parts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernelkit.merge.api import merge
from kernelkit.merge.launch import ARCHS
from lab.soak.rows import hostile
from lab.soak.rows.subject import Given, Problem, Results, Subject

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = 3


@dataclass(frozen=True)
class Merge:
    """dtype: of O. raw: whether parts have a row_max. sinks: whether a sink joins."""

    dtype: torch.dtype
    columns: int
    raw: bool
    sinks: bool


@dataclass(frozen=True)
class MergeProblem(Problem):
    """parts, positions: sizes of a stack. spoiled: which of its tensors has the hostile row, in one
    part."""

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
            hostile.spoil(given["o"][part, 0, position, head], self.contents)
        else:
            hostile.spoil(given[self.spoiled][part, 0, head, position], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        names = ("o", "lse", "row_max") if self.kind.raw else ("o", "lse")
        return merge(tuple(given[name] for name in names), sinks=given.get("sinks"), **where)

    def others(self, results: Results) -> Results:
        o, lse = results
        position, head = self.place
        other = torch.ones(o.shape[:3], dtype=torch.bool, device=o.device)
        other[0, position, head] = False
        return o[other], lse.transpose(1, 2)[other]


def _kind(pick: random.Random, _arch: str) -> Merge:
    columns = pick.choice((8, 64, 128, 512))
    return Merge(pick.choice(DTYPES), columns, pick.random() < 0.5, pick.random() < 0.5)


def _problem(kind: Merge, pick: random.Random, small: bool) -> MergeProblem:
    positions = pick.choice((1, 2, 7) if small else (2, 30, 300))
    spoiled = pick.choice(("o", "o", "lse", *["row_max"] * kind.raw))
    return MergeProblem(
        kind, pick.getrandbits(32), pick.randrange(positions * HEADS), hostile.draw(pick),
        pick.choice((1, 2, 5, 9)), positions, spoiled,
    )  # fmt: skip


SUBJECTS = (Subject("merge", ARCHS, _kind, _problem),)
