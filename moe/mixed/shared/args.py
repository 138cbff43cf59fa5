"""Bundles that travel between a kernel and its roles, and fake tensors of a host function."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Uint8

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.kernel_arguments import MixedKernelArguments, MixedTensors, Numbers, Sizes
from moe.mixed.config import MixedConfig

X_TYPES = {"bf16": BFloat16, "e4m3": Float8E4M3FN}
OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN}


@dataclass(frozen=True)
class Share:
    """Part of K that a CTA multiplies."""

    rank: Int32  # of the CTA among those that share a tile
    first: Int32  # its first unit of K
    units: Int32  # its number of units of K


@dataclass(frozen=True)
class Scope:
    """Everything that the roles of a CTA use."""

    x: TmaTensor | cute.Tensor  # [tokens, K] if it is gathered
    tensors: MixedTensors
    numbers: Numbers
    sizes: Sizes
    share: Share
    buffers: Any  # `Buffers` and `Pipes` of the architecture
    pipes: Any


def example_arguments(config: MixedConfig) -> tuple[MixedKernelArguments, CUstream]:
    """Return the arguments that `Product.__call__` is compiled for."""
    rows, experts, one = (cute.sym_int32() for _ in range(3))
    align = hw.TMA_ALIGN_BYTES
    bias = fake_tensor(Float32, experts, cute.sym_int32()) if config.bias else None
    is_fp8, element = config.x == "e4m3", X_TYPES[config.x]
    factor = (experts, cute.sym_int32()) if is_fp8 else (cute.sym_int32(),)
    if config.pair_factor:
        factor = experts, 2
    tensors = MixedTensors(
        weights=fake_tensor(Uint8, experts, cute.sym_int32(), align=align),
        factor=fake_tensor(Float32, *factor),
        offsets=fake_tensor(Int32, cute.sym_int32()),
        out=fake_tensor(OUT_TYPES[config.out], rows, cute.sym_int32(), align=align),
        bias=bias,
        rows=fake_tensor(Int32, cute.sym_int32()) if config.gather else None,
        x_scale=fake_tensor(Float32, cute.sym_int32()) if is_fp8 else None,
        out_scale=fake_tensor(Float32, cute.sym_int32()) if config.out == "e4m3" else None,
    )
    shape = (cute.sym_int32(),) if config.gather else (one, rows, one)
    given = MixedKernelArguments(
        x=fake_tensor(element, *shape, cute.sym_int32(), align=align),
        tensors=tensors,
        numbers=Numbers(alpha=Float32(1.0), beta=Float32(0.0), limit=Float32(0.0)),
        sizes=Sizes(**dict.fromkeys(("units", "tall", "experts", "n_tiles", "slots"), Int32(1))),
        ctas=Int32(1),
    )
    return given, CUstream(0)
