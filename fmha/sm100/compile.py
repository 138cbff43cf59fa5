"""AttentionConfig -> the compiled kernel: fake tensors with dynamic shapes and strides."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_tensor

from fmha.config import AttentionConfig
from fmha.sm100.kernel import AttentionForward
from fmha.sm100.products import IO_TYPES, OUT_TYPES
from kernelkit import hw
from kernelkit.compile import compile_once


def compile_attention(config: AttentionConfig, arch: str = "sm_100a") -> Any:
    """The compiled `AttentionForward.__call__` of `config`; compiled once per process."""
    config.check()
    return compile_once(config, arch, lambda: (AttentionForward(config), *_arguments(config)))


def _arguments(config: AttentionConfig) -> tuple:
    batch, sq, skv, q_heads, kv_heads = (cute.sym_int32() for _ in range(5))
    io, out = IO_TYPES[config.dtype], OUT_TYPES[config.out_dtype]

    def tokens(dtype: type[cutlass.Numeric], length: Any, heads: Any) -> Any:
        unit = hw.TMA_ALIGN_BYTES * 8 // dtype.width
        strides = tuple(cute.sym_int64(divisibility=unit) for _ in range(3))
        shape = (batch, length, heads, config.head_dim)
        return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=hw.TMA_ALIGN_BYTES)

    def per_row() -> Any:
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(Float32, (batch, q_heads, sq), strides)

    q, o = tokens(io, sq, q_heads), tokens(out, sq, q_heads)
    k, v = tokens(io, skv, kv_heads), tokens(io, skv, kv_heads)
    row_max = None if config.normalize else per_row()
    kv_lens = make_fake_tensor(Int32, (batch,), (1,)) if config.kv_lens else None
    return (q, k, v, o), (per_row(), row_max), kv_lens, Float32(1.0), CUstream(0)
