"""The kernels of this package, found or compiled: config -> compiled kernel, once per process."""

from __future__ import annotations

from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel
from kvcache.compressor.config import WalkConfig, WindowConfig
from kvcache.indexer.query_config import QueryConfig
from kvcache.indexer.scores_config import BlockScaledConfig, WarpConfig
from kvcache.indexer.select_config import SelectConfig
from kvcache.kernels.config import (
    AppendConfig,
    ChecksumConfig,
    CopyConfig,
    DequantiseConfig,
    RowsConfig,
)


def compile_append(config: AppendConfig, arch: str) -> CompiledKernel:
    """`Append.__call__`"""
    return compile_once(config, arch, "kvcache.kernels.append_kernel")


def compile_dequantise(config: DequantiseConfig, arch: str) -> CompiledKernel:
    """`Dequantise.__call__`"""
    return compile_once(config, arch, "kvcache.kernels.dequantise_kernel")


def compile_copy(config: CopyConfig, arch: str) -> CompiledKernel:
    """`CopySlots.__call__`"""
    return compile_once(config, arch, "kvcache.kernels.slots_kernel")


def compile_rows(config: RowsConfig, arch: str) -> CompiledKernel:
    """`CopyRows.__call__`"""
    return compile_once(config, arch, "kvcache.kernels.rows_kernel")


def compile_checksum(config: ChecksumConfig, arch: str) -> CompiledKernel:
    """`Checksum.__call__`"""
    return compile_once(config, arch, "kvcache.kernels.checksum_kernel")


def compile_windows(config: WindowConfig, arch: str) -> CompiledKernel:
    """`Windows.__call__`: a compressor of whole windows."""
    return compile_once(config, arch, "kvcache.compressor.window_kernel")


def compile_walk(config: WalkConfig, arch: str) -> CompiledKernel:
    """`Walk.__call__`: a compressor with a running softmax."""
    return compile_once(config, arch, "kvcache.compressor.online_kernel")


def compile_query(config: QueryConfig, arch: str) -> CompiledKernel:
    """`Query.__call__`"""
    return compile_once(config, arch, "kvcache.indexer.query_kernel")


def compile_warp_scores(config: WarpConfig, arch: str) -> CompiledKernel:
    """`WarpScores.__call__`"""
    return compile_once(config, arch, "kvcache.indexer.scores_kernel")


def compile_block_scaled(config: BlockScaledConfig, arch: str = "sm_100a") -> CompiledKernel:
    """`BlockScaledScores.__call__`"""
    return compile_once(config, arch, "kvcache.indexer.sm100.signature")


def compile_select(config: SelectConfig, arch: str) -> CompiledKernel:
    """`Select.__call__`"""
    return compile_once(config, arch, "kvcache.indexer.select_kernel")
