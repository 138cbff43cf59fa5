"""Rows between projections that are hostile by default: strided views in NaN, pools in poison,
slots that are no entries, numbers of all kinds. A result is compared byte for byte.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvcache.layouts.rows import Rows
from mla.attention.formats import FORMS
from mla.glue import reference
from mla.glue.api import IndexKeys, LatentKeys, LowRank, Queries, norm_rope_append
from mla.glue.config import STORED
from mla.indexer.formats import FORMATS, PLAIN, WIDTH, Rotation
from tests.kvcache.movement.rows_cases import Movement, around, assert_equal, checked, latents

BESIDE = 8
PAGES, PAGE = 5, 7
EPS = 1e-5
STRANGE = (-1, -7, PAGES * PAGE, PAGES * PAGE + 3, 1 << 30, -(1 << 31))
TABLES = {False: torch.int32, True: torch.int64}
WEIGHTS = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """The parts of a call; '' or 0 for one that is not there.

    keys, index: records.
    heads, rank: of queries, and elements of a low-rank query.
    normed: whether queries are normalised.
    plain: whether the keys' cache is a tensor of pages, not rows of a pool.
    scaled: whether entries in e4m3 have a scale.
    wide: whether tables are int64.
    in_place: whether queries and low-rank queries are overwritten.
    """

    keys: str = ""
    index: str = ""
    heads: int = 0
    rank: int = 0
    tokens: int = 5
    normed: bool = False
    plain: bool = False
    scaled: bool = False
    pairs: str = "neighbours"
    rotation: Rotation = PLAIN
    weight: str = "bf16"
    wide: bool = True
    in_place: bool = False
    seed: int = 0

    def __str__(self) -> str:
        names = [self.keys, self.index, f"{self.heads}h" * bool(self.heads)]
        names += [f"rank{self.rank}" * bool(self.rank), str(self.tokens), self.weight]
        flags = ("normed", "plain", "scaled", "wide", "in_place")
        names += [flag for flag in flags if getattr(self, flag)]
        names += [self.pairs[:1] + self.rotation.pairs[:1], f"{self.rotation.rope_first:d}"]
        return "-".join(name for name in names if name)

    # ---- arguments

    def rows_of(self, elements: int, seed: int) -> torch.Tensor:
        """Rows [T, elements] in a wider tensor of NaN; every other one has numbers of all kinds."""
        wide = torch.full((self.tokens, elements + 2 * BESIDE), math.nan).bfloat16()
        generator = torch.Generator().manual_seed(self.seed + seed)
        plain = torch.randn(self.tokens, elements, generator=generator)
        plain *= torch.logspace(-2, 2, self.tokens)[:, None]
        wide[:, BESIDE:-BESIDE] = plain.bfloat16()
        some = wide[1::2, BESIDE:-BESIDE]
        padded = -(-elements // 64) * 64
        some[:] = latents(len(some), self.seed + seed, torch.bfloat16, padded)[:, :elements]
        return wide[:, BESIDE:-BESIDE]

    def vector(self, size: int, seed: int) -> torch.Tensor:
        """The weight or bias of a norm."""
        generator = torch.Generator().manual_seed(self.seed + seed)
        return (torch.rand(size, generator=generator) * 2.0 - 0.5).to(WEIGHTS[self.weight])

    def slots(self, salt: int) -> torch.Tensor:
        """Entries in any order, no number twice but for those that are no entries; of a few tokens
        one has the first number behind the cache."""
        pick = random.Random(f"{self}{salt}")
        numbers = pick.sample(range(PAGES * PAGE), min(self.tokens, PAGES * PAGE))
        numbers += [-1] * (self.tokens - len(numbers))
        numbers = [pick.choice(STRANGE) if pick.randrange(4) == 0 else n for n in numbers]
        if self.tokens > 2:
            numbers[salt] = PAGES * PAGE
        return torch.tensor(numbers, dtype=TABLES[self.wide])

    def cache(self) -> Rows | torch.Tensor:
        """The keys' cache."""
        record, columns = STORED[self.keys], FORMS[self.keys].columns
        if not self.plain:
            return Movement(record, self.tokens, PAGES, PAGE, seed=self.seed).build_rows()
        generator = torch.Generator().manual_seed(self.seed)
        size = (PAGES, PAGE + 1, record.data_bytes)
        store = torch.randint(0, 120, size, generator=generator, dtype=torch.uint8)
        dtype = torch.float8_e4m3fn if record.data_bytes == columns else torch.bfloat16
        return store.view(dtype)[:, :PAGE]

    def heads_of(self, seed: int) -> torch.Tensor:
        """Queries [T, H, columns]; heads lie apart."""
        columns = 512 if self.normed else 192
        flat = replace(self, tokens=self.tokens * self.heads).rows_of(columns, seed)
        return flat.unflatten(0, (self.tokens, self.heads))

    def arguments(self) -> dict[str, Any]:
        """Arguments of `norm_rope_append`."""
        positions, *rope = Movement(STORED["bf16_512"], self.tokens, seed=self.seed).rope()
        given: dict[str, Any] = {"positions": positions.to(TABLES[self.wide]), "rope": tuple(rope)}
        given["pairs"] = self.pairs
        if self.keys:
            x = self.rows_of(FORMS[self.keys].columns, 1)
            scale = torch.tensor([0.37]) if self.scaled else None
            weight = self.vector(512, 2)
            given["keys"] = LatentKeys(x, self.cache(), self.slots(1), weight, EPS, scale)
        if self.index:
            rows = Movement(FORMATS[self.index].record, self.tokens, PAGES, PAGE).build_rows()
            norm = self.vector(WIDTH, 4), self.vector(WIDTH, 5), EPS, self.rotation
            given["index_keys"] = IndexKeys(self.rows_of(WIDTH, 3), rows, self.slots(2), *norm)
        if self.heads:
            out = None if self.in_place else self.heads_of(7).clone()
            given["queries"] = Queries(self.heads_of(6), out, EPS if self.normed else None)
        if self.rank:
            out = None if self.in_place else self.rows_of(self.rank, 10)
            given["low_rank"] = LowRank(self.rows_of(self.rank, 8), self.vector(self.rank, 9), out)
        return given

    # ---- results

    def expect(self, given: Mapping[str, Any]) -> None:
        """Do with the arguments, which are on the CPU, what the definition says."""
        positions = given["positions"].long()
        rope = tuple(table[positions] for table in given["rope"])
        if self.keys:
            keys = given["keys"]
            found = reference.latent_keys(keys.x, keys.weight, EPS, rope, self.pairs)
            put(keys.rows, keys.slots, *reference.encode(found, self.keys, keys.scale))
        if self.index:
            index = given["index_keys"]
            norm = index.weight, index.bias, EPS
            found = reference.index_keys(index.x, norm, rope, self.index, self.rotation)
            put(index.rows, index.slots, *found)
        if self.heads:
            part = given["queries"]
            out = part.q if part.out is None else part.out
            found = reference.queries(part.q, rope, part.eps, self.pairs)
            out[..., -found.shape[-1] :] = found
        if self.rank:
            part = given["low_rank"]
            out = part.x if part.out is None else part.out
            out.copy_(reference.low_rank(part.x, part.weight, part.eps))


