"""Elements of four bits to e4m3, as wgmma has them in registers (device code).

A word has eight elements of a row of weights that share a scale factor, see `fragments.py`. Their
magnitudes are selectors of prmt among the eight bytes that magnitudes become with that factor:
2^6 of what they mean, less by as many powers of two as the block is below the row's largest.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.shared_words import load
from kernelkit.device.warp_mma import pick
from moe.mixed.fragments import WORDS

# 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^6; a power of two less is 8 less of every byte but of 0.
LOW, HIGH = 0x6C686000, 0x7C787470
LOW_STEP, HIGH_STEP = 0x08080800, 0x08080808
SELECTORS, SIGNS = 0x77777777, 0x80808080
ONE = 0x4440  # selector of prmt: a byte alone


@cute.jit
def make_words(address: Int32, scales: Int32, result: cute.Tensor) -> None:
    """A unit's words at the shared `address`, and scale factors at `scales`, to the A operand of
    its two MMAs: 8 words of four e4m3."""
    words, below = load(address, Uint32, WORDS), load(scales, Uint32)
    for number in cutlass.range_constexpr(WORDS):
        step, row = number // 2, number % 2  # MMA, and row g or g + 8
        power = pick(below, Uint32(0), Int32(ONE | 2 * row + step))
        low = Uint32(LOW) - power * Uint32(LOW_STEP)
        high = Uint32(HIGH) - power * Uint32(HIGH_STEP)
        word = words[number]
        selector = word & Uint32(SELECTORS)
        first = pick(low, high, Int32(selector))
        second = pick(low, high, Int32(selector >> 16))
        result[4 * step + row] = first | (word & Uint32(SIGNS))
        result[4 * step + 2 + row] = second | (word << 4 & Uint32(SIGNS))
