"""Example arguments of the host functions of all architectures: fake tensors with
dynamic shapes.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.kernel_arguments import KernelArguments, Scalars, Tables, Tensors
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw

TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32, "e4m3": Float8E4M3FN}


def example_arguments(config: DecodeConfig) -> tuple[KernelArguments, CUstream]:
    """Return the arguments to compile the host functions with."""
    batch, entries, tokens, keys, q_heads, kv_heads = (cute.sym_int32() for _ in range(6))
    io, kv, out = (TYPES[n] for n in (config.dtype, config.keys_dtype, config.o_dtype))

    def rows(dtype: type[cutlass.Numeric], *size: cute.SymInt) -> Any:
        return fake_tensor(dtype, *size, config.head_dim, align=hw.TMA_ALIGN_BYTES)

    given = KernelArguments(
        tensors=Tensors(
            q=rows(io, batch, tokens, q_heads),
            k=rows(kv, entries, keys, kv_heads),
            v=rows(kv, entries, keys, kv_heads),
            o=rows(out, batch, tokens, q_heads),
            lse=fake_tensor(Float32, batch, q_heads, tokens),
        ),
        tables=_tables(config, q_heads, kv_heads),
        scalars=Scalars(
            scale_log2=Float32(1.0),
            softcap_log2=Float32(1.0),
            left=Int32(0),
            sink_tokens=Int32(0),
        ),
        parts=Int32(1),
    )
    return given, CUstream(0)


def _tables(config: DecodeConfig, q_heads: Any, kv_heads: Any) -> Tables:
    """Return the tables; None for a table that the config does not read."""

    def array(wanted: bool, dtype: type[cutlass.Numeric], *size: Any) -> Any:
        return fake_tensor(dtype, *size) if wanted else None

    sizes = tuple(cute.sym_int32() for _ in range(4))
    return Tables(
        lens=array(config.lens, Int32, sizes[0]),
        pages=array(config.page_size > 0, Int32, sizes[0], sizes[1]),
        sinks=array(config.sinks, Float32, q_heads),
        k_scale=array(config.k_scale, Float32, kv_heads),
        v_scale=array(config.v_scale, Float32, kv_heads),
        out_scale=array(config.out_scale, Float32, cute.sym_int32()),
        partial=array(config.parts, Float32, sizes[2], sizes[3], cute.sym_int32()),
        counts=array(config.parts, Int32, sizes[2]),
        first=array(config.first, Int32, sizes[0]),
        tree=array(config.tree, Int64, cute.sym_int32()),
    )
