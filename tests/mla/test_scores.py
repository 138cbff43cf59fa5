"""Scores of index keys in the emulator, under its checker, by both kernels."""

from __future__ import annotations

import pytest
import torch

from mla.indexer import scores_launch
from mla.indexer.api import scores
from mla.indexer.formats import FORMATS
from mla.indexer.scores_config import BlockScaledConfig, grid_for
from tests.mla.scores_cases import UNTOUCHED, Scored, check_scores

# Requests with one token and with several, a token that sees nothing, one that sees a whole tile.
MIXED = ((0, 3), (1, 261), (1, 260), (3, 0), (2, 128), (2, 129), (2, 1), (3, 40), (0, 1))
ON = ("sm_90a", "sm_100a")
OF_ONE_GROUP, OF_MANY = 1, 99  # tokens of a request: wgmma shares out keys, or groups of tokens


RUNS = ((0, 300), (0, 299), (0, 70), (1, 140), (1, 33), (2, 257))
MANY_TILES = ((1, 1500), (1, 1501), (0, 2600), (2, 300), (2, 1), (3, 2600))


def kernels_for(record: str, arch: str) -> tuple[str, ...]:
    """Score kernels of a record on an architecture; 'auto' chooses the first."""
    own = [name for name, where in scores_launch.OWN.items() if where == (arch, record)]
    return *own, "warp"


@pytest.mark.parametrize(
    ("case", "arch"),
    [
        (Scored(longest=3, data_offset=0), "sm_100a"),
        (Scored("indexer_fp8", heads=32, out="bf16"), "sm_90a"),
        (Scored("indexer_fp8", RUNS, heads=64, longest=9), "sm_90a"),
        (Scored("indexer_bf16", heads=16, rows=128, longest=2), "sm_100a"),
    ],
    ids=str,
)
def test_scores(case, arch):
    check_scores(case, arch=arch)


@pytest.mark.parametrize("arch", ON)
@pytest.mark.parametrize("record", ["indexer_fp4", "indexer_fp8"])
def test_one_cta(monkeypatch, record, arch):
    """There are more tiles than accumulators, boxes that begin anywhere in pages, and several
    runs."""
    monkeypatch.setattr(scores_launch, "grid_for", lambda *_: (1, 1))
    tokens = ((1, 600), (1, 520), (0, 1), (2, 200))
    check_scores(Scored(record, heads=16, rows=24, tokens=tokens, longest=2), arch=arch)


# An H100 runs the tests for sm_90a (test_indexer_hw.py).
@pytest.mark.parametrize("arch", ON)
@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize(
    ("heads", "rows", "out", "longest"),
    [
        (64, 32, "fp32", 3),
        (64, 64, "bf16", 1),
        (32, 24, "bf16", 3),
        (16, 8, "fp32", 1),
        (128, 256, "fp32", 3),
    ],
)
def test_every_kind(record, heads, rows, out, longest, arch):
    for kernel in kernels_for(record, arch):
        case = Scored(record, MIXED, heads, rows, out, longest, columns=270, seed=heads)
        check_scores(case, arch=arch, kernel=kernel)


@pytest.mark.parametrize("arch", ON)
def test_many_tiles(monkeypatch, arch):
    """Two CTAs process more tiles than the ring has stages, in consecutive runs."""
    monkeypatch.setattr(scores_launch, "grid_for", lambda *_: (2, 2))
    check_scores(Scored(tokens=MANY_TILES, heads=32, longest=2), arch=arch)


@pytest.mark.parametrize("longest", [OF_ONE_GROUP, OF_MANY])
def test_many_tiles_by_wgmma(monkeypatch, longest):
    """Some runs have tokens of both warpgroups, of one group or of none; rings come round."""
    monkeypatch.setattr(scores_launch, "grid_for", lambda *_: (2, 6 if longest == 1 else 1))
    case = Scored("indexer_fp8", MANY_TILES, heads=64, longest=longest)
    check_scores(case, arch="sm_90a", kernel="wgmma")


def test_products_are_cut_as_by_a_tensor_core():
    """With its sums of products, scores are within fp32 of the reference that makes the same ones;
    some are not of the exact one."""
    case = Scored("indexer_fp8", ((0, 70), (1, 150)), heads=16)
    where = {"arch": "sm_90a", "kernel": "wgmma"}
    check_scores(case, cut=True, sums="aligned", **where)
    with pytest.raises(AssertionError, match="scores, the first at"):
        check_scores(case, sums="aligned", **where)


@pytest.mark.parametrize(
    ("record", "arch", "kernel"),
    [
        *((record, "sm_90a", "warp") for record in FORMATS),
        ("indexer_fp8", "sm_90a", "wgmma"),
        ("indexer_fp4", "sm_100a", "tcgen05"),
    ],
)
def test_bits_do_not_depend_on_neighbours(record, arch, kernel):
    """Tokens have equal bits in a call of their own and in groups with others."""
    alone, *grouped = (
        check_scores(Scored(record, MIXED, 32, longest=longest), arch=arch, kernel=kernel)
        for longest in ((1, 3, 9) if kernel == "wgmma" else (1, 3))
    )
    for other in grouped:
        assert torch.equal(alone.view(torch.int32), other.view(torch.int32))


def test_nothing_to_do():
    for case in (Scored(tokens=()), Scored(tokens=((0, 0),))):
        rows, query, tables, out = case.build()
        scores(rows, query, *tables, out)
        assert (out == UNTOUCHED).all()


def test_grids():
    """(CTAs that share tiles, groups): one wave if that is as good, otherwise short waves."""
    config = BlockScaledConfig("indexer_fp4", 32, 4, "fp32", box=32)
    assert grid_for(config, 9, 1, 264) == (1, 3)
    assert grid_for(config, 4, 100 * 128, 264) == (100, 1)
    assert grid_for(config, 8, 300 * 128, 264) == (100, 2)  # three rounds of 132 CTAs or of 100
    # Four waves of 11 rounds, not two of 32.
    assert grid_for(config, 2048, 32 * 128, 396) == (3, 512)
    ctas, groups = grid_for(config, 40_000, 4096, 264)
    assert (ctas >= 1, groups) == (True, 10_000)
