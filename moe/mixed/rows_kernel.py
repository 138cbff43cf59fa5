"""Copy rows of tokens to the order of experts, as they are or in e4m3 (device code).

A CTA reads a token once, whatever the number of its slots. In e4m3 each row has a scale.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float8E4M3FN, Float32, Int32
from cutlass.memory import SmemAllocator

from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
from kernelkit.plan import hw
from moe.formats import E4M3_LARGEST
from moe.mixed.config import ROW_THREADS, RowsConfig
from moe.mixed.shared.args import X_TYPES
from moe.shared.quantise import largest_magnitude

MOST = 2.0**126  # largest scale: its inverse is not subnormal
WARPS = ROW_THREADS // hw.WARP_THREADS


class Rows:
    """Host function and kernel."""

    def __init__(self, config: RowsConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        scale: cute.Tensor | None,
        row_of_slot: cute.Tensor | None,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            x: [T, K] in bf16.
            out: [rows, K].
            scale: fp32 [rows], which decodes e4m3.
            row_of_slot: int32 [T, slots], -1 for a slot without a row; None: each token is a row.
        """
        self.kernel(x, out, scale, row_of_slot).launch(
            grid=(x.shape[0], 1, 1), block=(ROW_THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        scale: cute.Tensor | None,
        row_of_slot: cute.Tensor | None,
    ) -> None:
        """Grid (tokens,); see `__call__`."""
        follow()
        token, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        slots = Int32(1)
        if cutlass.const_expr(row_of_slot is not None):
            slots = row_of_slot.shape[1]
        vectors, encode = x.shape[1] // self.config.vector, Float32(1.0)
        if cutlass.const_expr(scale is not None):
            encode = self.scale_of(x, token, vectors)
        for vector in cutlass.range(thread, vectors, ROW_THREADS, unroll=self.config.unroll):
            written = self.read(x, token, vector)
            if cutlass.const_expr(scale is not None):
                written = self.rounded(written, encode)
            for slot in cutlass.range(slots, unroll=1):
                row = self.row(row_of_slot, token, slot)
                if row >= 0:
                    cute.autovec_copy(written, self.part(out, row, vector))
        if cutlass.const_expr(scale is not None):
            for slot in cutlass.range(thread, slots, ROW_THREADS, unroll=1):
                row = self.row(row_of_slot, token, slot)
                if row >= 0:
                    scale[row] = Float32(1.0) / encode

    @cute.jit
    def row(self, row_of_slot: cute.Tensor | None, token: Int32, slot: Int32) -> Int32:
        """Return the row of a slot of the token."""
        row = token
        if cutlass.const_expr(row_of_slot is not None):
            row = row_of_slot[token, slot]
        return row

    def part(self, rows: cute.Tensor, row: Int32, vector: Int32) -> cute.Tensor:
        """Return one vector of one of the rows."""
        return cute.local_tile(rows[row, None], (self.config.vector,), (vector,))

    @cute.jit
    def read(self, x: cute.Tensor, token: Int32, vector: Int32) -> cute.Tensor:
        """Load a vector of bf16."""
        loaded = cute.make_rmem_tensor(self.config.vector, BFloat16)
        cute.autovec_copy(self.part(x, token, vector), loaded)
        return loaded

    @cute.jit
    def rounded(self, values: cute.Tensor, encode: Float32) -> cute.Tensor:
        """Multiply by `encode`, and round to e4m3."""
        scaled = cute.make_rmem_tensor(self.config.vector, Float32)
        scaled.store(values.load().to(Float32) * encode)
        rounded = cute.make_rmem_tensor(self.config.vector, Float8E4M3FN)
        rounded.store(scaled.load().to(Float8E4M3FN))
        return rounded

    @cute.jit
    def scale_of(self, x: cute.Tensor, token: Int32, vectors: Int32) -> Float32:
        """Return the factor that scales the largest magnitude of a token to the largest e4m3."""
        thread, _, _ = cute.arch.thread_idx()
        top, encode = Float32(0.0), Float32(1.0)
        for vector in cutlass.range(thread, vectors, ROW_THREADS, unroll=1):
            values = cute.make_rmem_tensor(self.config.vector, Float32)
            values.store(self.read(x, token, vector).load().to(Float32))
            top = cute.arch.fmax(top, largest_magnitude(values), nan=True)
        top = self.largest(top)
        if top > 0.0:
            encode = cute.arch.fmin(Float32(E4M3_LARGEST) / top, Float32(MOST))
        return encode

    @cute.jit
    def largest(self, top: Float32) -> Float32:
        """Return the largest value of all threads. A NaN in one thread makes it NaN."""
        for distance in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(top, offset=1 << distance)
            top = cute.arch.fmax(top, other, nan=True)
        of_warps = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS))
        own = cute.arch.warp_idx()  # a shuffle: not inside a branch
        if cute.arch.lane_idx() == 0:
            of_warps[own] = top
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(WARPS):
            top = cute.arch.fmax(top, of_warps[warp], nan=True)
        return top


def host_function(config: RowsConfig, _arch: str) -> tuple:
    """Return the host function to compile, and example arguments."""
    k = cute.sym_int32(divisibility=config.vector)
    x = fake_tensor(BFloat16, cute.sym_int32(), k, align=hw.TMA_ALIGN_BYTES)
    rows = cute.sym_int32()
    out = fake_tensor(X_TYPES[config.out], rows, k, align=hw.TMA_ALIGN_BYTES)
    scale = fake_tensor(Float32, rows) if config.out == "e4m3" else None
    shape = cute.sym_int32(), cute.sym_int32()
    row_of_slot = fake_tensor(Int32, *shape) if config.by_expert else None
    return Rows(config), x, out, scale, row_of_slot, CUstream(0)
