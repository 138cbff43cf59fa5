"""Queries and the best keys on the GPU itself: bits of the definition at sizes of a model, every
width of clusters, offsets beyond 32 bits, graphs that are captured once.

`python -m pytest --hw -m hw tests/fmha/sparse/test_index_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from fmha.sparse.indexer import api, reference_select
from fmha.sparse.indexer.formats import FORMATS
from fmha.sparse.indexer.select_config import CLUSTERS, SelectConfig
from tests.fmha.sparse.index_cases import Query, check_query
from tests.fmha.sparse.select_cases import KINDS, Case, check_select

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]

GIB = 1 << 30


@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 64), (333, 64)])
def test_queries(record, tokens, heads):
    check_query(Query(record, tokens, heads, seed=tokens), "cuda")
    check_query(Query(record, tokens, heads, "fp32", "fp32", 0.01, tokens), "cuda")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 512, 1024, 2048])
def test_as_chosen(k, dtype):
    """Configs of the library's own choice: long rows, a batch with rows of all lengths."""
    for kind in range(KINDS):
        check_select(Case(k, (262144 - kind,), dtype, first=kind, seed=kind), device="cuda")
    lengths = tuple(1 << bits for bits in range(18))
    check_select(Case(k, lengths, dtype, seed=k), device="cuda")
    check_select(Case(k, (4093,) * 300, dtype, page=0), device="cuda")
    check_select(Case(k, (30011,) * 280, dtype, page=1), device="cuda")


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("listed", [8, 128])
def test_every_width(cluster, dtype, listed):
    case = Case(777, (50_000 - cluster,) * KINDS, dtype, seed=cluster)
    for capacity in (0, 8192 * 8 // cluster):
        if capacity * 4 > 128 << 10:
            continue
        config = SelectConfig(dtype, cluster, capacity, True, 512, listed, aligned=False)
        check_select(case, config, "cuda")


def test_offsets_beyond_32_bits():
    if torch.cuda.mem_get_info()[0] < 14 * GIB:
        pytest.skip("needs 14 GiB")
    columns, rows, k = 1 << 20, 2100, 512
    wide = torch.full((rows, columns), torch.nan, device="cuda")
    counts = torch.zeros(rows, dtype=torch.int32, device="cuda")
    for row in (0, 1, 1024, rows - 1):
        wide[row].normal_()
        counts[row] = columns - row
    found, _ = api.select(wide, counts, k)
    for row in (0, 1, 1024, rows - 1):
        expected, _ = reference_select.select(wide[row : row + 1], counts[row : row + 1], k)
        assert torch.equal(found[row], expected[0])


def test_a_graph_follows_its_tables():
    scores = torch.randn(8, 20_000, device="cuda")
    counts = torch.full((8,), 20_000, dtype=torch.int32, device="cuda")
    owners = torch.arange(8, device="cuda").int()
    tables = torch.arange(8 * 625, device="cuda").int().view(8, 625)
    where = {"owners": owners, "block_tables": tables, "entries": 32}
    api.select(scores, counts, 100, **where)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = api.select(scores, counts, 100, **where)
    for seed in range(3):
        torch.manual_seed(seed)
        scores.normal_()
        counts.copy_(torch.randint(0, 20_001, (8,)))
        tables.copy_(torch.randperm(8 * 625).view(8, 625))
        owners.copy_(torch.randint(0, 8, (8,)))
        graph.replay()
        expected = reference_select.select(scores, counts, 100, (owners, tables, 32))
        assert all(map(torch.equal, found, expected))


def test_equal_bits_every_time():
    """Few different numbers, so that a race among equals would show."""
    scores = torch.randint(0, 50, (64, 100_000), device="cuda").float()
    counts = torch.full((64,), 100_000, dtype=torch.int32, device="cuda")
    first, _ = api.select(scores, counts, 2048)
    for _ in range(50):
        assert torch.equal(api.select(scores, counts, 2048)[0], first)
