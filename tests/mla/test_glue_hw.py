"""Rows between projections on the GPU itself: bits of the definition, graphs, calls that repeat.

`python -m pytest --hw -m hw tests/mla/test_glue_hw.py`
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla.glue.api import norm_rope_append
from mla.indexer.formats import V32
from tests.kvcache.movement.rows_cases import assert_equal
from tests.mla.glue_cases import Case, check, moved, written
from tests.mla.test_glue import OTHERS, QUICK, RECORDS

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("kvcache-hw")]

LAYER = Case("fp8_656", "indexer_fp8", heads=16, rank=1536, rotation=V32)


@pytest.mark.parametrize("case", [*(case for case, _ in QUICK), *RECORDS, *OTHERS], ids=str)
def test_parts(case):
    check(case, "cuda")


@pytest.mark.parametrize("tokens", [1, 35, 4096])
def test_a_layer(tokens):
    check(replace(LAYER, tokens=tokens), "cuda")
    check(Case("fp8_584", heads=8, normed=True, tokens=tokens, in_place=True), "cuda")


@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_and_calls_that_repeat(pdl):
    """A call in a graph, and a second one with other tensors of the same layout."""
    cases = [replace(LAYER, tokens=9, heads=4, seed=seed) for seed in (1, 2)]
    for case in cases:
        mine = {name: moved(each, "cuda") for name, each in case.arguments().items()}
        theirs = case.arguments()
        norm_rope_append(**mine, pdl=pdl)
        mine = {name: moved(each, "cuda") for name, each in case.arguments().items()}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norm_rope_append(**mine, pdl=pdl)
        graph.replay()
        torch.cuda.synchronize()
        case.expect(theirs)
        for got, expected in zip(written(mine), written(theirs), strict=True):
            assert_equal(got, expected)
