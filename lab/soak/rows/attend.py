"""Attention and decode: a row is a query, of all heads or of one, or a key or value of an entry."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch

import fmha
import gqa_lowlatency
from fmha.launch import ARCHS
from gqa_lowlatency.launch import ARCHS as DECODE_ARCHS
from lab.problems import attention, decode
from lab.problems.draws import Draws, Kernel
from lab.soak import attention as attention_draws
from lab.soak import decode as decode_draws
from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil

PARTS = ("query", "query of a head", "key", "value")
TRIES = 20  # of a row, before another problem is drawn
SMALL = attention_draws.Sizes(queries=40, keys=200, rows=1 << 10, scores=1 << 14)
SMALL_STEP = decode_draws.Sizes(keys=300, rows=1 << 10)


@dataclass(frozen=True)
class Kind:
    """Kind of an attention call.

    case: the part drawn for every problem.
    configs: compiled configs for usual and for small problems.
    arch: architecture of the kernel."""

    case: Any
    configs: tuple[Any, Any]
    arch: str


@dataclass(frozen=True)
class AttendProblem(Problem):
    """A problem of attention with the numbers of `case`.

    case: the case, with its inputs.
    part: one of PARTS.
    entry: entry of the batch.
    head: head of the queries or keys.
    row: the query or key within the entry.
    Results of other queries must not change if a query is replaced. If a key or value is
    replaced, results of other entries and other KV heads must not.
    """

    kind: Kind
    case: Any
    part: str
    entry: int
    head: int

    @property
    @abstractmethod
    def queries(self) -> Sequence[int]:
        """Queries of each entry."""

    @property
    def packed_queries(self) -> bool:
        """Whether entries of q follow each other without a dimension of their own."""
        return False

    @abstractmethod
    def key(self, tensor: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """View of the row of K or V."""

    @abstractmethod
    def keys_of(self, entry: int) -> Sequence[int]:
        """Keys of an entry that may be replaced."""

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call."""
        return self.case.arguments()

    def given(self) -> Given:
        q, k, v = self.case.inputs()
        tensors = {"q": q, "k": k} if v is k else {"q": q, "k": k, "v": v}
        return {"tensors": tensors, "options": self.options()}

    def spoil(self, given: Given) -> None:
        tensors = given["tensors"]
        if self.part.startswith("query"):
            rows = tensors["q"] if self.packed_queries else tensors["q"][self.entry]
            start = sum(self.queries[: self.entry]) if self.packed_queries else 0
            heads = rows[start + self.row] if rows.ndim == 3 else rows
            spoil(heads[self.head] if self.part != "query" else heads, self.contents)
        else:
            tensor = tensors.get(self.part[0], tensors["k"])
            spoil(self.key(tensor, given["options"])[self.head], self.contents)

    def changes(self) -> torch.Tensor:
        """bool [entries, queries of the longest, Hq]: which rows of O the replaced row reaches."""
        q_heads, kv_heads = self.case.heads
        found = torch.zeros(len(self.queries), max(self.queries), q_heads, dtype=torch.bool)
        if self.part.startswith("query"):
            heads = slice(None) if self.part == "query" else self.head
            found[self.entry, self.row, heads] = True
        else:
            group = q_heads // kv_heads
            found[self.entry, :, self.head * group : (self.head + 1) * group] = True
        if not self.packed_queries:
            return found
        parts = [rows[:count] for rows, count in zip(found, self.queries, strict=True)]
        return torch.cat(parts)[None]

    def others(self, results: Results) -> Results:
        o, *statistics = results
        kept = ~self.changes().to(o.device)
        rows = [o.reshape(*kept.shape, -1)]
        for each in statistics:
            if each.numel():
                heads_first = each.reshape(kept.shape[0], kept.shape[2], kept.shape[1])
                rows.append(heads_first.transpose(1, 2)[..., None])
        return [each[kept] for each in rows]


