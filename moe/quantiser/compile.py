"""The kernels of this package, found or compiled: config -> compiled kernel, once per process."""

from __future__ import annotations

from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel
from moe.quantiser.config import AmaxConfig, QuantiseConfig, SpreadConfig


def compile_quantise(config: QuantiseConfig, arch: str) -> CompiledKernel | None:
    """`Quantise.__call__`"""
    return compile_once(config, arch, "moe.quantiser.kernel")


def compile_amax(config: AmaxConfig, arch: str) -> CompiledKernel | None:
    """`Amax.__call__`"""
    return compile_once(config, arch, "moe.quantiser.amax_kernel")


def compile_spread(config: SpreadConfig, arch: str) -> CompiledKernel | None:
    """`Spread.__call__`"""
    return compile_once(config, arch, "moe.quantiser.spread_kernel")
