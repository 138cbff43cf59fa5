"""What the host function of attention takes: fake tensors, shapes and strides dynamic."""

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


def host_function(config: AttentionConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return AttentionForward(config), *example_arguments(config)


def example_arguments(config: AttentionConfig) -> tuple:
    """(tensors, arrays, numbers, stream), as `AttentionForward.__call__` takes them."""
    batch, entries, sq, skv, q_heads, kv_heads = (cute.sym_int32() for _ in range(6))
    io, out = IO_TYPES[config.dtype], OUT_TYPES[config.o_dtype]

    def rows(dtype: type[cutlass.Numeric], size: tuple, columns: int) -> Any:
        unit = hw.TMA_ALIGN_BYTES * 8 // dtype.width
        strides = tuple(cute.sym_int64(divisibility=unit) for _ in range(3))
        align = hw.TMA_ALIGN_BYTES
        return make_fake_tensor(dtype, (*size, columns), (*strides, 1), assumed_align=align)

    def per_row() -> Any:
        strides = (cute.sym_int64(), cute.sym_int64(), 1)
        return make_fake_tensor(Float32, (batch, q_heads, sq), strides)

    keys = (entries, skv, kv_heads)
    tensors = (
        rows(io, (batch, sq, q_heads), config.head_dim),
        rows(io, keys, config.head_dim),
        rows(io, keys, config.v_dim),
        rows(out, (batch, sq, q_heads), config.v_dim),
    )
    arrays = (per_row(), None if config.normalize else per_row(), *_tables(config, q_heads))
    numbers = (Float32(1.0), Float32(1.0), Int32(0), Int32(0), Int32(0), Int32(1))
    return tensors, arrays, numbers, CUstream(0)


def _tables(config: AttentionConfig, q_heads: Any) -> tuple:
    """In the order of `fmha.sm100.args.Tables`; None for what the config does not read."""

    def vector(wanted: bool, dtype: type[cutlass.Numeric] = Int32, size: Any = None) -> Any:
        return make_fake_tensor(dtype, (size or cute.sym_int32(),), (1,)) if wanted else None

    def matrix(wanted: bool, dtype: type[cutlass.Numeric], columns: Any) -> Any:
        stride = (cute.sym_int64(), 1)
        return make_fake_tensor(dtype, (cute.sym_int32(), columns), stride) if wanted else None

    rotated = config.rope_dim > 0
    return (
        vector(config.kv_lens),
        vector(config.q_offset),
        vector(config.varlen_q),
        vector(config.varlen_k),
        matrix(config.page_size > 0, Int32, cute.sym_int32()),
        vector(config.sinks, Float32, q_heads),
        matrix(rotated, Float32, cute.sym_int32()),
        matrix(rotated, Float32, cute.sym_int32()),
    )
