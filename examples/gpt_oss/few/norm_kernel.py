"""RMSNorm of rows of the residual stream, after a sum if there is one (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from examples.gpt_oss.few.config import LANE_ELEMENTS, VECTOR_BYTES, NormConfig, NormParams
from examples.gpt_oss.few.product_kernel import WORDS, added, four_words
from kernelkit.device.dependent import follow
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.warp_mma import pack
from kernelkit.device.words import float_of, four_words_if, two_of_bf16, vector_at
from kernelkit.plan.hw import WARP_THREADS


class Norm(TableKernel):
    """The kernel of one NormConfig; table: `NormParams`."""

    config: NormConfig
    pdl = True

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A CTA has a row."""
        config, params = self.config, table.unpack(NormParams)
        row, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        warps = config.threads // WARP_THREADS
        sSums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(warps), 16)
        vectors = config.columns // LANE_ELEMENTS
        begin = Int64(row) * (2 * config.columns)
        scales = []
        for index in cutlass.range_constexpr(config.vectors):
            vector = thread + index * config.threads
            place = cutlass.min(vector, vectors - 1) * VECTOR_BYTES
            scales.append(four_words(params.norm.weight + Int64(place)))
        follow()
        squares, loaded = Float32(0.0), []
        for index in cutlass.range_constexpr(config.vectors):
            vector = thread + index * config.threads
            words = self.load(params, begin, vector)
            for word in cutlass.range_constexpr(WORDS):
                low, high = two_of_bf16(words[word])
                squares = squares + low * low + high * high
            loaded.append(words)
        factor = self.factor(params, sSums, squares, thread)
        for index in cutlass.range_constexpr(config.vectors):
            vector = thread + index * config.threads
            if vector < vectors:
                target = vector_at(params.out + begin + Int64(vector) * VECTOR_BYTES, Uint32, WORDS)
                for word in cutlass.range_constexpr(WORDS):
                    low, high = two_of_bf16(loaded[index][word])
                    scale_low, scale_high = two_of_bf16(scales[index][word])
                    both = low * factor * scale_low, high * factor * scale_high
                    target[word] = pack(*both, "bf16")

    @cute.jit
    def load(self, params: NormParams, begin: Int64, vector: Int32) -> tuple[Uint32, ...]:
        """Return a vector of the stream, after the sum; zeros past the row."""
        config = self.config
        is_there = vector < config.columns // LANE_ELEMENTS
        place = begin + Int64(vector) * VECTOR_BYTES
        words = four_words_if(is_there, params.x + place)
        if cutlass.const_expr(config.adds):
            more = four_words_if(is_there, params.more + place)
            words = tuple(added(*both) for both in zip(words, more, strict=True))
            if is_there:
                target = vector_at(params.summed + place, Uint32, WORDS)
                for word in cutlass.range_constexpr(WORDS):
                    target[word] = words[word]
        return words

    @cute.jit
    def factor(
        self, params: NormParams, sSums: cute.Tensor, squares: Float32, thread: Int32
    ) -> Float32:
        """Return the factor of RMSNorm; squares: a thread's sum."""
        config = self.config
        for step in (16, 8, 4, 2, 1):
            squares = squares + cute.arch.shuffle_sync_bfly(squares, step)
        if thread % WARP_THREADS == 0:
            sSums[thread // WARP_THREADS] = squares
        cute.arch.sync_threads()
        total = Float32(0.0)
        for warp in cutlass.range_constexpr(config.threads // WARP_THREADS):
            total = total + sSums[warp]
        eps = float_of(Uint32(params.norm.eps_bits))
        return cute.math.rsqrt(total * (1.0 / config.columns) + eps)


def host_function(config: NormConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Norm(config).with_table(NormParams)
