"""What the host functions of all architectures take: fake tensors, shapes and strides dynamic."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32

from gqa_lowlatency.config import DecodeConfig
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw

TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32, "e4m3": Float8E4M3FN}


def example_arguments(config: DecodeConfig) -> tuple:
    """(tensors, tables, numbers, parts, stream): the fields of `shared/args.py` in their order."""
    batch, entries, tokens, keys, q_heads, kv_heads = (cute.sym_int32() for _ in range(6))
    io, kv, out = (TYPES[n] for n in (config.dtype, config.keys_dtype, config.o_dtype))

    def rows(dtype: type[cutlass.Numeric], *size: cute.SymInt) -> Any:
        return fake_tensor(dtype, *size, config.head_dim, align=hw.TMA_ALIGN_BYTES)

    tensors = (
        rows(io, batch, tokens, q_heads),
        rows(kv, entries, keys, kv_heads),
        rows(kv, entries, keys, kv_heads),
        rows(out, batch, tokens, q_heads),
        fake_tensor(Float32, batch, q_heads, tokens),
    )
    numbers = (Float32(1.0), Float32(1.0), Int32(0), Int32(0))
    return tensors, _tables(config, q_heads, kv_heads), numbers, Int32(1), CUstream(0)


def _tables(config: DecodeConfig, q_heads: Any, kv_heads: Any) -> tuple | None:
    """In the order of `device.args.Tables`, None for what the config does not read, or for all."""

    def array(wanted: bool, dtype: type[cutlass.Numeric], *size: Any) -> Any:
        return fake_tensor(dtype, *size) if wanted else None

    sizes = tuple(cute.sym_int32() for _ in range(4))
    tables = (
        array(config.lens, Int32, sizes[0]),
        array(config.page_size > 0, Int32, sizes[0], sizes[1]),
        array(config.sinks, Float32, q_heads),
        array(config.k_scale, Float32, kv_heads),
        array(config.v_scale, Float32, kv_heads),
        array(config.parts, Float32, sizes[2], sizes[3], cute.sym_int32()),
        array(config.parts, Int32, sizes[2]),
        array(config.first, Int32, sizes[0]),
    )
    return None if all(table is None for table in tables) else tables
