"""The largest logit of each token, in two launches: of parts of a row, and of all parts (device
code).

Of equal logits the first one counts.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from examples.gpt_oss.few.config import LANE_ELEMENTS, VECTOR_BYTES, ArgmaxConfig, ArgmaxParams
from examples.gpt_oss.few.product_kernel import WORDS, four_words
from kernelkit.device.dependent import follow
from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import two_of_bf16, vector_at
from kernelkit.plan.hw import WARP_THREADS

NOBODY = (1 << 31) - 1  # index of no logit


class Argmax(TableKernel):
    """The kernel of one ArgmaxConfig; table: `ArgmaxParams`."""

    config: ArgmaxConfig
    pdl = True

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A CTA has a part of a row, or all parts of one."""
        config, params = self.config, table.unpack(ArgmaxParams)
        cta, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        follow()
        if cutlass.const_expr(config.final):
            best, index = self.of_parts(params, cta, thread)
        else:
            best, index = self.of_logits(params, cta, thread)
        best, index = over_warp(best, index)
        warps = config.threads // WARP_THREADS
        smem = SmemAllocator()
        sBest = smem.allocate_tensor(Float32, cute.make_layout(warps), VECTOR_BYTES)
        sIndex = smem.allocate_tensor(Int32, cute.make_layout(warps), VECTOR_BYTES)
        if thread % WARP_THREADS == 0:
            sBest[thread // WARP_THREADS] = best
            sIndex[thread // WARP_THREADS] = index
        cute.arch.sync_threads()
        if thread == 0:
            for warp in cutlass.range_constexpr(1, warps):
                best, index = larger(best, index, sBest[warp], sIndex[warp])
            if cutlass.const_expr(config.final):
                vector_at(params.ids + Int64(cta) * 8, Int64, 1)[0] = Int64(index)
            else:
                vector_at(params.best + Int64(cta) * 4, Float32, 1)[0] = best
                vector_at(params.index + Int64(cta) * 4, Int32, 1)[0] = index

    @cute.jit
    def of_logits(self, params: ArgmaxParams, cta: Int32, thread: Int32) -> tuple[Float32, Int32]:
        """Return the largest logit of a thread, and its index."""
        parts, vectors = Int32(params.parts), Int32(params.vectors)
        row, part = cta // parts, cta % parts
        begin = params.logits + Int64(row) * params.vectors * VECTOR_BYTES
        best, index = -Float32.inf, Int32(NOBODY)
        step = parts * self.config.threads
        for vector in cutlass.range(part * self.config.threads + thread, vectors, step, unroll=2):
            words = four_words(begin + Int64(vector) * VECTOR_BYTES)
            for word in cutlass.range_constexpr(WORDS):
                both = two_of_bf16(words[word])
                for half in cutlass.range_constexpr(2):
                    place = vector * LANE_ELEMENTS + 2 * word + half
                    best, index = larger(best, index, both[half], place)
        return best, index

    @cute.jit
    def of_parts(self, params: ArgmaxParams, cta: Int32, thread: Int32) -> tuple[Float32, Int32]:
        """Return the largest logit of the parts of a thread, and its index."""
        parts = Int32(params.parts)
        best, index = -Float32.inf, Int32(NOBODY)
        for part in cutlass.range(thread, parts, self.config.threads, unroll=1):
            place = Int64(cta * parts + part) * 4
            value = vector_at(params.best + place, Float32, 1)[0]
            best, index = larger(best, index, value, vector_at(params.index + place, Int32, 1)[0])
        return best, index


@cute.jit
def larger(
    best: Float32, index: Int32, other: Float32, other_index: Int32
) -> tuple[Float32, Int32]:
    """Return the larger of two logits, of equal ones the first, and its index."""
    wins = other > best or (other == best and other_index < index)
    return other if wins else best, other_index if wins else index


@cute.jit
def over_warp(best: Float32, index: Int32) -> tuple[Float32, Int32]:
    """Return the largest logit of a warp, and its index, in all lanes."""
    for step in (16, 8, 4, 2, 1):
        other = cute.arch.shuffle_sync_bfly(best, step)
        best, index = larger(best, index, other, cute.arch.shuffle_sync_bfly(index, step))
    return best, index


def host_function(config: ArgmaxConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Argmax(config).with_table(ArgmaxParams)
