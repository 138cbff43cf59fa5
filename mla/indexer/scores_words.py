"""Elements of records as words of 16-bit elements, exactly (device code).

A lane's elements of a row become the words of its fragments of mma.sync: of step s of K words 4 s
to 4 s + 3, two for each of its MMAs. In which order does not matter: keys and queries have it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from kernelkit.device import warp_mma
from kvcache.movement.reference import SCALE_BIAS
from mla.indexer.scores_config import LANE_WORDS

DTYPES = {"e2m1": "bf16", "e4m3": "fp16", "bf16": "bf16"}  # that hold every number of a record
SIGNS, MAGNITUDES = 0x80008000, 0x01C001C0  # of two e2m1 in the places of bf16
# e2m1 of exponent bits e is 2^(e - 1) and above, bf16 of the same bits 2^(e - 127), also where e is
# 0 and the number subnormal: a factor of 2^126. With the scale it is in range up to this code, 2^1.
REBIAS, LARGEST_CODE = 126, 128
BF16_MANTISSA = 7
NAN_BITS, NAN_CODE = 0x7FC0, 0xFF


@cute.jit
def words_of(raw: cute.Tensor, scale: Uint32, element: cutlass.Constexpr[str]) -> cute.Tensor:
    """Words of a lane's elements of a row, as they were loaded. scale: exponent byte of e2m1, not
    looked at otherwise."""
    words = cute.make_rmem_tensor(LANE_WORDS, Uint32)
    if cutlass.const_expr(element == "bf16"):
        words.store(raw.load())
    elif cutlass.const_expr(element == "e4m3"):
        for index in cutlass.range_constexpr(LANE_WORDS // 2):
            pair = warp_mma.widen(raw[index], DTYPES[element])
            words[2 * index], words[2 * index + 1] = pair
    else:
        factor = twice((cutlass.min(scale, Uint32(LARGEST_CODE)) + REBIAS) << BF16_MANTISSA)
        for index in cutlass.range_constexpr(LANE_WORDS):
            words[index] = times(e2m1_pair(raw[index // 4], index % 4), factor)
        if scale > LARGEST_CODE:  # hardly ever
            bits = (scale - (LARGEST_CODE - SCALE_BIAS)) << BF16_MANTISSA
            factor = twice(Uint32(NAN_BITS) if scale == NAN_CODE else bits)
            for index in cutlass.range_constexpr(LANE_WORDS):
                words[index] = times(words[index], factor)
    return words


@cute.jit
def e2m1_pair(word: Uint32, index: cutlass.Constexpr[int]) -> Uint32:
    """Elements `index` and `index` + 4 of the eight of a word, 2^-126 times what they are."""
    signs, magnitudes = word << (12 - 4 * index), word
    if cutlass.const_expr(index < 2):
        magnitudes = word << (6 - 4 * index)
    else:
        magnitudes = word >> (4 * index - 6)
    return (signs & Uint32(SIGNS)) | (magnitudes & Uint32(MAGNITUDES))


@cute.jit
def twice(bits: Uint32) -> Uint32:
    """A bf16 in both halves of a word."""
    return bits | (bits << 16)


@cute.jit
def times(x: Uint32, y: Uint32) -> Uint32:
    """Two products of bf16. No operand may be an immediate."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[x, y]
    )
