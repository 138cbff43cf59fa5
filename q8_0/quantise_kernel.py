"""Activations to int8 in blocks of 32 (device code), bit for bit `reference.quantise`."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import float_of, vector_at
from q8_0.blocks import SCALE_BYTES
from q8_0.config import VECTOR_BYTES, QuantiseConfig
from q8_0.device import load_words, numbers_of
from q8_0.params import QuantiseParams

# The scale in fp16 and its inverse, 0 where the scale is 0; `.rn` keeps ptxas honest.
SCALE = (
    "{ .reg .b16 s; .reg .f32 d, i; .reg .pred zero; "
    "div.rn.f32 d, {$r0}, 0f42FE0000; cvt.rn.f16.f32 s, d; cvt.f32.f16 d, s; "
    "setp.eq.f32 zero, d, 0f00000000; rcp.rn.f32 i, d; selp.f32 {$w1}, 0f00000000, i, zero; "
    "cvt.u32.u16 {$w0}, s; }"
)
# Four numbers times the inverse scale, rounded to the nearest integer, ties to even, and clamped to
# -127 .. 127. NaN becomes 0: if the scale is infinite or NaN, the product is NaN or 0. The four
# bytes form a word, the first one lowest.
QUANTS = "{ .reg .f32 v; .reg .b32 q<4>; " + "".join(
    f"mul.rn.f32 v, {{$r{k}}}, {{$r4}}; cvt.rni.s32.f32 q{k}, v; min.s32 q{k}, q{k}, 127; "
    f"max.s32 q{k}, q{k}, -127; "
    for k in range(4)
)
QUANTS += (
    "prmt.b32 q0, q0, q1, 0x0040; prmt.b32 q2, q2, q3, 0x0040; prmt.b32 {$w0}, q0, q2, 0x5410; }"
)
MAGNITUDE = 0x7FFFFFFF  # bits of fp32 but the sign


class Quantise(TableKernel):
    """The kernel of one QuantiseConfig; table: `QuantiseParams`."""

    config: QuantiseConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A CTA has `config.tile` columns of a token."""
        config, params = self.config, table.unpack(QuantiseParams)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        token = Int32(Uint32(cta) // Uint32(params.tiles))
        piece = (cta - token * Int32(params.tiles)) * config.threads + thread
        exists = piece < Int32(params.cols) // config.piece
        source = params.x + Int64(token) * params.x_stride + Int64(piece) * VECTOR_BYTES
        numbers = numbers_of(load_words(source, 1, exists), config.dtype)
        scale, inverse = self.scale_of(numbers)
        place = Int64(token) * params.cols + Int64(piece) * config.piece
        self.store(params, numbers, inverse, place, exists)
        if exists and piece % config.lanes == 0:
            block = (Int64(token) * params.cols // config.piece + piece) // config.lanes
            gScale = vector_at(params.scales + block * SCALE_BYTES, Uint16, 1)
            gScale[0] = Uint16(scale)

    @cute.jit
    def scale_of(self, numbers: list[Float32]) -> tuple[Uint32, Float32]:
        """The fp16 bits of a block's scale, and its inverse, by all lanes that share the block."""
        top = Int32(0)
        for number in numbers:
            # Without their sign bits are in the order of the numbers, NaN last.
            top = cutlass.max(top, number.bitcast(Int32) & MAGNITUDE)
        for step in (1, 2, 4):
            if cutlass.const_expr(step < self.config.lanes):
                top = cutlass.max(top, cute.arch.shuffle_sync_bfly(top, step))
        return cute.arch.inline_ptx(
            SCALE, write_only_types=[Uint32, Float32], read_only_args=[float_of(Uint32(top))]
        )

    @cute.jit
    def store(
        self,
        params: QuantiseParams,
        numbers: list[Float32],
        inverse: Float32,
        place: Int64,
        exists: Boolean,
    ) -> None:
        """Quants of a thread, in one access."""
        words = cute.make_rmem_tensor(len(numbers) // 4, Uint32)
        for word in cutlass.range_constexpr(len(numbers) // 4):
            words[word] = cute.arch.inline_ptx(
                QUANTS,
                write_only_types=[Uint32],
                read_only_args=[*numbers[4 * word : 4 * word + 4], inverse],
            )
        if exists:
            cute.autovec_copy(words, vector_at(params.quants + place, Uint32, len(numbers) // 4))


def host_function(config: QuantiseConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Quantise(config).with_table(QuantiseParams)
