"""What ptxas made of the score kernels: nothing spills, and their CTAs fit an SM beside each other
as often as grids count on."""

from __future__ import annotations

import itertools

import pytest

from fmha.sparse.indexer.formats import FORMATS
from fmha.sparse.indexer.scores_config import (
    HEADS,
    BlockScaledConfig,
    ScoresConfig,
    WarpConfig,
    tokens_for,
    warp_config,
)
from fmha.sparse.indexer.scores_launch import compile_block_scaled, compile_warp_scores
from fmha.sparse.indexer.sm100.plan import ROLES, make_plan
from kernelkit import hw
from tests.fmha.sparse.static import check_resources, needs_tools

pytestmark = pytest.mark.usefixtures("whole_ptxas")

SIZES = [(heads, tokens_for(heads, longest)) for heads in HEADS for longest in (1, 2)]
SIZES = [*dict.fromkeys(SIZES)]
ALL = [
    *((BlockScaledConfig("indexer_fp4", *size, "fp32", box=32), "sm_100a") for size in SIZES),
    *(
        (warp_config(record, *size, "fp32", arch), arch)
        for record, size, arch in itertools.product(FORMATS, SIZES, ("sm_90a", "sm_100a"))
    ),
]


@needs_tools
@pytest.mark.parametrize(("config", "arch"), ALL, ids=str)
def test_no_config_spills(config, arch, tmp_path):
    check_resources(*compile_for(config, arch), tmp_path)


def compile_for(config: ScoresConfig, arch: str) -> tuple:
    """(compiled, threads, CTAs of an SM)"""
    if isinstance(config, WarpConfig):
        return compile_warp_scores(config, arch), config.threads, config.ctas_per_sm
    return compile_block_scaled(config, arch), ROLES.threads, make_plan(config).ctas_per_sm


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_memory(size):
    """Shared memory of CTAs that share an SM, the system's part of each included."""
    plan = make_plan(BlockScaledConfig("indexer_fp4", *size, "fp32", box=32))
    assert plan.ctas_per_sm * (plan.smem.bytes + hw.SMEM_RESERVED_BYTES) <= hw.SMEM_BYTES_PER_SM
    assert plan.ctas_per_sm * plan.tmem.allocated <= hw.TMEM_COLUMNS
    for record in FORMATS:
        config = warp_config(record, *size, "fp32", "sm_90a")
        smem = config.smem_bytes + hw.SMEM_RESERVED_BYTES
        assert config.ctas_per_sm * smem <= hw.SMEM_BYTES_PER_SM
