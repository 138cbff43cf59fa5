"""Quantised entries, wherever a table says, to rows of bf16 (device code).

`kvcache.movement.reference` defines the bits, `kvcache.movement.config` who does what.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import float_of
from kernelkit.plan.hw import WARP_THREADS
from kvcache.layouts.latent import INLINE_SCALE_BYTES
from kvcache.movement.config import PIECE, DequantiseConfig, DequantiseParams, Entries
from kvcache.movement.device import entry_address, entry_of, load_bytes, store_bytes, zeros
from kvcache.movement.entry import MANTISSA, NAN_BITS, NAN_CODE

WORDS = PIECE // 2  # 32-bit words of a piece in bf16
SMALLEST_BITS = 0x00400000  # 2^-127, a subnormal, is code 0
# Two e4m3 to halves, exactly, to fp32, times the scale, to bf16: one rounding.
ELEMENTS = (
    "{ .reg .b16 low, high, a, b; .reg .b32 pair; .reg .f32 x, y; mov.b32 {low, high}, {$r0}; "
    "mov.b16 low, HALF; cvt.rn.f16x2.e4m3x2 pair, low; mov.b32 {a, b}, pair; "
    "cvt.f32.f16 x, a; cvt.f32.f16 y, b; mul.rn.f32 x, x, {$r1}; mul.rn.f32 y, y, {$r1}; "
    "cvt.rn.bf16x2.f32 {$w0}, y, x; }"
)


class Dequantise(TableKernel):
    """The kernel of one DequantiseConfig; table: `DequantiseParams`."""

    config: DequantiseConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Warps take turns at the rows of the result."""
        config, params = self.config, table.unpack(DequantiseParams)
        entries, out, count = params.entries, params.out, Int32(params.out.count)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane, warps = thread % WARP_THREADS, ctas * config.rows
        mine = cta * config.rows + thread // WARP_THREADS
        for row in cutlass.range(mine, count, warps, unroll=1):
            loaded = self.load(entries, entry_of(params.indices, row, entries.count), lane)
            place = out.address + Int64(row) * out.stride
            for piece in cutlass.range_constexpr(config.pieces):
                words, scale = loaded[piece]
                is_rope, exists = self.part_of(piece, lane)
                found = dequantised(words, self.scale_of(scale))
                for word in cutlass.range_constexpr(WORDS):
                    found[word] = words[word] if is_rope else found[word]
                if exists:
                    store_bytes(found, place + (piece * WARP_THREADS + lane) * (PIECE * 2))

    @cute.jit
    def part_of(self, piece: cutlass.Constexpr[int], lane: Int32) -> tuple[Boolean, Boolean]:
        """Whether a piece of a lane is of RoPE elements, and whether it exists."""
        config, is_rope, exists = self.config, Boolean(False), Boolean(True)
        if cutlass.const_expr(piece == config.pieces - 1):
            is_rope, exists = lane >= config.rope_lane, lane < config.last_lanes
        return is_rope, exists

    @cute.jit
    def load(
        self, entries: Entries, entry: Int32, lane: Int32
    ) -> list[tuple[cute.Tensor, cute.Tensor]]:
        """Load the words and the scale of every piece of a lane, as they are stored.

        Return zeros if the entry is negative.
        """
        config, latent = self.config, self.config.latent
        address = entry_address(latent.record, entries, entry)
        found = []
        for piece in cutlass.range_constexpr(config.pieces):
            words, scale = zeros(WORDS), zeros(1, Uint32 if latent.inline else Uint8)
            elements = cute.make_tensor(words.iterator, cute.make_layout(PIECE // 4))
            is_rope, exists = self.part_of(piece, lane)
            if entry >= 0 and exists:
                if is_rope:
                    column = latent.rope_offset + (lane - config.rope_lane) * (PIECE * 2)
                    load_bytes(address.data + column, words)
                else:
                    load_bytes(address.data + (piece * WARP_THREADS + lane) * PIECE, elements)
                    group = piece * (WARP_THREADS // config.group_lanes)
                    group += lane // config.group_lanes
                    if cutlass.const_expr(latent.inline):
                        place = address.data + latent.nope + group * INLINE_SCALE_BYTES
                        load_bytes(place, scale)
                    else:
                        load_bytes(address.scales + group, scale)
            found.append((words, scale))
        return found

    @cute.jit
    def scale_of(self, stored: cute.Tensor) -> Float32:
        """A scale in fp32, from fp32 or an exponent byte."""
        if cutlass.const_expr(self.config.latent.inline):
            return float_of(stored[0])
        byte = Uint32(stored[0])
        bits = Uint32(SMALLEST_BITS) if byte == 0 else byte << MANTISSA
        return float_of(Uint32(NAN_BITS) if byte == NAN_CODE else bits)


@cute.jit
def dequantised(words: cute.Tensor, scale: Float32) -> cute.Tensor:
    """The elements of a piece times their scale, in bf16, two to a word."""
    found = cute.make_rmem_tensor(WORDS, Uint32)
    for word in cutlass.range_constexpr(WORDS):
        found[word] = cute.arch.inline_ptx(
            ELEMENTS.replace("HALF", ("low", "high")[word % 2]),
            write_only_types=[Uint32],
            read_only_args=[words[word // 2], scale],
        )
    return found


def host_function(config: DequantiseConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Dequantise(config).with_table(DequantiseParams)
