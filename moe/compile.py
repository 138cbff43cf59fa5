"""The kernels of this package, found or compiled: config -> compiled kernel, once per process."""

from __future__ import annotations

from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel
from moe.config import GroupedConfig
from moe.quantiser.config import AmaxConfig, QuantiseConfig, SpreadConfig
from moe.routing.config import CombineConfig, PermutationConfig, RouteConfig


def compile_grouped(config: GroupedConfig, arch: str = "sm_100a") -> CompiledKernel:
    """`GroupedGemm.__call__`"""
    return compile_once(config, arch, "moe.sm100.kernel")


def compile_route(config: RouteConfig, arch: str) -> CompiledKernel:
    """`Route.__call__`"""
    return compile_once(config, arch, "moe.routing.topk_kernel")


def compile_count(config: PermutationConfig, arch: str) -> CompiledKernel:
    """`Count.__call__`"""
    return compile_once(config, arch, "moe.routing.permutation_kernel:host_function_of_count")


def compile_scatter(config: PermutationConfig, arch: str) -> CompiledKernel:
    """`Scatter.__call__`"""
    return compile_once(config, arch, "moe.routing.permutation_kernel:host_function_of_scatter")


def compile_combine(config: CombineConfig, arch: str) -> CompiledKernel:
    """`Combine.__call__`"""
    return compile_once(config, arch, "moe.routing.combine_kernel")


def compile_quantise(config: QuantiseConfig, arch: str) -> CompiledKernel:
    """`Quantise.__call__`"""
    return compile_once(config, arch, "moe.quantiser.kernel")


def compile_amax(config: AmaxConfig, arch: str) -> CompiledKernel:
    """`Amax.__call__`"""
    return compile_once(config, arch, "moe.quantiser.amax_kernel")


def compile_spread(config: SpreadConfig, arch: str) -> CompiledKernel:
    """`Spread.__call__`"""
    return compile_once(config, arch, "moe.quantiser.spread_kernel")
