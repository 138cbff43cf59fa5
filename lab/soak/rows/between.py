"""Rows between the projections of a layer: a row is a token, with all that it has in a call."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows
from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil, without
from mla.attention.formats import FORMS
from mla.glue.api import IndexKeys, LatentKeys, LowRank, Queries, norm_rope_append
from mla.glue.config import STORED
from mla.indexer.formats import FORMATS, GLM5, PLAIN, V32, WIDTH, Rotation

ARCHS = ("sm_100a", "sm_90a")
PAGE, CONTEXT, EPS = 8, 200, 1e-6
PARTS = ("keys", "index_keys", "queries", "low_rank")
ROTATIONS = (PLAIN, V32, GLM5)


@dataclass(frozen=True)
class Between:
    """Kind of a call: records, or '' for a part that is not there; heads and rank, or 0."""

    keys: str
    index: str
    heads: int
    normed: bool
    rank: int
    pairs: str
    rotation: Rotation
    fp32: bool


@dataclass(frozen=True)
class BetweenProblem(Problem):
    """A problem of rows between projections.

    tokens: number of tokens.
    part: what of the row has other contents."""

    subject: ClassVar[str] = "mla.norm_rope_append"
    kind: Between
    tokens: int
    part: str

    def _cache(self, record: Record) -> Rows:
        pages = -(-self.tokens // PAGE) + 1
        size = -(-record.page_bytes(PAGE) // 16) * 16
        pool = torch.zeros(pages, size, dtype=torch.uint8)
        return Rows(pool, 0, PAGE * record.data_bytes, PAGE, record)

    def given(self) -> Given:
        kind, tokens, generator = self.kind, self.tokens, self.generator
        dtype = torch.float32 if kind.fp32 else torch.bfloat16

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        angles = torch.rand(CONTEXT, 32, generator=generator) * 6.0
        given: Given = {
            "positions": torch.randint(CONTEXT, (tokens,), generator=generator),
            "rope": (angles.cos(), angles.sin()), "pairs": kind.pairs,
        }  # fmt: skip
        slots = torch.randperm(tokens, generator=generator)
        if kind.keys:
            rows, x = self._cache(STORED[kind.keys]), normal(tokens, FORMS[kind.keys].columns)
            given["keys"] = LatentKeys(x.bfloat16(), rows, slots, normal(512).to(dtype), EPS)
        if kind.index:
            rows, x = self._cache(FORMATS[kind.index].record), normal(tokens, WIDTH).bfloat16()
            norm = normal(2, WIDTH).to(dtype)
            given["index_keys"] = IndexKeys(x, rows, slots.int(), *norm, EPS, kind.rotation)
        if kind.heads:
            q = normal(tokens, kind.heads, 512 if kind.normed else 192).bfloat16()
            given["queries"] = Queries(q, torch.zeros_like(q), EPS if kind.normed else None)
        if kind.rank:
            x, weight = normal(tokens, kind.rank).bfloat16(), normal(kind.rank).to(dtype)
            given["low_rank"] = LowRank(x, weight, torch.zeros_like(x), EPS)
        return given

    def spoil(self, given: Given) -> None:
        part = given[self.part]
        rows = part.q if self.part == "queries" else part.x
        spoil(rows[self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        given, results = dict(given), []
        for name in ("keys", "index_keys"):
            if name in given:
                rows = given[name].rows
                rows = replace(rows, pool=rows.pool.clone())
                given[name] = replace(given[name], rows=rows)
        for name in ("queries", "low_rank"):
            if name in given:
                given[name] = replace(given[name], out=given[name].out.clone())
        norm_rope_append(**given, **where)
        for name in ("keys", "index_keys"):
            if name in given:
                slots, rows = given[name].slots.long(), given[name].rows
                place = slots // PAGE, slots % PAGE
                results += [rows.data()[place], rows.scales()[place]]
        return results + [given[name].out for name in ("queries", "low_rank") if name in given]

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


def _kind(pick: random.Random, _arch: str) -> Between:
    stored = [name for name in STORED if name != "e4m3_576"]  # which is no record of kvcache
    keys, index = pick.choice(["", *stored]), pick.choice(["", *FORMATS])
    heads, rank = pick.choice((0, 1, 5)), pick.choice((0, 64, 1536))
    if not (keys or index or heads or rank):
        keys = "fp8_656"
    normed, fp32 = pick.random() < 0.5, pick.random() < 0.5
    pairs = pick.choice(("neighbours", "halves"))
    return Between(keys, index, heads, normed, rank, pairs, pick.choice(ROTATIONS), fp32)


def _problem(kind: Between, pick: random.Random, small: bool) -> BetweenProblem:
    there = (kind.keys, kind.index, kind.heads, kind.rank)
    part = pick.choice([name for name, given in zip(PARTS, there, strict=True) if given])
    tokens = pick.choice((2, 5) if small else (2, 33, 130))
    drawn = kind, pick.getrandbits(32), pick.randrange(tokens), drawn_contents(pick)
    return BetweenProblem(*drawn, tokens, part)


SUBJECTS = (Subject(BetweenProblem.subject, ARCHS, _kind, _problem),)
