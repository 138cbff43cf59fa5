"""What host functions take: fake tensors, shapes and strides dynamic."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Uint8

from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.mixed.config import MixedConfig
from moe.mixed.shared.types import OUT_TYPES, X_TYPES


def example_arguments(config: MixedConfig) -> tuple:
    """(x, tensors, numbers, sizes, ctas, stream), as `MixedGemm.__call__` takes them."""
    numbers = (Float32(1.0), Float32(0.0), Float32(0.0))
    rows, experts, one = (cute.sym_int32() for _ in range(3))
    align = hw.TMA_ALIGN_BYTES
    bias = fake_tensor(Float32, experts, cute.sym_int32()) if config.bias else None
    is_fp8 = config.x == "e4m3"
    factor = (experts, cute.sym_int32()) if is_fp8 else (cute.sym_int32(),)
    if config.pair_factor:
        factor = experts, 2
    tensors = (
        fake_tensor(Uint8, experts, cute.sym_int32(), align=align),
        fake_tensor(Float32, *factor),
        fake_tensor(Int32, cute.sym_int32()),
        fake_tensor(OUT_TYPES[config.out], rows, cute.sym_int32(), align=align),
        bias,
        fake_tensor(Int32, cute.sym_int32()) if config.gather else None,
        fake_tensor(Float32, cute.sym_int32()) if is_fp8 else None,
        fake_tensor(Float32, cute.sym_int32()) if config.out == "e4m3" else None,
    )
    element = X_TYPES[config.x]
    if config.gather:
        x = fake_tensor(element, cute.sym_int32(), cute.sym_int32(), align=align)
        return x, tensors, numbers, (Int32(1),) * 5, Int32(1), CUstream(0)
    x = fake_tensor(element, one, rows, one, cute.sym_int32(), align=align)
    return x, tensors, numbers, (Int32(1),) * 5, Int32(1), CUstream(0)
