"""Scores of keys in hostile pools: foreign bytes everywhere, tables without slots after the needed
ones, queries, weights and results in wider tensors; kernels compared with the definition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvcache.layouts.records import round_up
from kvcache.layouts.rows import Rows
from mla.indexer import reference
from mla.indexer.api import scores
from mla.indexer.formats import WIDTH, index_format
from mla.indexer.quantised import dequantised, quantised
from tests.kvcache.movement.rows_cases import around, checked, like, poisoned

BESIDE = 16  # foreign elements or bytes, if strides have to be multiples of 16 bytes
UNTOUCHED = 12345.0  # exact in bf16, too
OUT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOST = 7  # one in LOST keys has a NaN
# Sums of 128 products and of 128 heads in fp32; tensor cores drop the lowest bits.
FP32_ERROR = 2.0**-19


@dataclass(frozen=True)
class Scored:
    """A problem of scores.

    tokens: (owner, number of visible keys) of each token, in order.
    columns: columns of the result, 0 for as many as needed.
    data_offset: offset of the first page in a slot.
    """

    record: str = "indexer_fp4"
    tokens: tuple[tuple[int, int], ...] = ((0, 70), (1, 33), (1, 150))
    heads: int = 64
    rows: int = 32
    out: str = "fp32"
    longest: int = 1
    columns: int = 0
    data_offset: int = 48
    seed: int = 0

    def __str__(self) -> str:
        seen = "_".join(f"{owner}x{count}" for owner, count in self.tokens)
        name = f"{self.record}-{self.heads}h-{self.rows}r-{self.out}-{self.longest}"
        return f"{name}-{len(self.tokens)}t-{seen}"[:90]

    @property
    def requests(self) -> int:
        """Number of requests, including one without tokens."""
        return max((owner for owner, _ in self.tokens), default=0) + 2

    @property
    def most(self) -> int:
        """Largest number of keys."""
        return max((count for _, count in self.tokens), default=0)

    def build(self, device: str = "cpu") -> tuple:
        """Return (rows, query, tables, out)."""
        generator = torch.Generator().manual_seed(self.seed)
        record = index_format(self.record).record
        blocks = -(-self.most // self.rows)
        slots = self.requests * blocks + 3
        # The scales follow the data, with a gap.
        scale_offset = round_up(self.data_offset + self.rows * record.data_bytes, 16) + 16
        size = round_up(scale_offset + self.rows * record.scale_bytes, 16) + 32
        pool = poisoned(slots, size, seed=self.seed)
        where = (self.data_offset, scale_offset, self.rows, record)
        rows = Rows(pool, *where)
        order = torch.randperm(slots, generator=generator)[: self.requests * blocks]
        tables = order.view(self.requests, blocks).int()
        needed = [0] * self.requests
        for owner, count in self.tokens:
            needed[owner] = max(needed[owner], count)
        for owner, count in enumerate(needed):
            if count:
                self.fill(rows, tables[owner].tolist(), count, generator)
            tables[owner, -(-count // self.rows) :] = -1 if owner % 2 else 1 << 30
        pool = pool if device == "cpu" else around(pool).to(device)[:, 48:-48]
        query = tuple(self.apart(x, device) for x in self.query(generator))
        owners, counts = torch.tensor(self.tokens, dtype=torch.int32).view(-1, 2).T.contiguous()
        out = torch.full((len(self.tokens), (self.columns or self.most) + 9), UNTOUCHED)
        out = out.to(OUT_DTYPES[self.out]).to(device)[:, 5:-4]
        wide = torch.full((self.requests, blocks + 3), -7, dtype=torch.int32, device=device)
        wide[:, 1:-2] = tables
        return Rows(pool, *where), query, (owners.to(device), counts.to(device), wide[:, 1:-2]), out

    def fill(self, rows: Rows, slots: list[int], count: int, generator: torch.Generator) -> None:
        """Write the keys of a request: of many magnitudes, some with a NaN."""
        keys = torch.randn(count, WIDTH, generator=generator)
        keys *= torch.exp2(torch.randint(-6, 6, (count, 1), generator=generator))
        keys[LOST - 1 :: LOST, 5] = math.nan
        key = torch.arange(count)
        place = torch.tensor(slots)[key // self.rows], key % self.rows
        rows.data()[place], rows.scales()[place] = quantised(keys.bfloat16(), rows.record)

    def query(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return data, scales, weights; the last head of the last token has a NaN."""
        size = len(self.tokens), self.heads, WIDTH
        q = torch.randn(size, generator=generator)
        q *= torch.exp2(torch.randint(-3, 3, (*size[:2], 1), generator=generator))
        weights = torch.randn(size[:2], generator=generator)
        data, scales = quantised(q.bfloat16(), index_format(self.record).record)
        if self.record == "indexer_fp4":
            return data, scales, weights
        dtype = torch.bfloat16 if self.record == "indexer_bf16" else torch.float8_e4m3fn
        return data.view(dtype), scales[..., :0], weights

    def apart(self, x: torch.Tensor, device: str) -> torch.Tensor:
        """Copy x into a tensor with wider strides."""
        size = (*x.shape[:-1], x.shape[-1] + 2 * BESIDE)
        wide = torch.full(size, 0x7F, dtype=torch.uint8).to(x.dtype)
        wide[..., BESIDE : BESIDE + x.shape[-1]] = x
        return wide.to(device)[..., BESIDE : BESIDE + x.shape[-1]]


