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
ROW_STEP, K_STEP = 14, 15  # results between those of neighbouring rows, and of neighbours in k
FRAME = 16


@routine
def scaled_operand(address: int) -> int:
    """Return 0, or 1 if Python has to check: copies of scale factors differ, or one is large."""
    frame = p_i64(address)
    index, out, packed = p_i64(frame[INDEX]), frame[OUT], frame[PACKED]
    words, block, byte = frame[WORDS], frame[BLOCK], frame[BYTE]
    parts, per_part, first = frame[PARTS], frame[PER_PART], frame[FIRST]
    along_rows, along_k = frame[ROW_STEP], frame[K_STEP]
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
            value = p_i64(frame[SMEM])[index[row * words + word]]
            place = (row + first) * along_rows + 8 * packed * word * along_k
            for k in range(8):
                entry = packed * (code << 8 | (value >> (8 * k)) & 255)
                p_u32(out)[place] = p_u32(frame[TABLE])[entry]
                place += along_k
                if packed == 2:
                    p_u32(out)[place] = p_u32(frame[TABLE])[entry + 1]
                    place += along_k
    return 0


# Operands of an MMA without scale factors, widened to float32, as `machine.quick_mma` wants them.
#
# Elements have 8 or 16 bits. A frame describes both operands one after the other, and a line is
# what descriptors call one: a row of a K-major operand, a k of an MN-major one.

# Where float32 goes, and how many of them lie between neighbouring elements of a line and between
# lines; memory, and which of its 8-byte words the operand is; lines, words of a line.
TO, ELEMENT_STEP, LINE_STEP, FROM, PLACES, LINES, LINE_WORDS = range(7)
VALUES = 7  # float32 of each code, or 0: 16 bits of bfloat16
BITS = 8  # of a code
COLUMNS = 9  # instead of words and lines: columns of tensor memory, of which each lane is a row
OPERAND = 10  # words of a frame for each operand


@routine
def widened_operands(address: int, count: int) -> int:
    """Write float32 for so many operands."""
    for number in range(count):
        place = address + 8 * OPERAND * number
        if p_i64(place)[COLUMNS] != 0:
            _from_tensor_memory(place)
        elif p_i64(place)[BITS] == 8:
            _from_bytes(place)
        else:
            _from_halves(place)
    return 0


@routine
def _from_bytes(address: int) -> int:
    frame = p_i64(address)
    index, out, values, memory = p_i64(frame[PLACES]), frame[TO], frame[VALUES], frame[FROM]
    step, lines, words = frame[ELEMENT_STEP], frame[LINE_STEP], frame[LINE_WORDS]
    for line in range(frame[LINES]):
        for word in range(words):
            value = p_i64(memory)[index[line * words + word]]
            first = line * lines + 8 * word * step
            for k in range(8):
                code = (value >> (8 * k)) & 255
                p_u32(out)[first + k * step] = p_u32(values)[code]
    return 0


@routine
def _from_halves(address: int) -> int:
    frame = p_i64(address)
    index, out, values, memory = p_i64(frame[PLACES]), frame[TO], frame[VALUES], frame[FROM]
    step, lines, words = frame[ELEMENT_STEP], frame[LINE_STEP], frame[LINE_WORDS]
    for line in range(frame[LINES]):
        for word in range(words):
            value = p_i64(memory)[index[line * words + word]]
            first = line * lines + 4 * word * step
            for k in range(4):
                code = (value >> (16 * k)) & 65535
                if values == 0:
                    p_u32(out)[first + k * step] = code << 16
                else:
                    p_u32(out)[first + k * step] = p_u32(values)[code]
    return 0


@routine
def _from_tensor_memory(address: int) -> int:
    frame = p_i64(address)
    out, values, memory = frame[TO], frame[VALUES], frame[FROM]
    step, bits = frame[ELEMENT_STEP], frame[BITS]
    if bits == 16 and values == 0:
        return _both_halves(p_u32(out), p_u32(memory), frame[COLUMNS], step)
    for column in range(frame[COLUMNS]):
        for k in range(32 // bits):
            first = (column * (32 // bits) + k) * step
            for lane in range(_LANES):
                code = p_u32(memory)[column * _LANES + lane] >> (bits * k)
                if bits == 8:
                    p_u32(out)[first + lane] = p_u32(values)[code & 255]
                elif values == 0:
                    p_u32(out)[first + lane] = code << 16
                else:
                    p_u32(out)[first + lane] = p_u32(values)[code & 65535]
    return 0


@routine
def _both_halves(out: p_u32, memory: p_u32, columns: int, step: int) -> int:
    """Two bfloat16 of each cell."""
    for column in range(columns):
        for lane in range(_LANES):
            word = memory[column * _LANES + lane]
            out[2 * column * step + lane] = word << 16
            out[(2 * column + 1) * step + lane] = word & 0xFFFF0000
    return 0


# A box between rows of global memory and words of shared memory, as `machine.tma_tile` wants it.

# Address of the first row; bytes from it to each row; rows, 8-byte words of each; shared memory,
# and which of its words each word of the box is.
ROWS_AT, OFFSETS, BOX_ROWS, BOX_WORDS, SHARED, PLACE_OF = range(6)
BOX = 6  # words of such a frame


@routine
def load_box(address: int) -> int:
    """Write a box to shared memory."""
    frame = p_i64(address)
    offsets, index, words = p_i64(frame[OFFSETS]), p_i64(frame[PLACE_OF]), frame[BOX_WORDS]
    for row in range(frame[BOX_ROWS]):
        source = frame[ROWS_AT] + offsets[row]
        for word in range(words):
            p_u64(frame[SHARED])[index[row * words + word]] = p_u64(source)[word]
    return 0
