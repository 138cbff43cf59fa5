"""Q in 16 bits as two tiles of e4m3, in its own place in shared memory (device code).

A row times a power of two that brings its largest element to [128, 256) is rounded to e4m3, and so
is what is left. An element of bf16 has 8 bits and each term 4: their sum is the element, unless it
is below 2^-10 of the largest one, and then it is off by at most 2^-18 of that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fmha.sm90.barriers import meet
from fmha.sm90.plan import Plan90
from fmha.sm90.rows import Lane
from kernelkit import hw
from kernelkit.shared_words import load, store
from kernelkit.swizzle import swizzled
from kernelkit.warp_mma import numbers_of, pack_e4m3
from kernelkit.words import bits_of, float_of

UNIT = hw.SMEM_UNIT_BYTES
LANES = 2  # that share a row
LARGEST = 7  # exponent of the largest element
BIAS = 127  # of an exponent of fp32


@cute.jit
def split_q(plan: Plan90, lane: Lane, buffer: cute.Pointer) -> tuple[Float32, Float32]:
    """The warpgroup's query tile in `buffer` as two terms, the larger one first; returns what
    scores of this thread's two rows are to be multiplied by."""
    layout, head_dim = plan.layout, plan.config.head_dim
    q_bytes = buffer.toint() + lane.tile * layout.q_bytes
    own = lane_read_anew()
    row, half = lane.warp * 16 + own // LANES, own % LANES
    words = cute.make_rmem_tensor(head_dim // LANES // 2, Uint32)
    units = cute.size(words) // 4
    for unit in cutlass.range_constexpr(units):
        place = place_of(layout.panel(head_dim, 2) * 2, row, half * units + unit, layout.rows)
        found = load(q_bytes + place, Uint32, 4)
        for word in cutlass.range_constexpr(4):
            words[unit * 4 + word] = found[word]
    if cutlass.const_expr(layout.q_rows < layout.rows):
        if row >= layout.q_rows:
            words.fill(0)
    factor, power = power_of(largest_of(words))
    meet(lane)  # all of Q is in registers
    for unit in cutlass.range_constexpr(units // 2):
        first, second = two_terms(words, unit * 8, factor)
        place = place_of(layout.panel(head_dim), row, half * (units // 2) + unit, layout.rows)
        store(q_bytes + place, Uint32, first)
        store(q_bytes + layout.rows * head_dim + place, Uint32, second)
    cute.arch.fence_proxy("async.shared", space="cta")
    meet(lane)
    source = own // 4 * LANES  # a lane that read the row
    return (
        cute.arch.shuffle_sync(power, source),
        cute.arch.shuffle_sync(power, source + 8 * LANES),
    )


def place_of(line: int, row: Int32, unit: Int32, rows: int) -> Int32:
    """Byte of a tile where unit `unit` of a row begins, in panels of `line` bytes of each row."""
    offset = unit * UNIT
    return swizzled(offset // line * (rows * line) + row * line + offset % line, line)


@cute.jit
def lane_read_anew() -> Int32:
    """The number of this thread in its warp. LLVM takes this for something else each time: places
    that follow from it are computed for each block, and not kept in registers for all of them."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[cute.arch.lane_idx()],
    )


@cute.jit
def largest_of(words: cute.Tensor) -> Float32:
    """The largest magnitude of a row, half of which is in `words`, two bf16 each."""
    top = Float32(0.0)
    for word in cutlass.range_constexpr(cute.size(words)):
        for element in both(words[word]):
            top = cute.arch.fmax(top, cute.arch.fmax(element, -element))
    return cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1))


@cute.jit
def power_of(top: Float32) -> tuple[Float32, Float32]:
    """(power of two that brings `top` to [128, 256), its inverse); NaN where top is infinite."""
    exponent = Int32(bits_of(top) >> 23)
    exponent = cutlass.max(exponent, LARGEST + 1)  # so that both are normal numbers
    factor = float_of(Uint32((2 * BIAS + LARGEST - exponent) << 23))
    power = float_of(Uint32((exponent - LARGEST) << 23))
    if exponent == 2 * BIAS + 1:
        factor = Float32(float("nan"))
    return factor, power


@cute.jit
def two_terms(
    words: cute.Tensor, begin: cutlass.Constexpr, factor: Float32
) -> tuple[tuple[Uint32, ...], tuple[Uint32, ...]]:
    """Sixteen elements of words [begin, begin + 8) times `factor` as two units of e4m3."""
    first, second = [], []
    for quad in cutlass.range_constexpr(4):
        low, high = both(words[begin + 2 * quad]), both(words[begin + 2 * quad + 1])
        numbers = [element * factor for element in (*low, *high)]
        word = pack_e4m3(*numbers)
        rounded = numbers_of(word)
        rest = [number - near for number, near in zip(numbers, rounded, strict=True)]
        first.append(word)
        second.append(pack_e4m3(*rest))
    return tuple(first), tuple(second)


def both(word: Uint32) -> tuple[Float32, Float32]:
    """Two bf16 of a word."""
    return float_of(word << 16), float_of(word & Uint32(0xFFFF0000))
