"""The best keys in the emulator, under its checker: those of the reference, in its order; CTAs that
share a row.
"""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelkit.plan.hw import SMEM_BYTES_PER_CTA
from mla.indexer import api, reference
from mla.indexer.select_config import CLUSTERS, MAX_K, SelectConfig, choose_select
from mla.indexer.select_launch import ARCHS
from tests.mla.select_cases import KINDS, Case, check_select

KEPT = SelectConfig("fp32", 1, 512, True, 64)
PAIR = SelectConfig("fp32", 2, 512, True, 64, listed=16)  # some warps' lists overflow
READ_AGAIN = SelectConfig("bf16", 2, 0, False, 64, aligned=False)
SAMPLED = SelectConfig("fp32", 1, 0, True, 64, listed=64, sampled=2)
ONE_OF_EACH = [
    pytest.param(Case(16, (200, 16, 0)), KEPT, "sm_100a", id="kept"),
    pytest.param(Case(40, (60, 120, 0, 300), first=3), PAIR, "sm_90a", id="pair"),
    pytest.param(Case(80, (333, 90), "bf16", 0, first=1), READ_AGAIN, "sm_100a", id="read"),
    pytest.param(Case(20, (2200,), first=9), SAMPLED, "sm_90a", id="sampled"),
]
EVERY_KIND = tuple(range(200, 200 + 37 * KINDS, 37))
CONFIGS = [
    SelectConfig(dtype, cluster, capacity, paged, 64, listed, aligned)
    for dtype in ("fp32", "bf16")
    for cluster, capacity, paged, listed, aligned in (
        (1, 1024, True, 128, True), (1, 0, False, 128, False), (2, 512, True, 8, True),
        (4, 256, True, 32, True), (8, 256, False, 128, True), (8, 0, True, 16, False),
    )
] + [
    SelectConfig(dtype, cluster, 0, True, 32, listed=96, sampled=sampled)
    for dtype in ("fp32", "bf16")
    for cluster, sampled in ((1, 2), (1, 8), (2, 2))
]  # fmt: skip


@pytest.mark.parametrize(("case", "config", "arch"), ONE_OF_EACH)
def test_select(case, config, arch):
    check_select(case, config, arch=arch)


def named(config: SelectConfig | int | tuple) -> str:
    if not isinstance(config, SelectConfig):
        return str(config) if isinstance(config, int) else f"{config[0]} first"
    return f"{config.dtype}-{config.cluster}-{config.capacity}-{config.paged}-{config.listed}"


@pytest.mark.parametrize("turn", [0, 1])  # one architecture, and the other
@pytest.mark.parametrize(
    ("config", "k", "archs"),
    [*zip(CONFIGS, cycle((1, 33, 250)), cycle((ARCHS, ARCHS[::-1])), strict=False)],
    ids=named,
)
def test_every_kind(config, k, archs, turn):
    page = 32 if config.paged else 0
    check_select(Case(k, EVERY_KIND, config.dtype, page, seed=k), config, arch=archs[turn])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("arch", ARCHS)
def test_as_chosen(dtype, arch):
    """Configs are those that the library chooses, for one row and several; blocks of one entry,
    too."""
    check_select(Case(512, (9000,), dtype, page=1), arch=arch)
    check_select(Case(MAX_K, (5000, 2048, 2049), dtype, first=1), arch=arch)


@settings(max_examples=25, deadline=None)
@given(
    st.builds(
        Case,
        k=st.integers(1, 90),
        counts=st.lists(st.integers(0, 400), min_size=1, max_size=4).map(tuple),
        dtype=st.sampled_from(["fp32", "bf16"]),
        page=st.integers(1, 70),
        seed=st.integers(0, 1 << 20),
        first=st.integers(0, KINDS - 1),
    ),
    st.sampled_from([config for config in CONFIGS if config.paged]),
)
def test_any_rows(case, config):
    if config.dtype == case.dtype:
        check_select(case, config)


# -- the reference --------------------------------------------------------------------------------


def test_the_reference_takes_the_first_of_equals():
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[-0.0, nan, 0.0, -inf, 3.0, nan, inf, 0.0]])
    for k, expected in {1: [6], 3: [0, 4, 6], 5: [0, 2, 4, 6, 7], 7: [0, 1, 2, 3, 4, 6, 7]}.items():
        found, chosen = reference.select(scores, torch.tensor([8]), k)
        assert found.tolist() == [expected]
        assert chosen.tolist() == [k]
    found, chosen = reference.select(scores, torch.tensor([2]), 4)
    assert (found.tolist(), chosen.tolist()) == ([[0, 1, -1, -1]], [2])


def test_the_reference_agrees_with_topk():
    scores = torch.randn(5, 300)
    found, _ = reference.select(scores, torch.full((5,), 300), 40)
    assert torch.equal(found, scores.topk(40).indices.sort(1).values)


# -- shared rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("candidates", [0, 1, 4096, 65536, 262144, 1 << 20, 1 << 30])
@pytest.mark.parametrize("rows", [1, 7, 32, 128, 1024, 1 << 20])
def test_shared_memory_suffices(rows, candidates, dtype, arch):
    config = choose_select(dtype, (rows, candidates, 512), arch, paged=True)
    assert config.cluster in CLUSTERS
    words = config.bins + config.bins // 32 + 2 * config.warps + 64 + config.key_words
    words += 2 * config.warps * config.listed
    assert 4 * words <= SMEM_BYTES_PER_CTA
    if config.capacity:
        assert config.capacity % config.step == 0
        assert config.capacity * config.cluster >= candidates
    else:
        assert candidates > 4096


def test_few_rows_take_many_ctas():
    sizes = {(1, 4096): 1, (1, 262144): 8, (16, 262144): 8, (32, 262144): 4, (1024, 65536): 1}
    for (rows, candidates), cluster in sizes.items():
        config = choose_select("fp32", (rows, candidates, 512), "sm_90a", paged=True)
        assert config.cluster == cluster


@pytest.mark.parametrize(("k", "sampled"), [(1, 8), (512, 8), (513, 4), (1024, 4), (2048, 2)])
def test_the_sample_has_enough(k, sampled):
    assert choose_select("fp32", (1024, 1 << 16, k), "sm_90a", paged=True).sampled == sampled


@pytest.mark.usefixtures("nothing_runs")
def test_no_rows():
    empty = torch.zeros(0, 40), torch.zeros(0, dtype=torch.int32)
    entries, chosen = api.select(*empty, 7)
    assert (entries.shape, chosen.shape) == ((0, 7), (0,))
