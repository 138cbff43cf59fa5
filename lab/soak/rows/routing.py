"""Experts that `moe.route` chooses for tokens, rows that they get, and the sum of these."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil, without
from moe import Router, RouterLinear, combine, permutation, route, route_tokens
from moe.reference_routing import SCORING
from moe.routing.launch import ARCHS

LOGITS = (torch.float32, torch.bfloat16, torch.float16)
SIXTEEN = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Routed:
    """Kind of a router.

    groups: (n_group, topk_group).
    biases: whether the logits and the choice have biases."""

    experts: int
    top_k: int
    dtype: torch.dtype
    scoring: str
    groups: tuple[int, int]
    renormalize: bool
    shared: int
    biases: tuple[bool, bool]

    def router(self, generator: torch.Generator) -> Router:
        logit_bias, bias = (
            torch.randn(self.experts, generator=generator) if wanted else None
            for wanted in self.biases
        )
        return Router(
            self.top_k, self.scoring, bias, *self.groups, self.renormalize, 1.5, logit_bias,
            self.shared, 0.5,
        )  # fmt: skip


def _routed_kind(pick: random.Random, _arch: str) -> Routed:
    experts, groups = pick.choice(
        ((5, (1, 1)), (32, (1, 1)), (64, (8, 3)), (128, (1, 1)), (256, (8, 4)), (384, (1, 1)))
    )
    return Routed(
        experts,
        pick.choice((1, 2, 4)),
        pick.choice(LOGITS),
        pick.choice(SCORING),
        groups,
        pick.random() < 0.5,
        pick.choice((0, 0, 1)),
        (pick.random() < 0.5, pick.random() < 0.5),
    )


@dataclass(frozen=True)
class RouteProblem(Problem):
    """tokens: of the logits."""

    subject: ClassVar[str] = "moe.route"
    kind: Routed
    tokens: int

    def given(self) -> Given:
        kind, generator = self.kind, self.generator
        logits = torch.randn(self.tokens, kind.experts, generator=generator)
        return {"logits": logits.to(kind.dtype), "router": kind.router(generator)}

    def spoil(self, given: Given) -> None:
        spoil(given["logits"][self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        return route(given["logits"], **vars(given["router"]), **where)

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


def _route_problem(kind: Routed, pick: random.Random, small: bool) -> RouteProblem:
    tokens = pick.choice((2, 5, 9) if small else (2, 9, 70, 500))
    return RouteProblem(*_drawn(kind, pick, tokens), tokens)


@dataclass(frozen=True)
class TokenProblem(RouteProblem):
    """hidden: size of a token."""

    subject: ClassVar[str] = "moe.route_tokens"
    hidden: int

    def given(self) -> Given:
        kind, generator = self.kind, self.generator
        x = torch.randn(self.tokens, self.hidden, generator=generator).to(kind.dtype)
        weight = torch.randn(kind.experts, self.hidden, generator=generator).to(kind.dtype)
        bias = torch.randn(kind.experts, generator=generator).to(kind.dtype)
        linear = RouterLinear(weight * self.hidden**-0.5, bias)
        return {"x": x, "linear": linear, "router": kind.router(generator)}

    def spoil(self, given: Given) -> None:
        spoil(given["x"][self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        return route_tokens(**given, **where)


def _token_kind(pick: random.Random, arch: str) -> Routed:
    kind = _routed_kind(pick, arch)
    values = vars(kind) | {"dtype": pick.choice(SIXTEEN)}
    return Routed(**values)


def _token_problem(kind: Routed, pick: random.Random, small: bool) -> TokenProblem:
    tokens, hidden = pick.choice((2, 5, 9)), 8 * pick.choice((4, 8, 9) if small else (8, 360, 896))
    return TokenProblem(*_drawn(kind, pick, tokens), tokens, hidden)


@dataclass(frozen=True)
class Sorted:
    """partial: of a range of experts."""

    experts: int
    partial: bool


@dataclass(frozen=True)
class SortProblem(Problem):
    """Rows of other tokens keep their order, whatever experts a token has."""

    subject: ClassVar[str] = "moe.permutation"
    kind: Sorted
    tokens: int
    choices: int

    def given(self) -> Given:
        shape = self.tokens, self.choices
        return {"ids": torch.randint(self.kind.experts, shape, generator=self.generator).int()}

    def spoil(self, given: Given) -> None:
        pick = random.Random(self.seed)
        other = [pick.randrange(-1, self.kind.experts) for _ in range(self.choices)]
        given["ids"][self.row] = torch.tensor(other, dtype=torch.int32)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        kind = self.kind
        here = (kind.experts // 3, kind.experts // 3 + kind.experts // 2) if kind.partial else None
        made = permutation(given["ids"], kind.experts, expert_range=here, **where)
        return made.offsets, made.slot_of_row, made.row_of_slot

    def others(self, results: Results) -> Results:
        offsets, slot_of_row, row_of_slot = (each.cpu() for each in results)
        slots = slot_of_row[: int(offsets[-1])].long()
        expert = torch.searchsorted(offsets, torch.arange(len(slots)), right=True)
        places = torch.arange(len(slots)).int()
        is_inverse = (row_of_slot[slots] == places).all()[None]
        other = slots // self.choices != self.row
        count = int(other.sum())
        kept = torch.full((2, self.tokens * self.choices), -1)
        kept[0, :count], kept[1, :count] = slots[other], expert[other]
        return kept, is_inverse


def _sort_kind(pick: random.Random, _arch: str) -> Sorted:
    return Sorted(pick.choice((3, 8, 32, 128, 256, 512)), pick.random() < 0.5)


def _sort_problem(kind: Sorted, pick: random.Random, small: bool) -> SortProblem:
    tokens, choices = pick.choice((2, 9, 70) if small else (2, 70, 500, 2000)), pick.randint(1, 8)
    return SortProblem(*_drawn(kind, pick, tokens), tokens, choices)


@dataclass(frozen=True)
class Combined:
    """partial: slots may have no row."""

    dtype: torch.dtype
    top_k: int
    weighted: bool
    partial: bool


@dataclass(frozen=True)
class CombineProblem(Problem):
    """row: a token, of which its rows of Y and, every other time, its weights are replaced."""

    subject: ClassVar[str] = "moe.combine"
    kind: Combined
    tokens: int
    hidden: int

    def given(self) -> Given:
        kind, generator, slots = self.kind, self.generator, self.tokens * self.kind.top_k
        rows = torch.randperm(slots, generator=generator).int().view(self.tokens, kind.top_k)
        if kind.partial:
            rows[torch.rand(rows.shape, generator=generator) < 0.3] = -1
        y = torch.randn(slots, self.hidden, generator=generator).to(kind.dtype)
        weights = torch.rand(rows.shape, generator=generator) if kind.weighted else None
        return {"y": y, "weights": weights, "row_of_slot": rows}

    def spoil(self, given: Given) -> None:
        for row in given["row_of_slot"][self.row].tolist():
            if row >= 0:
                spoil(given["y"][row], self.contents)
        if given["weights"] is not None and self.seed % 2:
            spoil(given["weights"][self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        return (combine(**given, partial=self.kind.partial, **where),)

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


def _combine_kind(pick: random.Random, _arch: str) -> Combined:
    return Combined(
        pick.choice(LOGITS), pick.choice((1, 2, 4, 8)), pick.random() < 0.7, pick.random() < 0.4
    )


def _combine_problem(kind: Combined, pick: random.Random, small: bool) -> CombineProblem:
    tokens = pick.choice((2, 5, 9) if small else (2, 70, 2100))
    return CombineProblem(*_drawn(kind, pick, tokens), tokens, 8 * pick.choice((1, 8, 130)))


def _drawn(kind: Any, pick: random.Random, rows: int) -> tuple[Any, int, int, str]:
    """The first fields of a problem."""
    return kind, pick.getrandbits(32), pick.randrange(rows), drawn_contents(pick)


SUBJECTS = (
    Subject("moe.route", ARCHS, _routed_kind, _route_problem),
    Subject("moe.route_tokens", ARCHS, _token_kind, _token_problem),
    Subject("moe.permutation", ARCHS, _sort_kind, _sort_problem),
    Subject("moe.combine", ARCHS, _combine_kind, _combine_problem),
)
