"""The largest magnitudes of parts of a tensor, NaN if a part has one (device code).

Maxima do not depend on the order. The bits of 16-bit floats without their sign are ordered as the
numbers, NaN last, so integers are compared. The quantising kernel computes the maximum over all
parts, so no word has to be zeroed before.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.quantiser.config import VECTOR_BYTES, AmaxConfig
from moe.quantiser.kernel import TYPES
from moe.shared.quantise import largest_half


class Amax:
    """Host function and kernel of one AmaxConfig."""

    def __init__(self, config: AmaxConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        offsets: cute.Tensor | None,
        amax: cute.Tensor,
        ctas: Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            x: [T, K].
            offsets: int32 [E + 1]; rows past the last one are not read; None: all rows are read.
            amax: int32 [ctas], the bits of 16-bit floats.
            ctas: number of CTAs.
        """
        self.kernel(x, offsets, amax).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, offsets: cute.Tensor | None, amax: cute.Tensor) -> None:
        """Rows cta, cta + ctas, ... of x; see `__call__`."""
        follow()
        config = self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        smem = SmemAllocator()
        warps = config.threads // hw.WARP_THREADS
        sTop = smem.allocate_tensor(Int32, cute.make_layout(warps))
        top, rows = Uint32(0), x.shape[0]
        if cutlass.const_expr(config.bounded):
            rows = offsets[cute.size(offsets) - 1]
        for row in cutlass.range(cta, rows, ctas, unroll=1):
            top = self.of_row(x, row, thread, top)
        bits = cute.arch.warp_redux_sync(Int32(top), "max")
        if thread % hw.WARP_THREADS == 0:
            sTop[thread // hw.WARP_THREADS] = bits
        cute.arch.sync_threads()
        if thread == 0:
            for warp in cutlass.range_constexpr(1, warps):
                bits = cutlass.max(bits, sTop[warp])
            amax[cta] = bits

    @cute.jit
    def of_row(self, x: cute.Tensor, row: Int32, thread: Int32, top: Uint32) -> Uint32:
        """Return the largest of `top` and the vectors of a thread."""
        config = self.config
        vectors = x.shape[1] // config.vector
        step = config.threads * config.unrolled
        for first in cutlass.range(thread, vectors, step, unroll=1):
            values = cute.make_rmem_tensor((config.vector, config.unrolled), TYPES[config.dtype])
            values.fill(0.0)
            for index in cutlass.range_constexpr(config.unrolled):
                here = first + index * config.threads
                if here < vectors:
                    source = cute.local_tile(x[row, None], (config.vector,), (here,))
                    cute.autovec_copy(source, values[None, index])
            top = cutlass.max(top, largest_half(values))
        return top


def host_function(config: AmaxConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    tokens, k, sizes = (cute.sym_int32() for _ in range(3))
    x = fake_tensor(TYPES[config.dtype], tokens, k, align=VECTOR_BYTES)
    offsets = fake_tensor(Int32, cute.sym_int32()) if config.bounded else None
    return Amax(config), x, offsets, fake_tensor(Int32, sizes), Int32(0), CUstream(0)
