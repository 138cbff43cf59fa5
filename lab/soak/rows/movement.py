"""Entries of a cache that are written, read, copied and summed up by `kvcache`."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import kvcache
from kvcache.layouts.latent import LATENTS
from kvcache.layouts.records import Record
from kvcache.layouts.rows import Rows
from kvcache.movement.launch import ARCHS, PORTABLE_ARCHS
from lab.soak.rows.subject import Given, Problem, Results, Subject, drawn_contents, spoil, without

NOBODY = -1
POSITIONS = 40  # of the angles of a rotation
WITHOUT_E4M3 = ("sm_80", "sm_86", "sm_87")
SIXTEEN = (torch.bfloat16, torch.float16)
PLAIN = (16, 96, 256)  # bytes of entries without a format


def _mark(slots: torch.Tensor, row: int) -> None:
    """No entry for this one."""
    slots[row] = NOBODY


@dataclass(frozen=True)
class Pages:
    """pages, x: dtypes of the cache and of what is written."""

    pages: torch.dtype
    x: torch.dtype


@dataclass(frozen=True)
class PagesProblem(Problem):
    """row: a token, of which k and v are replaced, and every third time its slot is -1."""

    subject: ClassVar[str] = "kvcache.append_pages"
    kind: Pages
    tokens: int
    heads: int
    page_size: int

    def given(self) -> Given:
        kind, generator, head_dim = self.kind, self.generator, 32
        pages = -(-self.tokens // self.page_size) + 1
        shape = pages, self.page_size, self.heads, head_dim
        k_pages, v_pages = (torch.randn(shape, generator=generator) for _ in range(2))
        x = (self.tokens, self.heads, head_dim)
        k, v = (torch.randn(x, generator=generator).to(kind.x) for _ in range(2))
        slots = torch.randperm(pages * self.page_size, generator=generator)[: self.tokens]
        given: Given = {"k_pages": k_pages.to(kind.pages), "v_pages": v_pages.to(kind.pages)}
        given |= {"k": k, "v": v, "slots": slots}
        if kind.pages == torch.float8_e4m3fn:
            given |= {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([2.0])}
        return given

    def spoil(self, given: Given) -> None:
        spoil(given["k"][self.row], self.contents)
        spoil(given["v"][self.row], self.contents)
        if self.seed % 3 == 0:
            _mark(given["slots"], self.row)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        pools = {name: given[name].clone() for name in ("k_pages", "v_pages")}
        kvcache.append_pages(**given | pools, **where)
        return [pool.view(torch.uint8).flatten(0, 1) for pool in pools.values()]

    def others(self, results: Results) -> Results:
        slot = int(self.given()["slots"][self.row])
        return [without(each, slot) for each in results]


def _pages_kind(pick: random.Random, arch: str) -> Pages:
    x = pick.choice(SIXTEEN)
    pages = pick.choice((x, torch.float8_e4m3fn))
    return Pages(x if arch in WITHOUT_E4M3 else pages, x)


def _pages_problem(kind: Pages, pick: random.Random, small: bool) -> PagesProblem:
    tokens = pick.choice((2, 5, 9) if small else (2, 9, 130, 700))
    return PagesProblem(
        *_drawn(kind, pick, tokens), tokens, pick.randint(1, 3), pick.choice((1, 8))
    )


@dataclass(frozen=True)
class Entries:
    """Kind of entries.

    record: name of a format, or bytes of entries without one.
    dtype: dtype of what is rotated."""

    record: str | int
    dtype: torch.dtype = torch.bfloat16

    @property
    def of_pool(self) -> Record:
        """The format of an entry."""
        if isinstance(self.record, str):
            return LATENTS[self.record].record
        return Record("plain", self.record)


@dataclass(frozen=True)
class EntriesProblem(Problem):
    """rows: of a slot of the pool."""

    kind: Entries
    tokens: int
    rows: int

    def pool(self, generator: torch.Generator) -> Rows:
        """Bytes at random, in which numbers may be anything."""
        record = self.kind.of_pool
        slots, nbytes = -(-self.tokens // self.rows) + 2, record.page_bytes(self.rows)
        pool = torch.randint(256, (slots, nbytes), generator=generator).to(torch.uint8)
        return Rows(pool, 0, self.rows * record.data_bytes, self.rows, record)

    def slots(self, rows: Rows, generator: torch.Generator) -> torch.Tensor:
        """An entry for each token."""
        return torch.randperm(rows.entries, generator=generator)[: self.tokens]


class AppendProblem(EntriesProblem):
    """row: a token, which is replaced, or gets no entry. The pool keeps all other bytes."""

    def spoil(self, given: Given) -> None:
        spoil(given["x"][self.row], self.contents)
        if self.seed % 3 == 0:
            _mark(given["slots"], self.row)

    def entry_of(self) -> int:
        """Entry of the token before it is replaced."""
        return int(self.given()["slots"][self.row])

    def others(self, results: Results) -> Results:
        entry = self.entry_of()
        return [without(each, entry) for each in results]


class WindowProblem(AppendProblem):
    """Latent entries, rotated."""

    subject: ClassVar[str] = "kvcache.append_swa"

    def given(self) -> Given:
        generator, latent = self.generator, LATENTS[str(self.kind.record)]
        rows = self.pool(generator)
        x = torch.randn(self.tokens, latent.nope + 64, generator=generator).to(self.kind.dtype)
        positions = torch.randint(POSITIONS, (self.tokens,), generator=generator)
        cos, sin = (torch.randn(POSITIONS, 32, generator=generator) for _ in range(2))
        tables = {"positions": positions, "cos": cos, "sin": sin}
        return {"rows": rows, "x": x, "slots": self.slots(rows, generator)} | tables

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        rows = _copied(given["rows"])
        tables = {name: given[name] for name in ("positions", "slots", "cos", "sin")}
        kvcache.append_swa(rows, given["x"], **tables, **where)
        return rows.data().flatten(0, 1), rows.scales().flatten(0, 1)


class BytesProblem(AppendProblem):
    """Bytes as they are, to two pools."""

    subject: ClassVar[str] = "kvcache.append_rows"

    def given(self) -> Given:
        generator = self.generator
        rows, nbytes = self.pool(generator), int(self.kind.record)
        x, other = (
            torch.randn(self.tokens, nbytes // 2, generator=generator).bfloat16() for _ in range(2)
        )
        more = {"slots": self.slots(rows, generator), "second": (self.pool(generator), other)}
        return {"rows": rows, "x": x} | more

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        second, other = given["second"]
        pools = _copied(given["rows"]), _copied(second)
        kvcache.append_rows(
            (pools[0], given["x"]), (pools[1], other), given["slots"], **where
        )  # fmt: skip
        return [rows.data().flatten(0, 1) for rows in pools]


class GatherProblem(EntriesProblem):
    """row: of the output; the entry that it reads is replaced, or none is read."""

    subject: ClassVar[str] = "kvcache.gather"

    def given(self) -> Given:
        generator = self.generator
        rows, record = self.pool(generator), self.kind.record
        shape = (self.tokens, LATENTS[record].nope + 64 if isinstance(record, str) else record // 2)
        out = torch.zeros(shape, dtype=torch.bfloat16)
        return {"rows": rows, "indices": self.slots(rows, generator), "out": out}

    def spoil(self, given: Given) -> None:
        rows, entry = given["rows"], int(given["indices"][self.row])
        for view in (rows.data(), rows.scales()):
            spoil(view[entry // self.rows, entry % self.rows], self.contents)
        if self.seed % 3 == 0:
            _mark(given["indices"], self.row)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        out = torch.empty_like(given["out"])
        kvcache.gather(given["rows"], given["indices"], out, **where)
        return (out,)

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


class ReadProblem(PagesProblem):
    """row: of the output of `gather_pages`."""

    subject: ClassVar[str] = "kvcache.gather_pages"

    def spoil(self, given: Given) -> None:
        slot = int(given["slots"][self.row])
        for name in ("k_pages", "v_pages"):
            page = given[name][slot // self.page_size]
            spoil(page[slot % self.page_size], self.contents)
        if self.seed % 3 == 0:
            _mark(given["slots"], self.row)

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        pools = {name: given[name] for name in ("k_pages", "v_pages", "slots")}
        shape = given["k"].shape
        k, v = (torch.empty(shape, dtype=self.kind.pages, device=given["k"].device) for _ in "kv")
        kvcache.gather_pages(**pools, k=k, v=v, **where)
        return k, v

    def others(self, results: Results) -> Results:
        return [without(each, self.row) for each in results]


class SlotsProblem(EntriesProblem):
    """row: of the pairs of `copy_slots` and of the sums of `checksum`; its slot is replaced."""

    subject: ClassVar[str] = "kvcache.copy_slots"

    def given(self) -> Given:
        generator = self.generator
        rows = self.pool(generator)
        slots = len(rows.pool)
        source = torch.randperm(slots, generator=generator)[: min(self.tokens, slots)]
        target = torch.randperm(slots, generator=generator)[: len(source)]
        return {"pool": rows.pool, "target": torch.zeros_like(rows.pool),
                "pairs": torch.stack((source, target), 1)}  # fmt: skip

    def place(self, given: Given) -> tuple[int, int]:
        """(slot that is read, slot that is written)."""
        pairs = given["pairs"]
        source, target = pairs[self.row % len(pairs)].tolist()
        return source, target

    def spoil(self, given: Given) -> None:
        spoil(given["pool"][self.place(given)[0]], self.contents)
        if self.seed % 3 == 0:
            _mark(given["pairs"], self.row % len(given["pairs"]))

    def call(self, given: Given, where: dict[str, Any]) -> Results:
        target, pool, pairs = given["target"].clone(), given["pool"], given["pairs"]
        kvcache.copy_slots(pool, target, pairs, **where)
        sums = kvcache.checksum(pool, pairs[:, 0].contiguous(), 0, pool.shape[1], **where)
        return target, sums

    def others(self, results: Results) -> Results:
        given, (target, sums) = self.given(), results
        _, slot = self.place(given)
        return without(target, slot), without(sums, self.row % len(given["pairs"]))


def _copied(rows: Rows) -> Rows:
    return Rows(rows.pool.clone(), rows.data_offset, rows.scale_offset, rows.rows, rows.record)


def _latent_kind(pick: random.Random, _arch: str) -> Entries:
    return Entries(pick.choice([*LATENTS]), pick.choice((torch.bfloat16, torch.float32)))


def _plain_kind(pick: random.Random, _arch: str) -> Entries:
    return Entries(pick.choice(PLAIN))


def _gathered_kind(pick: random.Random, _arch: str) -> Entries:
    return Entries(pick.choice([*LATENTS, *PLAIN]))


def _drawn(kind: Any, pick: random.Random, rows: int) -> tuple[Any, int, int, str]:
    """The first fields of a problem."""
    return kind, pick.getrandbits(32), pick.randrange(rows), drawn_contents(pick)


def _problems(of: type[EntriesProblem]) -> Any:
    def problem(kind: Entries, pick: random.Random, small: bool) -> EntriesProblem:
        tokens = pick.choice((2, 5, 9) if small else (2, 9, 130, 700))
        return of(*_drawn(kind, pick, tokens), tokens, pick.choice((1, 4)))

    return problem


def _read_problem(kind: Pages, pick: random.Random, small: bool) -> ReadProblem:
    return ReadProblem(**vars(_pages_problem(kind, pick, small)))


SUBJECTS = (
    Subject("kvcache.append_pages", PORTABLE_ARCHS, _pages_kind, _pages_problem),
    Subject("kvcache.gather_pages", PORTABLE_ARCHS, _pages_kind, _read_problem),
    Subject("kvcache.append_swa", ARCHS, _latent_kind, _problems(WindowProblem)),
    Subject("kvcache.append_rows", ARCHS, _plain_kind, _problems(BytesProblem)),
    Subject("kvcache.gather", ARCHS, _gathered_kind, _problems(GatherProblem)),
    Subject("kvcache.copy_slots", ARCHS, _plain_kind, _problems(SlotsProblem)),
)
