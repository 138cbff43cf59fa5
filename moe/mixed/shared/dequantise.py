"""Convert four-bit elements to bf16 or e4m3, in the register layout of an MMA (device code)."""

from collections.abc import Iterator

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from kernelkit.device.shared_words import load
from kernelkit.device.warp_mma import pick
from moe.mixed.config import MixedConfig
from moe.mixed.fragments import (
    DEPTH,
    ELEMENT_BYTES,
    JOINED,
    JOINED_TURN,
    LAST_TURNS,
    THREADS,
    TURNS,
    WORDS,
)
from moe.mixed.plan import ProductPlan
from moe.mixed.shared.args import Scope


def places(
    plan: ProductPlan, scope: Scope, team: Int32, stage: Int32, unit: int
) -> Iterator[tuple[Int32, Int32]]:
    """Return shared addresses of a thread's words of a unit of K, and of their scale factors, for
    each 64 rows of the warpgroup's weights."""
    thread, _, _ = cute.arch.thread_idx()
    thread = thread % THREADS
    first = scope.buffers.w.toint() + stage * plan.w_bytes
    pair_bytes = 2 * DEPTH // plan.config.format.block  # scale factors of two rows
    for part in range(plan.config.parts):
        tall = team * plan.config.parts + part
        start = first + (tall * plan.units + unit) * plan.unit_bytes
        scales = start + ELEMENT_BYTES + thread // 4 * pair_bytes
        yield start + thread * (4 * WORDS), scales


# ---- To bf16
#
# Two words hold sixteen elements, see `fragments.py`. Sign, exponent and mantissa of an e2m1 are
# moved to bf16's sign, last two exponent bits and first mantissa bit. The result is 2^-126 of the
# value, even for subnormals. One multiplication by the scale factor times 2^126 is exact.

SELECT = 0xE4  # lop3: the first operand where the third one is set, else the second
MASK = 0x81C081C0  # of bf16: sign, two bits of exponent, one of mantissa; twice
TWICE = 0x4040  # prmt selector: a byte in both halves of a word
UE5M3_BASE = (235 << 7) * 0x00010001  # exponents of factors: 127 + 126 - 10 - 8


@cute.jit
def elements_of(first: Uint32, second: Uint32) -> tuple[tuple[Uint32, ...], ...]:
    """Return the four pairs of each of two words, scaled by 2^-126: of row g, of row g + 8, and of
    both rows 8 of K further."""
    mask = Uint32(MASK)
    # The bits that both words leave over. From & and | the compiler would make two instructions.
    joined = cute.arch.inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {JOINED}, {SELECT};",
        write_only_types=[Uint32],
        read_only_args=[first, turned(second, 32 - JOINED_TURN)],
    )
    result = []
    for word in cutlass.range_constexpr(2):
        whole = first if word == 0 else second
        pairs = [turned(whole, turn) & mask for turn in TURNS]
        result.append((*pairs, turned(joined, LAST_TURNS[word]) & mask))
    return tuple(result)


@cute.jit
def turned(word: Uint32, left: cutlass.Constexpr) -> Uint32:
    """Rotate left by `left` bits. For a few bits it shifts instead: no relevant bit wraps around,
    and a shift uses another execution unit."""
    if cutlass.const_expr(left == 0):
        return word
    if cutlass.const_expr(left < 8):
        return word << Uint32(left)
    return cute.arch.inline_ptx(
        f"shf.l.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {left};",
        write_only_types=[Uint32],
        read_only_args=[word],
    )


@cute.jit
def factors_of(
    config: cutlass.Constexpr[MixedConfig], address: Int32
) -> tuple[tuple[Uint32, ...], ...]:
    """Return the factors of a unit's elements, each in both halves of a word: of the thread's first
    row for each 16 of K, and of its second row."""
    blocks = 64 // config.format.block
    words = load(address, Uint32, 2 * blocks // 4)
    words = words if isinstance(words, tuple) else (words,)
    rows = []
    for row in cutlass.range_constexpr(2):
        factors = []
        for block in cutlass.range_constexpr(blocks):
            number = row * blocks + block
            selector = TWICE | (number % 4) * 0x0101
            byte = pick(words[number // 4], Uint32(0), Int32(selector))
            if cutlass.const_expr(config.format.scale == "ue8m0"):
                factor = byte << Uint32(7)
            else:
                factor = byte * Uint32(16) + Uint32(UE5M3_BASE)
            factors += [factor] * (WORDS // blocks)
        rows.append(tuple(factors))
    return tuple(rows)


@cute.jit
def dequantise(
    words: tuple[Uint32, ...],
    factors: tuple[tuple[Uint32, ...], ...],
    result: cute.Tensor,
) -> None:
    """Convert a thread's words of a unit to the A operand of four MMAs: 16 words of two bf16."""
    for step in cutlass.range_constexpr(0, WORDS, 2):
        both = elements_of(words[step], words[step + 1])
        for word in cutlass.range_constexpr(2):
            for pair in cutlass.range_constexpr(4):
                factor = factors[pair % 2][step + word]
                result[4 * (step + word) + pair] = times(both[word][pair], factor)


@cute.jit
def times(first: Uint32, second: Uint32) -> Uint32:
    """Multiply two pairs of bf16."""
    return cute.arch.inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Uint32],
        read_only_args=[first, second],
    )


@cute.jit
def make_words(
    config: cutlass.Constexpr[MixedConfig], address: Int32, scales: Int32, result: cute.Tensor
) -> None:
    """Convert a unit's words at the shared `address`, with scale factors at `scales`, to the A
    operand of its four MMAs."""
    dequantise(load(address, Uint32, WORDS), factors_of(config, scales), result)


# ---- To e4m3
#
# A word holds eight elements of a row of weights with one scale factor, see `fragments.py`. Their
# magnitudes are prmt selectors into a table of eight bytes: the e4m3 codes of 2^6 times each
# magnitude, divided by 2^d, where the block's factor is 2^d below the largest of its row.


# 0, 0.5, 1, 1.5 and 2, 3, 4, 6 times 2^6; halving subtracts 8 from every byte except 0.
LOW, HIGH = 0x6C686000, 0x7C787470
LOW_STEP, HIGH_STEP = 0x08080800, 0x08080808
SELECTORS, SIGNS = 0x77777777, 0x80808080
ONE = 0x4440  # prmt selector: a single byte


@cute.jit
def make_words_fp8(address: Int32, scales: Int32, result: cute.Tensor) -> None:
    """Convert a unit's words at the shared `address`, with scale factors at `scales`, to the A
    operand of its two MMAs: 8 words of four e4m3."""
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
