"""Queries of the indexer in the emulator, under its checker: bits of the definition; views of
tracers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from mla.indexer import api
from mla.indexer.formats import FORMATS, GLM5, V32, Rotation
from mla.indexer.query_launch import ARCHS
from tests.mla.index_cases import Query, check_query

QUICK = [
    (Query("indexer_fp4", factor=0.011), "sm_100a"),
    (Query("indexer_fp4", weights="fp32"), "sm_90a"),
    (Query("indexer_fp8", dtype="fp32"), "sm_100a"),
    (Query("indexer_bf16"), "sm_90a"),
]
MORE = [
    Query(record, tokens, heads, dtype, weights, factor, seed)
    for record in FORMATS
    for tokens, heads, dtype, weights, factor, seed in (
        (1, 1, "bf16", "fp32", 1.0, 1), (70, 3, "fp32", "bf16", 0.01, 2),
        (5, 64, "bf16", "bf16", 3.0, 3), (130, 1, "bf16", "bf16", 1.0, 4),
    )
]  # fmt: skip
ROTATED = [
    Query("indexer_fp8", rotation=V32), Query("indexer_fp8", dtype="fp32", rotation=GLM5),
    Query("indexer_bf16", rotation=Rotation("halves", hadamard=False)),
]  # fmt: skip
CASE = Query("indexer_fp4")


@pytest.mark.parametrize(("case", "arch"), QUICK, ids=str)
def test_queries(case, arch):
    check_query(case, arch=arch)


@pytest.mark.parametrize("case", ROTATED, ids=str)
def test_other_rotations(case):
    check_query(case, arch="sm_90a")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", MORE, ids=str)
def test_more_queries(case, arch):
    check_query(case, arch=arch)


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Query,
        record=st.sampled_from([*FORMATS]),
        tokens=st.integers(1, 9),
        heads=st.integers(1, 9),
        dtype=st.sampled_from(["bf16", "fp32"]),
        weights=st.sampled_from(["bf16", "fp32"]),
        factor=st.floats(-4, 4, width=32),
        seed=st.integers(0, 1 << 20),
    )
)
def test_any_queries(case):
    check_query(case)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize("size", [(0, 4), (3, 0)], ids=str)
def test_nothing_to_do(record, size):
    case = replace(CASE, record=record, tokens=1, heads=1)
    q, weights, positions, cos, sin = case.build()
    tokens = size[0]
    positions = positions.expand(tokens).contiguous()
    found = api.prepare_query(
        q.new_empty(*size, 128), weights.new_empty(size), positions, cos, sin, record=record
    )
    assert found.data.shape[:2] == found.scales.shape[:2] == found.weights.shape == size


@pytest.mark.parametrize("record", FORMATS)
def test_tracers_see_what_comes(record):
    tensors = replace(CASE, record=record).build()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in tensors]
        found = api.prepare_query(*fakes, record=record)
    element = {"indexer_fp4": torch.uint8, "indexer_fp8": torch.float8_e4m3fn}
    assert found.data.dtype == element.get(record, torch.bfloat16)
    assert found.scales.shape == (3, 5, 4 if record == "indexer_fp4" else 0)
    assert found.weights.shape == (3, 5)
