"""ptxas' code of compressors and score kernels: nothing spills, and as many CTAs fit on an SM as
launches and grids assume.
"""

from __future__ import annotations

import itertools

import pytest

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, read, resources, tools_found
from kernelkit.compile.compiler import compile_once
from kernelkit.plan import hw
from kvcache.movement.config import AppendConfig
from mla.compressor.config import STAGED, EntryConfig, WalkConfig, WindowConfig
from mla.compressor.launch import ARCHS, WALKED, compile_compressor
from mla.glue.config import GlueConfig, QueriesConfig
from mla.indexer.formats import FORMATS
from mla.indexer.query_config import QueryConfig
from mla.indexer.scores_config import (
    HEADS,
    BlockScaledConfig,
    WgmmaConfig,
    tokens_for,
    warp_config,
    wgmma_tokens_for,
)
from mla.indexer.scores_launch import SOURCES
from mla.indexer.sm90 import plan as sm90
from mla.indexer.sm100.plan import ROLES, make_plan
from mla.prepare.config import PrepareConfig
from mla.prepare.launch import KERNEL

pytestmark = pytest.mark.usefixtures("whole_ptxas")

REGISTERS_UNIT = 256  # allocation unit of a warp's registers
ENTRIES = (
    EntryConfig("fp8_584", 4, 2, 512),
    EntryConfig("bf16_512", 4, 2, 512),
    EntryConfig("fp8_656", 128, 1, 512),
    EntryConfig("fp8_584", 128, 1, 512),
    EntryConfig("indexer_fp4", 4, 2, 128),
    EntryConfig("indexer_fp8", 4, 2, 128),
)
CHUNKS = (False, True)
COMPRESSORS = [
    *(WindowConfig(**vars(e), chunk=c) for e, c in itertools.product(ENTRIES, CHUNKS)),
    *(WalkConfig(**vars(ENTRIES[3]), staged=(WALKED, STAGED)[c], chunk=c) for c in CHUNKS),
]
PREPARED = [  # a CSA layer
    PrepareConfig(
        *(WindowConfig(**vars(entry), chunk=chunk) for entry in (ENTRIES[0], ENTRIES[index])),
        QueryConfig(ENTRIES[index].record, "bf16", "fp32"),
        GlueConfig(None, None, None, QueriesConfig(True, "neighbours"), True),
        AppendConfig("fp8_584", "bf16"),
    )
    for chunk, index in itertools.product(CHUNKS, (4, 5))
]  # fmt: skip
SIZES = [(heads, tokens_for(heads, longest)) for heads in HEADS for longest in (1, 2)]
SIZES = [*dict.fromkeys(SIZES)]
BLOCK_SCALED = [BlockScaledConfig("indexer_fp4", *size, "fp32", box=32) for size in SIZES]
WGMMA = [
    WgmmaConfig("indexer_fp8", heads, tokens, "fp32", box=32)
    for heads in HEADS
    for tokens in sorted({wgmma_tokens_for(heads, longest) for longest in (1, 2, 99)})
]
WARP = [
    (warp_config(record, *size, "fp32", arch), arch)
    for record, size, arch in itertools.product(FORMATS, SIZES, ARCHS)
]


@pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)
@pytest.mark.parametrize(
    ("config", "arch"),
    [
        *itertools.product([*COMPRESSORS, *PREPARED], ARCHS),
        *((config, "sm_100a") for config in BLOCK_SCALED),
        *((config, "sm_90a") for config in WGMMA),
        *WARP,
    ],
    ids=str,
)
def test_no_config_spills(config, arch, tmp_path):
    """Registers suffice for the assumed number of CTAs on an SM."""
    if config in COMPRESSORS:
        compiled = compile_compressor(config, arch)
    else:
        compiled = compile_once(config, arch, SOURCES.get(type(config), KERNEL))
    threads, sizes = config, config
    if config in BLOCK_SCALED:
        threads, sizes = ROLES, make_plan(config)
    if config in WGMMA:
        threads, sizes = sm90.ROLES, sm90.make_plan(config)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.cubin)
    (usage,) = resources(cubin)
    assert usage.stack == 0
    per_warp = -(-usage.registers * hw.WARP_THREADS // REGISTERS_UNIT) * REGISTERS_UNIT
    warps = sizes.ctas_per_sm * threads.threads // hw.WARP_THREADS
    assert warps * per_warp <= hw.REGISTERS_PER_SM


@pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)
@pytest.mark.parametrize("config", WGMMA, ids=str)
def test_products_overlap(config, tmp_path):
    """ptxas has not serialised the products: the next one is in flight during an epilogue."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_once(config, "sm_90a", SOURCES[WgmmaConfig]).cubin)
    assert read(cubin)[0]["serialised"] is False


@pytest.mark.parametrize("config", [*COMPRESSORS, *(config for config, _ in WARP)], ids=str)
def test_shared_memory(config):
    """Shared memory of the CTAs on an SM, including the system's part of each, fits."""
    smem = config.smem_bytes + hw.SMEM_RESERVED_BYTES
    assert config.ctas_per_sm * smem <= hw.SMEM_BYTES_PER_SM


def test_tokens_of_a_cta():
    """One group if it has all tokens of a request, otherwise four."""
    assert [wgmma_tokens_for(64, longest) for longest in (0, 1, 2, 3, 99)] == [1, 1, 2, 8, 8]
    assert [wgmma_tokens_for(128, longest) for longest in (1, 2)] == [1, 4]
    for config in WGMMA:
        assert (config.groups, config.groups * config.n) in ((1, config.columns), (4, 512))
        sm90.make_plan(config)


@pytest.mark.parametrize("config", BLOCK_SCALED, ids=str)
def test_memory_of_block_scaled_scores(config):
    plan = make_plan(config)
    assert plan.ctas_per_sm * (plan.smem.bytes + hw.SMEM_RESERVED_BYTES) <= hw.SMEM_BYTES_PER_SM
    assert plan.ctas_per_sm * plan.tmem.allocated <= hw.TMEM_COLUMNS
