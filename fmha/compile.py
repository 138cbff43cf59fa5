"""The kernels of this package, found or compiled: config -> compiled kernel, once per process."""

from __future__ import annotations

from fmha.config import AttentionConfig
from kernelkit.compile import compile_once
from kernelkit.kernel import CompiledKernel

SOURCE = "fmha.sm100.signature"


def compile_attention(config: AttentionConfig, arch: str = "sm_100a") -> CompiledKernel:
    """`AttentionForward.__call__`"""
    return compile_once(config, arch, SOURCE)


def compile_minimal(arch: str = "sm_100a") -> CompiledKernel:
    """`fmha.minimal.minimal_attention`, for any lengths, heads, batch and strides."""
    return compile_once(None, arch, "fmha.minimal")
