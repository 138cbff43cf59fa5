"""From bytes in shared memory to the A operand of wgmma in registers (device code).

Lane 4 g + t of a warp has two rows of each 16 columns, g and g + 8 of the warp's sixteen. Of each
row it has the columns 2 t, 2 t + 1 and 2 t + 8, 2 t + 9. Both are neighbours in either layout, at
an even address. So two bytes are loaded at a time, without bank conflicts. Each weight d q is
rounded once:

    fp16  1024 + 128 + q by its bits, less 1152, exact; times d
    bf16  32768 + 128 + q as fp32 by its bits, times d, less 32896 d, exact in one fused
          multiply-add, since 32896 d has 20 bits; rounded to bf16
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device.warp_mma import pick
from q8_0.blocks import BLOCK, BLOCK_BYTES, SCALE_BYTES
from q8_0.numbers.config import STEP_BLOCKS, UNIT
from q8_0.numbers.plan import LINE, NumbersPlan
from q8_0.numbers.scope import Scope, load_half, load_word

MMA_K = 16
GROUPS = UNIT // MMA_K  # wgmmas of a unit
GROUPS_OF_BLOCK = BLOCK // MMA_K
BLOCKS_OF_UNIT = UNIT // BLOCK
BASE = 0x64806480  # 1152 in fp16, twice
FP16 = (
    "{ .reg .b32 t, base; prmt.b32 t, {$r0}, 0, 0x4140; xor.b32 t, t, 0x64806480; "
    "mov.b32 base, {$r2}; sub.rn.f16x2 t, t, base; mul.rn.f16x2 {$w0}, t, {$r1}; }"
)
BF16 = (
    "{ .reg .b32 u, m; .reg .f32 a, b; xor.b32 u, {$r0}, 0x8080; "
    "prmt.b32 m, u, 0x47000000, 0x7504; mov.b32 a, m; "
    "prmt.b32 m, u, 0x47000000, 0x7514; mov.b32 b, m; "
    "fma.rn.f32 a, a, {$r1}, {$r2}; fma.rn.f32 b, b, {$r1}, {$r2}; "
    "cvt.rn.bf16x2.f32 {$w0}, b, a; }"
)
OFFSET = -32896.0


@dataclass(frozen=True)
class Places:
    """Shared addresses of a lane's first row in a step: quants or blocks, and scales."""

    quants: Int32
    scales: Int32


class Weights:
    """Conversion of the rows of a warpgroup."""

    def __init__(self, plan: NumbersPlan) -> None:
        self.config, self.plan = plan.config, plan
        row = plan.config.row_bytes if plan.config.interleaved else LINE
        self.below = 8 * row  # bytes to row g + 8

    @cute.jit
    def places(self, scope: Scope) -> Places:
        """Return a lane's addresses in the first stage."""
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        row, column = thread // 32 * MMA_K + lane // 4, lane % 4 * 2
        base = scope.w_buffer.toint()
        if cutlass.const_expr(self.config.interleaved):
            first = base + row * self.config.row_bytes
            return Places(first + SCALE_BYTES + column, first)
        return Places(
            base + row * LINE + lane // 4 * 16 + column,
            scope.scales + row * self.config.row_bytes,
        )

    @cute.jit
    def places_of(self, places: Places, stage: Int32, half: Int32) -> Places:
        """Return the addresses in a step, of 'interleaved' half 0 or 1 of a stage."""
        moved = stage * self.plan.w_bytes
        if cutlass.const_expr(self.config.interleaved):
            moved = moved + half * (STEP_BLOCKS * BLOCK_BYTES)
            return Places(places.quants + moved, places.scales + moved)
        scales = stage * self.plan.scales_bytes
        return Places(places.quants + moved, places.scales + scales)

    @cute.jit
    def make(self, places: Places, unit: cutlass.Constexpr[int], words: cute.Tensor) -> None:
        """Convert a unit of a step to the A operand of its wgmmas: `words`, four for each."""
        scales = self.scales_of(places, unit)
        for group in cutlass.range_constexpr(GROUPS):
            block = group // GROUPS_OF_BLOCK
            address, offset = self.place_of(places, unit * GROUPS + group)
            for number in cutlass.range_constexpr(4):
                row, column = number % 2, number // 2
                pair = load_half(address, offset + row * self.below + column * 8)
                words[4 * group + number] = self.rounded(pair, scales[row][block])

    def place_of(self, places: Places, group: int) -> tuple[Int32, int]:
        """Return (address, offset) of a group of 16 columns of a step."""
        if self.config.interleaved:
            block, inside = divmod(group, GROUPS_OF_BLOCK)
            return places.quants, block * BLOCK_BYTES + inside * MMA_K
        return places.quants ^ (group * 16), 0

    @cute.jit
    def scales_of(
        self, places: Places, unit: cutlass.Constexpr[int]
    ) -> list[list[tuple[Uint32 | Float32, Uint32 | Float32]]]:
        """Return the scales of both rows for each block of a unit, as `rounded` takes them."""
        found = []
        for row in cutlass.range_constexpr(2):
            of_row = []
            if cutlass.const_expr(self.config.interleaved):
                for block in cutlass.range_constexpr(BLOCKS_OF_UNIT):
                    offset = row * self.below + (unit * BLOCKS_OF_UNIT + block) * BLOCK_BYTES
                    of_row.append(self.scale(load_half(places.scales, offset), 0))
            else:
                offset = row * 8 * self.config.row_bytes + unit * BLOCKS_OF_UNIT * SCALE_BYTES
                both = load_word(places.scales, offset)
                of_row = [self.scale(both, block) for block in range(BLOCKS_OF_UNIT)]
            found.append(of_row)
        return found

    @cute.jit
    def scale(
        self, word: Uint32, half: cutlass.Constexpr[int]
    ) -> tuple[Uint32 | Float32, Uint32 | Float32]:
        """Return factor and offset for `rounded` of the scale in a half of a word."""
        if cutlass.const_expr(self.config.dtype == "fp16"):
            selector = Int32(0x3232 if half else 0x1010)
            return pick(word, word, selector), Uint32(BASE)
        name = "high" if half else "low"
        factor = cute.arch.inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            f"cvt.f32.f16 {{$w0}}, {name}; }}",
            write_only_types=[Float32],
            read_only_args=[word],
        )
        return factor, factor * Float32(OFFSET)

    @cute.jit
    def rounded(self, pair: Uint32, scale: tuple[Uint32 | Float32, Uint32 | Float32]) -> Uint32:
        """Two weights of two quants, in one word."""
        return cute.arch.inline_ptx(
            FP16 if self.config.dtype == "fp16" else BF16,
            write_only_types=[Uint32],
            read_only_args=[pair, *scale],
        )