def magnitudes(rows: Rows, query: tuple, tables: tuple, out: torch.Tensor) -> torch.Tensor:
    """sum |w| sum |q| |k| of every score, in fp64; errors are proportional to it."""
    owners, counts, block_tables = (table.tolist() for table in tables)
    found = torch.zeros(out.shape, dtype=torch.float64)
    queries = reference.query_values(rows, *query[:2]).abs().double()
    for token, (owner, count) in enumerate(zip(owners, counts, strict=True)):
        data, scales = reference.key_bytes(rows, block_tables[owner], count)
        keys = dequantised(data, scales, rows.record).abs().double()
        found[token, :count] = keys @ queries[token].T @ query[2][token].abs().double()
    return found


def check_scores(
    case: Scored, device: str = "cpu", cut: bool = False, sums: str = "fast", **place: str
) -> torch.Tensor:
    """Check that every score is within rounding, and nothing else is written; return the scores.

    cut: whether products are expected to be cut off as a tensor core does it in e4m3.
    sums: of products in the emulator, see `ptxemu.Options.accumulation`.
    """
    rows, query, tables, out = case.build(device)
    before = around(rows.pool).clone()
    with checked(sums):
        scores(rows, query, *tables, out, longest=case.longest, **place)
    assert torch.equal(around(rows.pool), before)
    wide = out.as_strided((len(out), out.stride(0)), (out.stride(0), 1), 0)
    beside = torch.cat((wide[:, :5], wide[:, -4:]), 1)
    assert (beside == UNTOUCHED).all(), "written beside the result"
    rows = Rows(like(rows.pool), rows.data_offset, rows.scale_offset, rows.rows, rows.record)
    query, tables = (tuple(x.cpu() for x in part) for part in (query, tables))
    compare(rows, query, tables, out.cpu(), cut)
    return out


def compare(rows: Rows, query: tuple, tables: tuple, out: torch.Tensor, cut: bool = False) -> None:
    """Compare with the definition in fp64, within errors of fp32, on the CPU."""
    exact = torch.full(out.shape, UNTOUCHED, dtype=torch.float64)
    reference.scores(rows, query, tables, exact, cut=cut)
    limit = FP32_ERROR * magnitudes(rows, query, tables, out)
    if out.dtype == torch.bfloat16:
        limit += exact.abs() * 2.0**-8
    lost = exact.isnan()
    assert torch.equal(out.isnan(), lost), "NaN in one only"
    error = (out.double() - exact).abs()
    wrong = ((error > limit) & ~lost).nonzero()
    first = tuple(wrong[0].tolist()) if len(wrong) else ()
    assert not len(wrong), (
        f"{len(wrong)} scores, the first at {first}: {out[first]}, expected {exact[first]} "
        f"+- {limit[first]}"
    )