def put(
    rows: Rows | torch.Tensor, slots: torch.Tensor, data: torch.Tensor, scales: torch.Tensor
) -> None:
    """Store encoded entries where slots name entries."""
    kept = ((slots >= 0) & (slots < PAGES * PAGE)).nonzero().flatten()
    place = slots[kept].long() // PAGE, slots[kept].long() % PAGE
    if isinstance(rows, torch.Tensor):
        rows.view(torch.uint8)[place] = data[kept]
        return
    rows.data()[place] = data[kept]
    if rows.record.scale_bytes:
        rows.scales()[place] = scales[kept]


def written(given: Mapping[str, Any]) -> list[torch.Tensor]:
    """All memory around what a call writes, as bytes."""
    found = []
    for name in ("keys", "index_keys"):
        rows = given[name].rows if name in given else None
        if rows is not None:
            whole = rows if isinstance(rows, torch.Tensor) else around(rows.pool)
            found.append(whole)
    for name, read in (("queries", "q"), ("low_rank", "x")):
        if name in given:
            part = given[name]
            found.append(getattr(part, read) if part.out is None else part.out)
    return [storage_of(each) for each in found]


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes on the CPU."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage()).cpu()


def moved(value: Any, device: str) -> Any:
    """Arguments on a device, with their strides and what lies around them."""
    if isinstance(value, torch.Tensor):
        whole = storage_of(value).to(device)
        there = whole.untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=device)
        return empty.set_(there, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, Rows | LatentKeys | IndexKeys | Queries | LowRank):
        fields = {name: moved(each, device) for name, each in vars(value).items()}
        return replace(value, **fields)
    return tuple(moved(each, device) for each in value) if isinstance(value, tuple) else value


def check(case: Case, device: str = "cpu", **place: Any) -> None:
    """Make the call of a case, and compare everything around what it writes."""
    mine = {name: moved(each, device) for name, each in case.arguments().items()}
    theirs = case.arguments()
    with checked():
        norm_rope_append(**mine, **place)
    case.expect(theirs)
    for got, expected in zip(written(mine), written(theirs), strict=True):
        assert_equal(got, expected)
