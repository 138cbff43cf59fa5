"""What the host function takes: fake tensors, shapes and strides dynamic."""

from functools import partial
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

from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.config import WINDOW, WINDOW_ALIGN_BYTES, GroupedConfig

OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "fp32": Float32}
ELEMENTS = {"e2m1": Float4E2M1FN, "e4m3": Float8E4M3FN}
SCALES = {"e4m3": Float8E4M3FN, "ue8m0": Float8E8M0FNU}


def example_arguments(config: GroupedConfig) -> tuple:
    """(operands, tensors, numbers, k, stream), as `GroupedGemm.__call__` takes them."""
    # Sizes of 1 are dynamic, too: that is how a tensor is described at a launch.
    rows, experts, n, line, one = (cute.sym_int32() for _ in range(5))
    atoms, words = cute.sym_int32(), cute.sym_int32()
    moved = partial(fake_tensor, align=hw.TMA_ALIGN_BYTES)
    # What TMA moves: [experts, lines, blocks or 1, bytes or words].
    operands = (
        moved(Uint8, one, rows, one, line),
        _windows(experts, n) if config.x_fmt else moved(Uint8, experts, n, one, line),
        moved(Uint16, one, atoms, cute.sym_int32(), words),
        moved(Uint16, experts, atoms, cute.sym_int32(), words),
    )
    tensors = (
        _array(Int32),
        moved(OUT_TYPES.get(config.out, Uint8), rows, cute.sym_int32()),
        _array(Float32, config.format.has_global),
        fake_tensor(Float32, experts, 2)
        if config.pair_scale
        else _array(Float32, config.format.has_global),
        _array(Uint8, config.out_format is not None, align=4),
        _array(Float32, config.out_format is not None and config.out_format.has_global),
        _array(Float32, config.amax),
        moved(Float32, experts, n) if config.bias else None,
    )
    numbers = (Float32(1.0), Float32(0.0), Float32(0.0))
    return operands, tensors, numbers, Int32(0), Int32(1), CUstream(0)


def _windows(experts: cute.SymInt, n: cute.SymInt) -> Any:
    """[experts, lines, windows, bytes of one]; what is padded is in units of 32 bytes."""
    shape = experts, n, cute.sym_int32(), WINDOW // 2
    return fake_tensor(Uint8, *shape, align=WINDOW_ALIGN_BYTES)


def _array(dtype: type[cutlass.Numeric], wanted: bool = True, align: int | None = None) -> Any:
    """A vector, None where the config has no use for it."""
    return fake_tensor(dtype, cute.sym_int32(), align=align) if wanted else None
