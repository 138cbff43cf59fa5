"""Rows of bf16 to e4m3, each with a scale of its own (device code)."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.memory import SmemAllocator

from kernelkit import hw
from kernelkit.dependent import follow
from kernelkit.fake import fake_tensor
from moe.device.quantise import largest_magnitude
from moe.formats import E4M3_LARGEST
from moe.mixed.config import ROW_THREADS, ROW_VECTOR, RowsConfig

MOST = 2.0**126  # of a scale: 1 over it is no subnormal
WARPS = ROW_THREADS // hw.WARP_THREADS


class QuantiseRows:
    """Host function and kernel."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor, stream: CUstream
    ) -> None:
        """x: [T, K] in bf16; out: the same in e4m3; scale: fp32 [T], what decodes it."""
        self.kernel(x, out, scale).launch(
            grid=(x.shape[0], 1, 1), block=(ROW_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, scale: cute.Tensor) -> None:
        """Grid (rows,); see `__call__`."""
        follow()
        row, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        vectors = x.shape[1] // ROW_VECTOR
        top = Float32(0.0)
        for vector in cutlass.range(thread, vectors, ROW_THREADS, unroll=1):
            values = self.read(x, row, vector)
            top = cute.arch.fmax(top, largest_magnitude(values), nan=True)
        top = self.largest(top)
        encode = Float32(1.0)
        if top > 0.0:
            encode = cute.arch.fmin(Float32(E4M3_LARGEST) / top, Float32(MOST))
        for vector in cutlass.range(thread, vectors, ROW_THREADS, unroll=1):
            values = self.read(x, row, vector)
            rounded = cute.make_rmem_tensor(ROW_VECTOR, Float8E4M3FN)
            values.store(values.load() * encode)
            rounded.store(values.load().to(Float8E4M3FN))
            target = cute.local_tile(out[row, None], (ROW_VECTOR,), (vector,))
            cute.autovec_copy(rounded, target)
        if thread == 0:
            scale[row] = Float32(1.0) / encode

    @cute.jit
    def read(self, x: cute.Tensor, row: Int32, vector: Int32) -> cute.Tensor:
        """fp32 of a vector of a row."""
        loaded = cute.make_rmem_tensor(ROW_VECTOR, BFloat16)
        cute.autovec_copy(cute.local_tile(x[row, None], (ROW_VECTOR,), (vector,)), loaded)
        values = cute.make_rmem_tensor(ROW_VECTOR, Float32)
        values.store(loaded.load().to(Float32))
        return values

    @cute.jit
    def largest(self, top: Float32) -> Float32:
        """Of all threads; a NaN is one for all."""
        for distance in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(top, offset=1 << distance)
            top = cute.arch.fmax(top, other, nan=True)
        of_warps = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS))
        own = cute.arch.warp_idx()  # a shuffle: not behind a branch
        if cute.arch.lane_idx() == 0:
            of_warps[own] = top
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            top = cute.arch.fmax(top, of_warps[warp], nan=True)
        return top


def host_function(_config: RowsConfig, _arch: str) -> tuple:
    """What is compiled, and example arguments."""
    rows, k = cute.sym_int32(), cute.sym_int32(divisibility=ROW_VECTOR)
    x = fake_tensor(BFloat16, rows, k, align=hw.TMA_ALIGN_BYTES)
    out = fake_tensor(Float8E4M3FN, rows, k, align=hw.TMA_ALIGN_BYTES)
    return QuantiseRows(), x, out, fake_tensor(Float32, rows), CUstream(0)
