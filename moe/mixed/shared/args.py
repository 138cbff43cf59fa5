"""Bundles that travel between a kernel and its roles, and fake tensors of a host function."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Uint8

from kernelkit.device.boxes import TmaTensor
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.mixed.config import MixedConfig
from moe.sm100.args import Numbers

X_TYPES = {"bf16": BFloat16, "e4m3": Float8E4M3FN}
OUT_TYPES = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN}


@dataclass(frozen=True)
class Tensors:
    """weights: uint8 [E, bytes], as `fragments.py` has them. factor: fp32, of the products of an
    expert [E], of its gate and of its up, [E, 2], or of each of its rows of weights, [E, rows].
    offsets: int32 [E + 1]. out: [rows, columns]. bias: fp32 [E, rows of weights]. rows: int32
    [rows], the slot that each row is of, where x is gathered. x_scale: fp32, of all rows of x or of
    each; out_scale: fp32 [1], what outputs are multiplied by before they are rounded to e4m3."""

    weights: cute.Tensor
    factor: cute.Tensor
    offsets: cute.Tensor
    out: cute.Tensor
    bias: cute.Tensor | None = None
    rows: cute.Tensor | None = None
    x_scale: cute.Tensor | None = None
    out_scale: cute.Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """units: of K; tall: times 64 rows of weights of an expert; experts; n_tiles of an expert;
    slots: of a token."""

    units: Int32
    tall: Int32
    experts: Int32
    n_tiles: Int32
    slots: Int32


@dataclass(frozen=True)
class Share:
    """Of K, that a CTA multiplies. rank: of the CTA among those that share a tile; first, units: of
    its units of K."""

    rank: Int32
    first: Int32
    units: Int32


@dataclass(frozen=True)
class Scope:
    """What every role of a CTA may reach."""

    x: TmaTensor | cute.Tensor  # [tokens, K] where it is gathered
    tensors: Tensors
    numbers: Numbers
    sizes: Sizes
    share: Share
    buffers: Any  # `Buffers` and `Pipes` of the architecture
    pipes: Any


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
