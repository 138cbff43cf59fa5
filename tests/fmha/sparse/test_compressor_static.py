"""What ptxas made of the compressors: nothing spills, and as many CTAs as a launch counts on have
room on an SM beside each other."""

from __future__ import annotations

import itertools

import pytest

from fmha.sparse.compressor.config import STAGED, EntryConfig, WalkConfig, WindowConfig
from fmha.sparse.compressor.launch import ARCHS, WALKED, compile_walk, compile_windows
from kernelkit import hw
from tests.fmha.sparse.static import check_resources, needs_tools

pytestmark = pytest.mark.usefixtures("whole_ptxas")

ENTRIES = (
    EntryConfig("fp8_584", 4, 2, 512),
    EntryConfig("bf16_512", 4, 2, 512),
    EntryConfig("fp8_656", 128, 1, 512),
    EntryConfig("fp8_584", 128, 1, 512),
    EntryConfig("indexer_fp4", 4, 2, 128),
    EntryConfig("indexer_fp8", 4, 2, 128),
)
CHUNKS = (False, True)
WINDOWS = [WindowConfig(**vars(e), chunk=c) for e, c in itertools.product(ENTRIES, CHUNKS)]
WALKS = [WalkConfig(**vars(ENTRIES[3]), staged=(WALKED, STAGED)[c], chunk=c) for c in CHUNKS]


@needs_tools
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("config", [*WINDOWS, *WALKS], ids=str)
def test_no_config_spills(config, arch, tmp_path):
    compiled = (compile_windows if config in WINDOWS else compile_walk)(config, arch)
    check_resources(compiled, config.threads, config.ctas_per_sm, tmp_path)


@pytest.mark.parametrize("config", [*WINDOWS, *WALKS], ids=str)
def test_memory(config):
    """Shared memory of CTAs that share an SM, the system's part of each included."""
    smem = config.smem_bytes + hw.SMEM_RESERVED_BYTES
    assert config.ctas_per_sm * smem <= hw.SMEM_BYTES_PER_SM
