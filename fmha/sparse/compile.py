"""The kernels of this package, found or compiled: config -> compiled kernel, once per process."""

from __future__ import annotations

from fmha.sparse.compressor.config import WalkConfig, WindowConfig
from fmha.sparse.indexer.query_config import QueryConfig
from fmha.sparse.indexer.scores_config import BlockScaledConfig, WarpConfig
from fmha.sparse.indexer.select_config import SelectConfig
from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel


def compile_windows(config: WindowConfig, arch: str) -> CompiledKernel:
    """`Windows.__call__`: a compressor of whole windows."""
    return compile_once(config, arch, "fmha.sparse.compressor.window_kernel")


def compile_walk(config: WalkConfig, arch: str) -> CompiledKernel:
    """`Walk.__call__`: a compressor with a running softmax."""
    return compile_once(config, arch, "fmha.sparse.compressor.online_kernel")


def compile_query(config: QueryConfig, arch: str) -> CompiledKernel:
    """`Query.__call__`"""
    return compile_once(config, arch, "fmha.sparse.indexer.query_kernel")


def compile_warp_scores(config: WarpConfig, arch: str) -> CompiledKernel:
    """`WarpScores.__call__`"""
    return compile_once(config, arch, "fmha.sparse.indexer.scores_kernel")


def compile_block_scaled(config: BlockScaledConfig, arch: str = "sm_100a") -> CompiledKernel:
    """`BlockScaledScores.__call__`"""
    return compile_once(config, arch, "fmha.sparse.indexer.sm100.signature")


def compile_select(config: SelectConfig, arch: str) -> CompiledKernel:
    """`Select.__call__`"""
    return compile_once(config, arch, "fmha.sparse.indexer.select_kernel")
