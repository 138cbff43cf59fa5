"""Scores on the GPU itself: every record, offsets beyond 32 bits, graphs that are captured once and
replayed on other tables.

`python -m pytest --hw -m hw tests/fmha/sparse/test_scores_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from fmha.sparse.indexer.api import scores
from fmha.sparse.indexer.formats import FORMATS
from kernelkit.launch import ARCH_OF_CAPABILITY
from kvcache.layouts.rows import Rows
from tests.fmha.sparse.scores_cases import UNTOUCHED, Scored, check_scores, compare
from tests.kvcache.movement.rows_cases import like

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]

MIXED = ((0, 3), (1, 1260), (1, 1261), (3, 0), (2, 128), (2, 129), (2, 700), (3, 40), (0, 4))
FAR = 1 << 31  # bytes


def kernels(record: str) -> tuple[str, ...]:
    """That this GPU runs."""
    blackwell = ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability()) != "sm_90a"
    return ("warp", "tcgen05") if blackwell and record == "indexer_fp4" else ("warp",)


@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "out", "longest"), [(32, "fp32", 1), (32, "bf16", 3), (8, "fp32", 3), (64, "fp32", 3)]
)
def test_scores(record, heads, rows, out, longest):
    case = Scored(record, MIXED, heads, rows, out, longest, seed=heads)
    for kernel in kernels(record):
        check_scores(case, "cuda", kernel=kernel)


@pytest.mark.parametrize("record", FORMATS)
def test_beyond_32_bits(record):
    """A pool of more than 2^31 bytes, in whose last slots the keys are."""
    rows, query, tables, out = Scored(record, ((0, 70), (1, 100))).build()
    slots = FAR // rows.pool.stride(0) + 2 * len(rows.pool)
    shift = slots - len(rows.pool)
    pool = torch.zeros(slots, rows.pool.shape[1], dtype=torch.uint8, device="cuda")
    pool[shift:] = rows.pool.cuda()
    far = Rows(pool, rows.data_offset, rows.scale_offset, rows.rows, rows.record)
    owners, counts, blocks = tables
    moved = tuple(x.cuda() for x in (owners, counts, blocks + shift))
    for kernel in kernels(record):
        found = torch.full(out.shape, UNTOUCHED, device="cuda")
        scores(far, tuple(x.cuda() for x in query), *moved, found, kernel=kernel)
        compare(rows, query, tables, found.cpu())


@pytest.mark.parametrize("record", FORMATS)
def test_graph_on_other_tables(record):
    """Counts and owners of a replay are those that stand there then."""
    for kernel in kernels(record):
        rows, query, tables, out = Scored(record, MIXED, longest=3).build("cuda")
        graph = torch.cuda.CUDAGraph()
        scores(rows, query, *tables, out, longest=3, kernel=kernel)
        with torch.cuda.graph(graph):
            scores(rows, query, *tables, out, longest=3, kernel=kernel)
        owners, counts, _ = tables
        owners.copy_(owners.flip(0))
        counts.copy_(counts.flip(0))
        out.fill_(UNTOUCHED)
        graph.replay()
        held = Rows(like(rows.pool), rows.data_offset, rows.scale_offset, rows.rows, rows.record)
        compare(held, *(tuple(x.cpu() for x in part) for part in (query, tables)), out.cpu())


def test_tables_out_of_range():
    """A GPU passes over slots, owners and counts that there are not."""
    rows, query, tables, out = Scored(tokens=((0, 70), (1, 100), (2, 5))).build("cuda")
    owners, counts, blocks = tables
    owners[2], counts[0] = 99, 1 << 30
    blocks[1, 1] = 1 << 28
    for kernel in kernels("indexer_fp4"):
        out.fill_(UNTOUCHED)
        scores(rows, query, *tables, out, kernel=kernel)
        assert (out[2] == UNTOUCHED).all()
        assert (out[0] != UNTOUCHED).all()
        assert (out[1, 32:64] == 0).all()
