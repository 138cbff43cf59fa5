"""The kernels of this package, found or compiled: config -> compiled kernel, once per process."""

from __future__ import annotations

from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel
from kvcache.movement.config import (
    AppendConfig,
    ChecksumConfig,
    CopyConfig,
    DequantiseConfig,
    RowsConfig,
)


def compile_append(config: AppendConfig, arch: str) -> CompiledKernel:
    """`Append.__call__`"""
    return compile_once(config, arch, "kvcache.movement.append_kernel")


def compile_dequantise(config: DequantiseConfig, arch: str) -> CompiledKernel:
    """`Dequantise.__call__`"""
    return compile_once(config, arch, "kvcache.movement.dequantise_kernel")


def compile_copy(config: CopyConfig, arch: str) -> CompiledKernel:
    """`CopySlots.__call__`"""
    return compile_once(config, arch, "kvcache.movement.slots_kernel")


def compile_rows(config: RowsConfig, arch: str) -> CompiledKernel:
    """`CopyRows.__call__`"""
    return compile_once(config, arch, "kvcache.movement.rows_kernel")


def compile_checksum(config: ChecksumConfig, arch: str) -> CompiledKernel:
    """`Checksum.__call__`"""
    return compile_once(config, arch, "kvcache.movement.checksum_kernel")
