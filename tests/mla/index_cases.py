"""Rows of the indexer that are hostile by default: groups of many kinds in wider tensors of NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mla.indexer import api
from mla.indexer import quantised as definition
from mla.indexer.formats import PLAIN, WIDTH, Rotation, index_format
from tests.kvcache.movement.rows_cases import DTYPES, Movement, assert_equal, checked, latents

BESIDE = 8


@dataclass(frozen=True)
class Query:
    """Queries of tokens x heads rows for a record."""

    record: str
    tokens: int = 3
    heads: int = 5
    dtype: str = "bf16"
    weights: str = "bf16"
    factor: float = 1.0
    seed: int = 0
    rotation: Rotation = PLAIN

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.heads}-{self.dtype}-{self.weights}"
        name = f"{self.record}-{sizes}-{self.factor:.3g}-{self.seed}"
        flags = f"{self.rotation.rope_first:d}{self.rotation.hadamard:d}"
        return name if self.rotation == PLAIN else f"{name}-{self.rotation.pairs}{flags}"

    def build(self, device: str = "cpu") -> tuple:
        """Return (q, weights, positions, cos, sin); neither q nor weights are contiguous."""
        dtype = DTYPES[self.dtype]
        rows = latents(self.tokens * self.heads, self.seed, dtype, WIDTH)
        size = self.tokens, self.heads + 1, WIDTH + 2 * BESIDE
        wide = torch.full(size, math.nan, dtype=dtype)
        wide[:, 1:, BESIDE:-BESIDE] = rows.view(self.tokens, self.heads, WIDTH)
        generator = torch.Generator().manual_seed(self.seed)
        weights = torch.randn(self.heads, self.tokens, generator=generator)
        weights = weights.to(DTYPES[self.weights]).to(device).T
        positions, *rope = Movement(index_format(self.record).record, self.tokens).rope(device)
        return wide.to(device)[:, 1:, BESIDE:-BESIDE], weights, positions, *rope


def sylvester(size: int = WIDTH) -> torch.Tensor:
    """The Hadamard matrix of a power of two in fp64, by Sylvester's construction."""
    found = torch.ones(1, 1, dtype=torch.float64)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(found) < size:
        found = torch.kron(found, pair)
    return found


def expected_query(case: Query, q: torch.Tensor, weights: torch.Tensor, *rope: torch.Tensor):
    """Return (data, scales, weights) by the definition."""
    positions, cos, sin = rope
    record = index_format(case.record).record
    rows = definition.prepared(q, cos[positions][:, None], sin[positions][:, None], case.rotation)
    data, scales = definition.quantised(rows, record)
    weights = weights.float() * torch.tensor(case.factor)
    if case.record == "indexer_fp8":
        weights, scales = weights * definition.scale_values(scales, record)[..., 0], scales[..., :0]
    return data, scales, weights


def check_query(case: Query, device: str = "cpu", **place: str) -> None:
    arguments = case.build(device)
    with checked():
        options = {"record": case.record, "factor": case.factor, "rotation": case.rotation}
        found = api.prepare_query(*arguments, **options, **place)
    data, scales, weights = expected_query(case, *(x.cpu() for x in arguments))
    assert_equal(found.data.view(torch.uint8), data)
    assert_equal(found.scales, scales)
    same = found.weights.cpu()
    assert torch.equal(same.isnan(), weights.isnan())
    assert_equal(same.nan_to_num(0.0), weights.nan_to_num(0.0))
