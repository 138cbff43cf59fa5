"""Operands of a block-scaled MMA times their scale factors, as a routine.

The elements have codes of 8 bits, or of 4 bits, two to a byte. A table maps a byte and the code of
a scale factor to the product. `machine.scale_factors` computes it and fills the frame.
"""

from __future__ import annotations

from ptxemu.native.routines import p_i64, p_u8, p_u32, p_u64, routine

_QUARTER, _LANES = 32, 128  # of tensor memory
# Words of a frame. What is written; shared memory, and which of its 8-byte words the operand is.
OUT, SMEM, INDEX = range(3)
# Rows, the number of the first one among those that have scale factors, words of a row and of a
# block; elements of a byte.
ROWS, FIRST, WORDS, BLOCK, PACKED = range(3, 8)
# The cells of tensor memory from the first column of scale factors on, the byte of the first one,
# the parts that rows come in, and rows of a part.
CELLS, BYTE, PARTS, PER_PART = range(8, 12)
TABLE = 12  # of 256 bytes for each of the codes of scale factors
LARGE = 13  # codes of which this routine knows nothing, a byte each
FRAME = 14


@routine
def scaled_operand(address: int) -> int:
    """Return 0, or 1 if Python has to check: copies of scale factors differ, or one is large."""
    frame = p_i64(address)
    index, out, packed = p_i64(frame[INDEX]), frame[OUT], frame[PACKED]
    words, block, byte = frame[WORDS], frame[BLOCK], frame[BYTE]
    parts, per_part, first = frame[PARTS], frame[PER_PART], frame[FIRST]
    for row in range(frame[ROWS]):
        part = (row + first) // per_part
        within = row + first - part * per_part
        lane = (within >> 5) * _LANES + part * (_LANES // parts) + (within & 31)
        factors = p_u32(frame[CELLS])[lane]
        for copy in range(1, 4 // parts):
            if p_u32(frame[CELLS])[lane + copy * _QUARTER] != factors:
                return 1
        for word in range(words):
            code = (factors >> (8 * (byte + word // block))) & 255
            if p_u8(frame[LARGE])[code] != 0:
                return 1
            place = row * words + word
            value = p_i64(frame[SMEM])[index[place]]
            for k in range(8):
                entry = code << 8 | (value >> (8 * k)) & 255
                if packed == 2:
                    p_u64(out)[8 * place + k] = p_u64(frame[TABLE])[entry]
                else:
                    p_u32(out)[8 * place + k] = p_u32(frame[TABLE])[entry]
    return 0
