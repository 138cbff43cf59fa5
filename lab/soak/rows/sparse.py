"""Sparse attention over a cache, and its indexer: a row is a token of a step, or a request's entry.

Only a few tokens of each request are new; older entries of the rings come from the definition.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch

from kvcache.layouts.records import BF16_512, FP8_584, Record
from kvcache.layouts.rows import Rows
from kvcache.movement import reference
from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil, without
from mla import Selected, cached_attention, prepare_query, scores, select
from mla.indexer.formats import WIDTH, index_format
from mla.indexer.quantised import quantised
from mla.indexer.scores_launch import ARCHS as INDEX_ARCHS
from mla.window import see_window
from mla.workspace import COLUMNS

ARCHS = ("sm_100a", "sm_90a")
RECORDS = {"bf16": BF16_512, "fp8": FP8_584}
PARTS = ("query", "query of a head", "new entry", "older entry")
INDEX_PARTS = ("query", "weights", "key")
INDEX_RECORDS = ("indexer_fp4", "indexer_fp8", "indexer_bf16")
BLOCK_KEYS = 16  # of a block of the indexer
CONTEXT = 200  # positions


@dataclass(frozen=True)
class Layer:
    """Kind of a layer.

    record: name of the entries' format.
    past: whether there are compressed entries.
    chunk: whether a request may have several new tokens."""

    record: str
    heads: int
    window: int
    past: bool
    sinks: bool
    chunk: bool


@dataclass(frozen=True)
class LayerProblem(Problem):
    """A problem of cached attention; an entry affects all tokens of its request.

    tokens, starts: number of new tokens of each request, and the position of the first.
    chosen: compressed entries of each token.
    row: a token."""

    subject: ClassVar[str] = "mla.cached_attention"
    kind: Layer
    tokens: tuple[int, ...]
    starts: tuple[int, ...]
    chosen: int
    part: str
    head: int

    @property
    def request(self) -> int:
        """Request of the row."""
        ends = accumulate(self.tokens)
        return next(number for number, end in enumerate(ends) if self.row < end)

    def _rows(self, slots: int, entries: int) -> Rows:
        record = RECORDS[self.kind.record]
        pool = torch.zeros(slots, record.page_bytes(entries), dtype=torch.uint8)
        return Rows(pool, 0, entries * record.data_bytes, entries, record)

    def given(self) -> Given:
        kind, generator, requests = self.kind, self.generator, len(self.tokens)
        count, window = sum(self.tokens), kind.window
        angles = torch.rand(CONTEXT, 32, generator=generator) * 6.0
        rope = angles.cos(), angles.sin()
        ring = self._rows(requests + 1, window)
        for request, start in enumerate(self.starts):
            old = torch.arange(max(start - window, 0), start)
            kv = torch.randn(len(old), COLUMNS, generator=generator).bfloat16()
            reference.append_swa(ring, kv, old, request * window + old % window, *rope)
        positions = torch.cat(
            [
                torch.arange(start, start + new)
                for start, new in zip(self.starts, self.tokens, strict=True)
            ]
        )
        owners = torch.arange(requests).repeat_interleave(torch.tensor(self.tokens))
        given: Given = {
            "q": torch.randn(count, kind.heads, COLUMNS, generator=generator).bfloat16(),
            "kv": torch.randn(count, COLUMNS, generator=generator).bfloat16(),
            "ring": ring, "window": self._window(positions, owners), "rope": rope,
        }  # fmt: skip
        if kind.sinks:
            given["sinks"] = torch.randn(kind.heads, generator=generator)
        if kind.past:
            given["past"] = self._past(count, rope, generator)
        return given

    def _window(self, positions: torch.Tensor, owners: torch.Tensor) -> Any:
        window, requests = self.kind.window, len(self.tokens)
        starts = torch.tensor(self.starts, dtype=torch.int32)
        arrays = {
            "positions": positions, "starts": starts,
            "lengths": starts + torch.tensor(self.tokens, dtype=torch.int32),
            "cu_tokens": torch.tensor([0, *accumulate(self.tokens)], dtype=torch.int32),
            "state_slots": torch.arange(requests, dtype=torch.int32),
        }  # fmt: skip
        slots = owners * window + positions % window
        sizes = {"window": window, "rows": window, "context": CONTEXT}
        return see_window(arrays, slots, longest=max(self.tokens), **sizes)

    def _past(
        self, count: int, rope: tuple[torch.Tensor, ...], generator: torch.Generator
    ) -> Selected:
        rows, each = self._rows(count + 1, self.chosen), self.chosen
        entries = torch.randperm(count * each, generator=generator)
        kv = torch.randn(count * each, COLUMNS, generator=generator).bfloat16()
        reference.append_swa(rows, kv, entries % CONTEXT, entries, *rope)
        chosen = torch.randint(each + 1, (count,), generator=generator).int()
        return Selected(rows, entries.view(count, each), chosen)

    def spoil(self, given: Given) -> None:
        if self.part == "new entry":
            spoil(given["kv"][self.row], self.contents)
        elif self.part == "older entry":
            ring, start = given["ring"], self.starts[self.request]
            place = self.request, (start - 1) % self.kind.window
            spoil(ring.data()[place], self.contents)
        else:
            heads = given["q"][self.row]
            spoil(heads if self.part == "query" else heads[self.head], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        ring = given["ring"]
        copy = Rows(ring.pool.clone(), ring.data_offset, ring.scale_offset, ring.rows, ring.record)
        return (cached_attention(**given | {"ring": copy}, **where),)

    def changes(self) -> torch.Tensor:
        """bool [tokens, heads]."""
        found = torch.zeros(sum(self.tokens), self.kind.heads, dtype=torch.bool)
        if self.part == "query":
            found[self.row] = True
        elif self.part == "query of a head":
            found[self.row, self.head] = True
        else:
            first = sum(self.tokens[: self.request])
            found[first : first + self.tokens[self.request]] = True
        return found

    def others(self, results: Results) -> Results:
        return [each[~self.changes().to(each.device)] for each in results]


@dataclass(frozen=True)
class Index:
    """Kind of an index.

    record: format of the keys.
    heads: heads of the queries."""

    record: str
    heads: int
    bf16: bool


@dataclass(frozen=True)
class IndexProblem(Problem):
    """A problem of selection.

    counts: number of keys visible to each token; each token is a separate request.
    row: a token."""

    subject: ClassVar[str] = "mla.select"
    kind: Index
    counts: tuple[int, ...]
    k: int
    part: str

    def given(self) -> Given:
        generator, tokens = self.generator, len(self.counts)
        record = index_format(self.kind.record).record
        blocks = -(-max(self.counts) // BLOCK_KEYS)
        pool = torch.zeros(tokens * blocks, _page(record), dtype=torch.uint8)
        rows = Rows(pool, 0, BLOCK_KEYS * record.data_bytes, BLOCK_KEYS, record)
        keys = torch.randn(tokens * blocks * BLOCK_KEYS, WIDTH, generator=generator).bfloat16()
        data, scales = quantised(keys, record)
        rows.data().copy_(data.view(*rows.data().shape))
        if record.scale_bytes:
            rows.scales().copy_(scales.view(*rows.scales().shape))
        angles = torch.rand(CONTEXT, 32, generator=generator) * 6.0
        table = torch.randperm(tokens * blocks, generator=generator).view(tokens, blocks).int()
        return {
            "rows": rows,
            "q": torch.randn(tokens, self.kind.heads, WIDTH, generator=generator).bfloat16(),
            "weights": torch.randn(tokens, self.kind.heads, generator=generator),
            "positions": torch.randint(CONTEXT, (tokens,), generator=generator),
            "cos": angles.cos(), "sin": angles.sin(),
            "owners": torch.arange(tokens).int(), "table": table,
            "counts": torch.tensor(self.counts, dtype=torch.int32),
        }  # fmt: skip

    def spoil(self, given: Given) -> None:
        if self.part == "key":
            spoil(given["rows"].data()[int(given["table"][self.row, 0]), 0], self.contents)
        else:
            name = "q" if self.part == "query" else "weights"
            spoil(given[name][self.row], self.contents)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        names = ("q", "weights", "positions", "cos", "sin")
        query = prepare_query(
            *(given[name] for name in names), record=self.kind.record, **where
        )  # fmt: skip
        dtype = torch.bfloat16 if self.kind.bf16 else torch.float32
        width = -(-max(self.counts) // 8) * 8
        out = torch.zeros(len(self.counts), width, dtype=dtype, device=given["q"].device)
        scores(given["rows"], query, given["owners"], given["counts"], given["table"], out, **where)
        entries, chosen = select(out, given["counts"], self.k, **where)
        return out, entries, chosen

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


def _page(record: Record) -> int:
    return -(-record.page_bytes(BLOCK_KEYS) // 16) * 16


def _layer(pick: random.Random, _arch: str) -> Layer:
    past, sinks, chunk = (pick.random() < share for share in (0.5, 0.5, 0.3))
    heads, window = pick.choice((2, 4, 64)), pick.choice((16, 128))
    return Layer(pick.choice([*RECORDS]), heads, window, past, sinks, chunk)


def _layer_problem(kind: Layer, pick: random.Random, small: bool) -> LayerProblem:
    requests = pick.choice((2, 3) if small else (2, 3, 9))
    tokens = tuple(pick.randint(1, 5) if kind.chunk else 1 for _ in range(requests))
    if kind.chunk:
        tokens = (2, *tokens[1:])
    starts = tuple(pick.randint(1, CONTEXT - 9) for _ in tokens)
    part, head = pick.choice(PARTS), pick.randrange(kind.heads)
    row, chosen = pick.randrange(sum(tokens)), pick.choice((1, 6, 64))
    drawn = kind, pick.getrandbits(32), row, drawn_contents(pick)
    return LayerProblem(*drawn, tokens, starts, chosen, part, head)


def _index(pick: random.Random, _arch: str) -> Index:
    return Index(pick.choice(INDEX_RECORDS), pick.choice((16, 64)), pick.random() < 0.5)


def _index_problem(kind: Index, pick: random.Random, small: bool) -> IndexProblem:
    tokens = pick.choice((2, 3) if small else (2, 9, 40))
    counts = tuple(pick.randint(1, 90 if small else 900) for _ in range(tokens))
    drawn = kind, pick.getrandbits(32), pick.randrange(tokens), drawn_contents(pick)
    return IndexProblem(*drawn, counts, pick.choice((1, 8, 64)), pick.choice(INDEX_PARTS))


SUBJECTS = (
    Subject(LayerProblem.subject, ARCHS, _layer, _layer_problem),
    Subject(IndexProblem.subject, INDEX_ARCHS, _index, _index_problem),
)
