"""The combination: every token's weighted rows, added in the order of its choices (device code)."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from kernelkit.device.dependent import follow
from kernelkit.device.fake import fake_tensor
from moe.routing.config import COMBINE_THREADS, VECTOR_BYTES, CombineConfig

TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": Float32}


class Combine:
    """Host function and kernel of one CombineConfig."""

    def __init__(self, config: CombineConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        tensors: tuple[cute.Tensor, ...],
        weights: cute.Tensor | None,
        row_of_slot: cute.Tensor,
        columns: Int32,
        stream: CUstream,
    ) -> None:
        """Launch the kernel.

        Args:
            tensors: Y (rows, H) and the result (T, H).
            weights: fp32 (T, k).
            row_of_slot: int32 (T, k).
            columns: CTAs that share a token.
        """
        tokens, _ = row_of_slot.shape
        self.kernel(*tensors, weights, row_of_slot).launch(
            grid=(tokens, columns, 1),
            block=(COMBINE_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mY: cute.Tensor,
        mOut: cute.Tensor,
        weights: cute.Tensor | None,
        row_of_slot: cute.Tensor,
    ) -> None:
        """Grid (tokens, CTAs of a token); see `__call__`."""
        follow()
        config = self.config
        token, column, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        _, columns, _ = cute.arch.grid_dim()
        _, hidden = mY.shape
        rows, shares = [], []
        for choice in cutlass.range_constexpr(config.top_k):
            rows.append(row_of_slot[token, choice])
            if cutlass.const_expr(config.weighted):
                share = weights[token, choice]
                if cutlass.const_expr(config.partial):
                    share = share if rows[choice] >= 0 else Float32(0.0)
                shares.append(share)
        first = column * COMBINE_THREADS + thread
        step = columns * COMBINE_THREADS
        for vector in cutlass.range(first, hidden // config.vector, step, unroll=1):
            loaded = []
            for choice in cutlass.range_constexpr(config.top_k):
                loaded.append(self.read(mY, rows[choice], vector))
            acc = cute.make_rmem_tensor(config.vector, Float32)
            acc.fill(0.0)
            for choice in cutlass.range_constexpr(config.top_k):
                y = loaded[choice].load().to(Float32)
                for element in cutlass.range_constexpr(config.vector):
                    if cutlass.const_expr(config.weighted):
                        # Explicit, so that every architecture rounds alike.
                        acc[element] = cute.math.fma(y[element], shares[choice], acc[element])
                    else:
                        acc[element] += y[element]
            out = cute.make_rmem_tensor(config.vector, TYPES[config.out_dtype])
            out.store(acc.load().to(TYPES[config.out_dtype]))
            gOut = cute.local_tile(mOut[token, None], (config.vector,), (vector,))
            cute.autovec_copy(out, gOut)

    @cute.jit
    def read(self, mY: cute.Tensor, row: Int32, vector: Int32) -> cute.Tensor:
        """Load a vector of a row of Y into registers; zeros if there is no row."""
        config = self.config
        registers = cute.make_rmem_tensor(config.vector, TYPES[config.dtype])
        if cutlass.const_expr(config.partial):
            registers.fill(0.0)
            if row >= 0:
                cute.autovec_copy(self.vector_of(mY, row, vector), registers)
        else:
            cute.autovec_copy(self.vector_of(mY, row, vector), registers)
        return registers

    @cute.jit
    def vector_of(self, mY: cute.Tensor, row: Int32, vector: Int32) -> cute.Tensor:
        """Return a vector of a row of Y, in memory."""
        return cute.local_tile(mY[row, None], (self.config.vector,), (vector,))


def host_function(config: CombineConfig, _arch: str) -> tuple:
    """Return the host function to compile for `config`, and example arguments."""
    rows, tokens = cute.sym_int32(), cute.sym_int32()
    hidden = cute.sym_int32(divisibility=config.vector)

    def matrix(name: str, rows: Any) -> Any:
        return fake_tensor(TYPES[name], rows, hidden, align=VECTOR_BYTES)

    tensors = matrix(config.dtype, rows), matrix(config.out_dtype, tokens)
    weights = fake_tensor(Float32, tokens, config.top_k) if config.weighted else None
    table = fake_tensor(Int32, tokens, config.top_k)
    return Combine(config), tensors, weights, table, Int32(0), CUstream(0)
