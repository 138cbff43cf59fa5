"""What the host function takes: fake tensors, shapes and strides dynamic."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import (
    BFloat16,
    Float4E2M1FN,
    Float8E4M3FN,
    Float8E8M0FNU,
    Float16,
    Float32,
    Int32,
    Uint8,
    Uint16,
)
from cutlass.cute.runtime import make_fake_tensor

from kernelkit import hw
from moe.config import GroupedConfig

OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
ELEMENTS = {"e2m1": Float4E2M1FN, "e4m3": Float8E4M3FN}
SCALES = {"e4m3": Float8E4M3FN, "ue8m0": Float8E8M0FNU}


def example_arguments(config: GroupedConfig) -> tuple:
    """(operands, tensors, numbers, k, stream), as `GroupedGemm.__call__` takes them."""
    # Sizes of 1 are dynamic, too: that is how a tensor is described at a launch.
    rows, experts, line, one = (cute.sym_int32() for _ in range(4))
    atoms, words = cute.sym_int32(), cute.sym_int32()
    operands = (
        _moved(Uint8, (one, rows, one), line),
        _moved(Uint8, (experts, cute.sym_int32(), one), line),
        _moved(Uint16, (one, atoms, cute.sym_int32()), words),
        _moved(Uint16, (experts, atoms, cute.sym_int32()), words),
    )
    out = OUT_TYPES.get(config.out, Uint8)
    unit = hw.TMA_ALIGN_BYTES * 8 // out.width
    strides = (cute.sym_int64(divisibility=unit), 1)
    tensors = (
        _array(Int32),
        make_fake_tensor(out, (rows, cute.sym_int32()), strides, assumed_align=hw.TMA_ALIGN_BYTES),
        _array(Float32, config.format.has_global),
        _array(Float32, config.format.has_global),
        _array(Uint8, config.out_format is not None, align=4),
        _array(Float32, config.out_format is not None and config.out_format.has_global),
        _array(Float32, config.amax),
    )
    numbers = (Float32(1.0), Float32(0.0), Float32(0.0))
    return operands, tensors, numbers, Int32(0), Int32(1), CUstream(0)


def _array(dtype: type[cutlass.Numeric], wanted: bool = True, align: int = 0) -> Any:
    """A vector, None where the config has no use for it."""
    align = align or dtype.width // 8
    fake = make_fake_tensor(dtype, (cute.sym_int32(),), (1,), assumed_align=align)
    return fake if wanted else None


def _moved(dtype: type[cutlass.Numeric], size: tuple, last: Any) -> Any:
    """What TMA moves: strides of 16 bytes, [experts, lines, blocks or 1, bytes or words]."""
    unit = hw.TMA_ALIGN_BYTES * 8 // dtype.width
    strides = tuple(cute.sym_int64(divisibility=unit) for _ in size)
    return make_fake_tensor(dtype, (*size, last), (*strides, 1), assumed_align=hw.TMA_ALIGN_BYTES)
