"""Bundles that travel between the kernel and its roles, and fake tensors of its host function."""

from dataclasses import dataclass

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, Uint8

from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.kernel_arguments import FewKernelArguments, FewSizes, FewTensors, Numbers
from moe.mixed.few.config import FewConfig


@dataclass(frozen=True)
class Buffers:
    """Shared memory of the CTA."""

    ring: cute.Pointer
    rows: cute.Pointer
    sums: cute.Pointer
    barriers: cute.Pointer
    slots: cute.Tensor  # int32 [item * ITEM_ROWS + row]
    items: cute.Tensor  # int32: expert, and the number of rows above 16 bits
    counts: cute.Tensor  # int32 [expert]: rows, later the first item
    words: cute.Tensor  # int32: number of items; a message between warps that finish


@dataclass(frozen=True)
class Share:
    """Groups of a product that this CTA computes, and where the first one is."""

    first: Int32
    end: Int32
    item: Int32
    tall: Int32  # index of the 64 rows


@dataclass(frozen=True)
class Scope:
    """Everything that the roles of a CTA use."""

    tensors: FewTensors
    numbers: Numbers
    sizes: FewSizes
    buffers: Buffers
    items: Int32  # number of items


def example_arguments(config: FewConfig) -> tuple[FewKernelArguments, CUstream]:
    """Return the arguments that the host function is compiled for."""
    experts, tokens, rows, slots = (cute.sym_int32() for _ in range(4))
    align = hw.TMA_ALIGN_BYTES

    def bias(there: bool) -> object:
        return fake_tensor(Float32, experts, cute.sym_int32()) if there else None

    def matrix(dtype: type, rows: cute.SymInt) -> object:
        return fake_tensor(dtype, rows, cute.sym_int32(divisibility=8), align=align)

    tensors = FewTensors(
        x=matrix(BFloat16, tokens),
        w13=fake_tensor(Uint8, experts, cute.sym_int32(), align=align),
        w2=fake_tensor(Uint8, experts, cute.sym_int32(), align=align),
        factor13=fake_tensor(Float32, experts, *((2,) if config.pair_factor else ())),
        factor2=fake_tensor(Float32, experts),
        ids=fake_tensor(Int32, slots),
        weights=fake_tensor(Float32, slots),
        h=matrix(BFloat16, rows),
        y=matrix(Float32, rows),
        out=matrix(BFloat16, tokens),
        counts=fake_tensor(Int32, cute.sym_int32()),
        bias13=bias(config.bias13),
        bias2=bias(config.bias2),
    )
    names = ("tall13", "tall2", "first_expert", "experts", "inner")
    given = FewKernelArguments(
        tensors=tensors,
        numbers=Numbers(alpha=Float32(1.0), beta=Float32(0.0), limit=Float32(0.0)),
        sizes=FewSizes(**dict.fromkeys(names, Int32(1))),
        ctas=Int32(1),
    )
    return given, CUstream(0)
