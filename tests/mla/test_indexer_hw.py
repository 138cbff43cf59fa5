"""The indexer on the GPU itself, at model sizes: queries, scores and the best keys, offsets beyond
32 bits, graphs that are captured once and replayed with other tables.

`python -m pytest --hw -m hw tests/mla/test_indexer_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from kernelkit.call.launch import ARCH_OF_CAPABILITY, written_for
from kvcache.layouts.rows import Rows
from mla.indexer import api, reference
from mla.indexer.formats import FORMATS
from mla.indexer.scores_launch import OWN
from mla.indexer.select_config import CLUSTERS, SelectConfig
from tests.kvcache.movement.rows_cases import like
from tests.mla.index_cases import Query, check_query
from tests.mla.scores_cases import UNTOUCHED, Scored, check_scores, compare
from tests.mla.select_cases import KINDS, Case, check_select

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]

GIB = 1 << 30
MIXED = ((0, 3), (1, 1260), (1, 1261), (3, 0), (2, 128), (2, 129), (2, 700), (3, 40), (0, 4))
FAR = 1 << 31  # bytes


@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (3, 64), (333, 64)])
def test_queries(record, tokens, heads):
    check_query(Query(record, tokens, heads, seed=tokens), "cuda")
    check_query(Query(record, tokens, heads, "fp32", "fp32", 0.01, tokens), "cuda")


# -- scores ----------------------------------------------------------------------------------------


def kernels(record: str) -> tuple[str, ...]:
    """Score kernels of a record that this GPU runs."""
    here = written_for(ARCH_OF_CAPABILITY[torch.cuda.get_device_capability()])
    return "warp", *(name for name, where in OWN.items() if where == (here, record))


@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize(
    ("rows", "out", "longest"),
    [(32, "fp32", 1), (32, "bf16", 3), (8, "fp32", 3), (64, "fp32", 3), (64, "fp32", 9)],
)
def test_scores(record, heads, rows, out, longest):
    case = Scored(record, MIXED, heads, rows, out, longest, seed=heads)
    for kernel in kernels(record):
        check_scores(case, "cuda", cut=kernel == "wgmma", kernel=kernel)


@pytest.mark.parametrize("record", FORMATS)
def test_keys_beyond_32_bits(record):
    """The keys are in the last slots of a pool of more than 2^31 bytes."""
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
        api.scores(far, tuple(x.cuda() for x in query), *moved, found, kernel=kernel)
        compare(rows, query, tables, found.cpu(), cut=kernel == "wgmma")


@pytest.mark.parametrize("record", FORMATS)
def test_a_graph_scores_by_other_tables(record):
    """A replay uses the counts and owners that the tables hold at that time."""
    for kernel in kernels(record):
        rows, query, tables, out = Scored(record, MIXED, longest=3).build("cuda")
        graph = torch.cuda.CUDAGraph()
        api.scores(rows, query, *tables, out, longest=3, kernel=kernel)
        with torch.cuda.graph(graph):
            api.scores(rows, query, *tables, out, longest=3, kernel=kernel)
        owners, counts, _ = tables
        owners.copy_(owners.flip(0))
        counts.copy_(counts.flip(0))
        out.fill_(UNTOUCHED)
        graph.replay()
        held = Rows(like(rows.pool), rows.data_offset, rows.scale_offset, rows.rows, rows.record)
        query, tables = (tuple(x.cpu() for x in part) for part in (query, tables))
        compare(held, query, tables, out.cpu(), cut=kernel == "wgmma")


def test_tables_out_of_range():
    """A GPU skips slots, owners and counts out of range."""
    rows, query, tables, out = Scored(tokens=((0, 70), (1, 100), (2, 5))).build("cuda")
    owners, counts, blocks = tables
    owners[2], counts[0] = 99, 1 << 30
    blocks[1, 1] = 1 << 28
    for kernel in kernels("indexer_fp4"):
        out.fill_(UNTOUCHED)
        api.scores(rows, query, *tables, out, kernel=kernel)
        assert (out[2] == UNTOUCHED).all()
        assert (out[0] != UNTOUCHED).all()
        assert (out[1, 32:64] == 0).all()


# -- the best --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("k", [1, 512, 1024, 2048])
def test_as_chosen(k, dtype):
    """Configs are those that the library chooses: long rows, and a batch with rows of all
    lengths."""
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


def test_candidates_beyond_32_bits():
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
        expected, _ = reference.select(wide[row : row + 1], counts[row : row + 1], k)
        assert torch.equal(found[row], expected[0])


def test_a_graph_selects_by_other_tables():
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
        expected = reference.select(scores, counts, 100, (owners, tables, 32))
        assert all(map(torch.equal, found, expected))


def test_equal_bits_every_time():
    """There are few different numbers, so that a race between equal ones would show."""
    scores = torch.randint(0, 50, (64, 100_000), device="cuda").float()
    counts = torch.full((64,), 100_000, dtype=torch.int32, device="cuda")
    first, _ = api.select(scores, counts, 2048)
    for _ in range(50):
        assert torch.equal(api.select(scores, counts, 2048)[0], first)
