"""Rows of scores that are hostile by default, and `select` compared with its reference.

NaN surrounds a row's candidates. Kinds of rows alternate: normal numbers, few different ones, all
equal, zeros of both signs, infinities and NaN, rising and falling ones, numbers that differ only in
their last bits or all in their first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mla.indexer import reference
from mla.indexer.select_config import SelectConfig
from mla.indexer.select_launch import Candidates, run_select
from tests.kvcache.movement.rows_cases import DTYPES, checked

KINDS = 10
BESIDE = 8


@dataclass(frozen=True)
class Case:
    """A problem of `select`.

    counts: number of candidates of each row.
    page: entries of a block, 0 without block tables.
    """

    k: int
    counts: tuple[int, ...]
    dtype: str = "fp32"
    page: int = 32
    seed: int = 0
    first: int = 0  # kind of the first row

    def __str__(self) -> str:
        counts = "+".join(map(str, self.counts))
        return f"{self.k}of{counts}-{self.dtype}-{self.page}-{self.seed}-{self.first}"

    def scores(self, device: str = "cpu") -> torch.Tensor:
        columns = -(-max(self.counts) // BESIDE) * BESIDE
        wide = torch.full((len(self.counts), columns + 2 * BESIDE), math.nan)
        for row, count in enumerate(self.counts):
            wide[row, BESIDE : BESIDE + count] = numbers(
                (self.first + row) % KINDS, count, self.seed + row
            )
        columns = max(self.counts)
        return wide.to(DTYPES[self.dtype]).to(device)[:, BESIDE : BESIDE + columns]

    def paging(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, int] | None:
        """Owners in random order; tables of shuffled blocks, one block wider than needed."""
        if not self.page:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        blocks = -(-max(self.counts) // self.page) + 1
        owners = torch.randint(0, 3, (len(self.counts),), generator=generator)
        tables = torch.randperm(3 * blocks, generator=generator).view(3, blocks)
        wide = torch.full((3, blocks + 5), -7, dtype=torch.int32)
        wide[:, 2 : 2 + blocks] = tables
        return owners.int().to(device), wide.to(device)[:, 2 : 2 + blocks], self.page


def numbers(kind: int, count: int, seed: int) -> torch.Tensor:
    """fp32 [count] of a kind."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    steps = torch.randint(0, 7, (count,), generator=generator).float()
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-40, -1e-40])
    makers = {
        0: lambda: values,
        1: lambda: steps - 3,
        2: lambda: torch.full((count,), 2.5),
        3: lambda: torch.where(steps < 3, 0.0, -0.0),
        4: lambda: special[steps.int()],
        5: lambda: torch.arange(count).float() - count // 2,
        6: lambda: -torch.arange(count).float() * 2**-130,
        7: lambda: (steps.int() + 0x3F800000).view(torch.float32),
        8: lambda: torch.where(steps < 2, math.nan, values.relu()),
        9: lambda: torch.exp2(60 - torch.arange(count) / 4),
    }
    return makers[kind]()


def check_select(
    case: Case, config: SelectConfig | None = None, device: str = "cpu", **place: str
) -> None:
    scores, paging = case.scores(device), case.paging(device)
    counts = torch.tensor(case.counts, dtype=torch.int32, device=device)
    with checked():
        names = ("owners", "block_tables", "entries")
        paged = dict(zip(names, paging or (), strict=False))
        given = Candidates(scores, counts, case.k, **paged, **place)
        entries, chosen = run_select(given, config)
    on_host = None if paging is None else (paging[0].cpu(), paging[1].cpu(), paging[2])
    expected = reference.select(scores.cpu(), counts.cpu(), case.k, on_host)
    assert chosen.tolist() == expected[1].tolist()
    differ = (entries.cpu() != expected[0]).nonzero()
    assert not len(differ), f"{len(differ)} differ, the first at {differ[0].tolist()}"
