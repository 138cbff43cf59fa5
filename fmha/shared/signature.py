"""What the host function of attention takes: fake tensors, shapes and strides dynamic."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from fmha.config import AttentionConfig
from fmha.kernel_arguments import KernelArguments, Scalars, Tables
from fmha.shared.types import IO_TYPES, OUT_TYPES
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw


def example_arguments(config: AttentionConfig) -> tuple[KernelArguments, CUstream]:
    """What `fmha.shared.host.Forward` takes."""
    batch, entries, sq, skv, q_heads, kv_heads = (cute.sym_int32() for _ in range(6))
    q, io = IO_TYPES[config.dtype], IO_TYPES[config.keys_dtype]
    out = OUT_TYPES[config.o_dtype]

    def rows(dtype: type[cutlass.Numeric], *shape: int | cute.SymInt) -> Any:
        return fake_tensor(dtype, *shape, align=hw.TMA_ALIGN_BYTES)

    per_row = (batch, q_heads, sq)
    keys = (entries, skv, kv_heads)
    given = KernelArguments(
        q=rows(q, batch, sq, q_heads, config.head_dim),
        k=rows(io, *keys, config.head_dim),
        v=rows(io, *keys, config.v_dim),
        o=rows(out, batch, sq, q_heads, config.v_dim),
        lse=fake_tensor(Float32, *per_row),
        row_max=None if config.normalize else fake_tensor(Float32, *per_row),
        tables=_tables(config, q_heads, kv_heads),
        scalars=Scalars(
            scale_log2=Float32(1.0),
            softcap_log2=Float32(1.0),
            window_left=Int32(0),
            window_right=Int32(0),
            sink_tokens=Int32(0),
        ),
        longest=Int32(1),
        section=Int32(1),
        near=Int32(1),
        places=Int32(1),
    )
    return given, CUstream(0)


def _tables(config: AttentionConfig, q_heads: Any, kv_heads: Any) -> Tables:
    """None for what the config does not read."""

    def table(wanted: bool, dtype: type[cutlass.Numeric], *shape: Any) -> Any:
        shape = shape or (cute.sym_int32(),)
        return fake_tensor(dtype, *shape) if wanted else None

    rotated = config.rope_dim > 0
    return Tables(
        kv_lens=table(config.kv_lens, Int32),
        q_offset=table(config.q_offset, Int32),
        cu_seqlens_q=table(config.varlen_q, Int32),
        cu_seqlens_k=table(config.varlen_k, Int32),
        page_table=table(config.page_size > 0, Int32, cute.sym_int32(), cute.sym_int32()),
        sinks=table(config.sinks, Float32, q_heads),
        cos=table(rotated, Float32, cute.sym_int32(), cute.sym_int32()),
        sin=table(rotated, Float32, cute.sym_int32(), cute.sym_int32()),
        q_scale=table(config.q_scale, Float32, q_heads),
        k_scale=table(config.k_scale, Float32, kv_heads),
        v_scale=table(config.v_scale, Float32, kv_heads),
    )