class AttentionProblem(AttendProblem):
    """Problem of `fmha.attention`."""

    subject: ClassVar[str] = "fmha.attention"
    case: attention.Case

    @property
    def queries(self) -> Sequence[int]:
        return self.case.queries

    @property
    def packed_queries(self) -> bool:
        return self.case.q_lens is not None

    def keys_of(self, entry: int) -> Sequence[int]:
        return range(self.case.keys[entry])

    def key(self, tensor: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        case = self.case
        if case.page_size:
            page = int(options["page_table"][self.entry, self.row // case.page_size])
            return tensor[page, self.row % case.page_size]
        if case.k_lens is not None:
            return tensor[[0, *accumulate(case.k_lens)][self.entry] + self.row]
        return tensor[self.entry, self.row]

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        tensors = {"v": given["tensors"]["k"]} | given["tensors"]
        return fmha.attention(**tensors, **given["options"], **where)


class DecodeProblem(AttendProblem):
    """Problem of `gqa_lowlatency.decode`."""

    subject: ClassVar[str] = "gqa_lowlatency.decode"
    case: decode.Case

    @property
    def queries(self) -> Sequence[int]:
        return (self.case.tokens,) * len(self.case.lens)

    def keys_of(self, entry: int) -> Sequence[int]:
        return self.case.seen(entry).nonzero().flatten().tolist()

    def key(self, tensor: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        size = self.case.keys
        if isinstance(size, int):
            return tensor[int(options["page_table"][self.entry, self.row // size]), self.row % size]
        return tensor[self.entry, self.row]

    def options(self) -> dict[str, Any]:
        return self.case.options() | self.case.launch_options(None)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        options = given["options"] | where
        return gqa_lowlatency.decode(**given["tensors"], return_lse=True, **options)


def _kind(draws: type[Draws], sizes: tuple[Any, Any]) -> Callable[[random.Random, str], Kind]:
    def kind(pick: random.Random, arch: str) -> Kind:
        usual, small = (draws(0, arch, each) for each in sizes)
        case = usual.kind(pick)
        return Kind(case, (usual.config(case, pick), small.config(case, pick)), arch)

    return kind


def _problem(
    of: type[AttendProblem], draws: type[Draws], sizes: tuple[Any, Any]
) -> Callable[[Kind, random.Random, bool], AttendProblem]:
    def problem(kind: Kind, pick: random.Random, small: bool) -> AttendProblem:
        drawn = draws(0, kind.arch, sizes[small])
        while True:
            case = drawn.drawn(Kernel(0, kind.case, kind.configs[small]), pick)
            # With an amplitude of 0 other contents of a query may be the same.
            case = replace(case, amplitude=case.amplitude or 1.0)
            for _ in range(TRIES):
                found = _row(of, kind, case, pick)
                if found is not None:
                    return found

    return problem


def _row(
    of: type[AttendProblem], kind: Kind, case: Any, pick: random.Random
) -> AttendProblem | None:
    """A row that there is, beside which there are others."""
    part, contents, seed = pick.choice(PARTS), drawn_contents(pick), pick.getrandbits(32)
    heads = case.heads[0 if part.startswith("query") else 1]
    whole = of(kind, seed, 0, contents, case, part, 0, pick.randrange(heads))
    entry = pick.randrange(len(whole.queries))
    rows = whole.keys_of(entry)
    if part.startswith("query"):
        rows = range(whole.queries[entry])
    if not rows:
        return None
    found = replace(whole, entry=entry, row=pick.choice(rows))
    return None if found.changes().all() else found


def _subject(
    of: type[AttendProblem], archs: tuple[str, ...], draws: type[Draws], sizes: tuple[Any, Any]
) -> Subject:
    """sizes: of usual problems, and of small ones."""
    return Subject(of.subject, archs, _kind(draws, sizes), _problem(of, draws, sizes))


SUBJECTS = (
    _subject(
        AttentionProblem, ARCHS, attention_draws.Draws, (attention_draws.SIZES["usual"], SMALL)
    ),
    _subject(
        DecodeProblem, DECODE_ARCHS, decode_draws.Draws, (decode_draws.SIZES["usual"], SMALL_STEP)
    ),
)
