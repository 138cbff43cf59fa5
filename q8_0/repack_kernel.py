"""Blocks from one layout to the other, bytes as they are (device code).

A tile goes through shared memory as it lies interleaved, so that both sides of global memory see
16-byte accesses: 8 blocks are 17 vectors. Quants that stand at an odd multiple of 2 bytes there are
shifted into place on the way between registers and shared memory.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint16, Uint32
from cutlass.memory import SmemAllocator

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import vector_at
from q8_0.blocks import BLOCK, BLOCK_BYTES, SCALE_BYTES
from q8_0.config import PIECE, VECTOR_BYTES, RepackConfig
from q8_0.params import RepackParams

HALF_BYTES = PIECE  # of 16 quants
# Where quants begin at an odd multiple of 2 bytes, words around them are read and shifted; the last
# two quants come by themselves. Written, the inner words stand 2 bytes further up, and the quants
# in front of and behind them go by themselves; else those are the halves of the last word.
READ_HALF = (
    "{ .reg .b32 t<5>, down, shift; .reg .b16 h; and.b32 down, {$r0}, -4; "
    "and.b32 shift, {$r0}, 2; shl.b32 shift, shift, 3; "
    + " ".join(f"ld.shared.b32 t{k}, [down + {4 * k}];" for k in range(4))
    + " ld.shared.b16 h, [{$r0} + 14]; cvt.u32.u16 t4, h; "
    + " ".join(f"shf.r.wrap.b32 {{$w{k}}}, t{k}, t{k + 1}, shift;" for k in range(4))
    + " }"
)
WRITE_HALF = (
    "{ .reg .b32 t<3>, up, shift, first, last, rest; .reg .b16 a, b, c; .reg .pred odd; "
    "and.b32 shift, {$r0}, 2; add.s32 up, {$r0}, shift; setp.ne.s32 odd, shift, 0; "
    "shl.b32 shift, shift, 3; "
    + " ".join(f"shf.r.wrap.b32 t{k}, {{$r{k + 1}}}, {{$r{k + 2}}}, shift;" for k in range(3))
    + " "
    + " ".join(f"st.shared.b32 [up + {4 * k}], t{k};" for k in range(3))
    + " selp.b32 first, {$r1}, {$r4}, odd; shr.u32 last, {$r4}, 16; selp.b32 rest, 0, 12, odd; "
    "add.s32 rest, rest, {$r0}; cvt.u16.u32 a, first; cvt.u16.u32 b, last; "
    "st.shared.b16 [rest], a; st.shared.b16 [{$r0} + 14], b; }"
)


class Repack(TableKernel):
    """The kernel of one RepackConfig; table: `RepackParams`."""

    config: RepackConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """A CTA has a tile of a row."""
        config, params = self.config, table.unpack(RepackParams)
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        row = Int32(Uint32(cta) // Uint32(params.tiles))
        first = (cta - row * Int32(params.tiles)) * config.tile
        count = cutlass.min(Int32(params.blocks.cols // BLOCK) - first, Int32(config.tile))
        sBlocks = SmemAllocator().allocate_tensor(
            self.dtype, cute.make_layout(config.tile_bytes // self.width), byte_alignment=16
        )
        blocks = params.blocks.quants + Int64(row) * params.blocks.stride
        blocks += Int64(first) * BLOCK_BYTES
        quants = params.arrays.quants + Int64(row) * params.arrays.stride + Int64(first) * BLOCK
        scales = params.arrays.scales + Int64(row) * params.arrays.scale_stride
        scales += Int64(first) * SCALE_BYTES
        shared = Int32(sBlocks.iterator.toint())
        if cutlass.const_expr(config.to_soa):
            self.move_blocks(blocks, sBlocks, count, thread)
            cute.arch.sync_threads()
            self.take_apart(shared, quants, scales, count, thread)
        else:
            self.put_together(shared, quants, scales, count, thread)
            cute.arch.sync_threads()
            self.move_blocks(blocks, sBlocks, count, thread)

    @property
    def dtype(self) -> Any:
        """Type of the elements of interleaved vectors."""
        return Uint16 if self.config.vector == 2 else Uint32

    @property
    def width(self) -> int:
        """Bytes of such an element."""
        return self.dtype.width // 8

    @cute.jit
    def move_blocks(
        self, address: Int64, sBlocks: cute.Tensor, count: Int32, thread: Int32
    ) -> None:
        """`count` blocks between global and shared memory, vector by vector, and what is behind the
        last vector by 2 bytes."""
        config, size = self.config, self.config.vector // self.width
        nbytes = count * BLOCK_BYTES
        whole = nbytes // config.vector
        loaded = []
        for turn in cutlass.range_constexpr(config.vectors):
            vector = thread + turn * config.threads
            words = cute.make_rmem_tensor(size, self.dtype)
            gVector = vector_at(address + Int64(vector) * config.vector, self.dtype, size)
            if vector < whole:
                if cutlass.const_expr(config.to_soa):
                    cute.autovec_copy(gVector, words)
                else:
                    cute.autovec_copy(cute.local_tile(sBlocks, (size,), (vector,)), words)
            loaded.append(words)
        for turn in cutlass.range_constexpr(config.vectors):
            vector = thread + turn * config.threads
            gVector = vector_at(address + Int64(vector) * config.vector, self.dtype, size)
            if vector < whole:
                if cutlass.const_expr(config.to_soa):
                    cute.autovec_copy(loaded[turn], cute.local_tile(sBlocks, (size,), (vector,)))
                else:
                    cute.autovec_copy(loaded[turn], gVector)
        place = whole * config.vector + thread * 2
        if place < nbytes:
            gRest = vector_at(address + place, Uint16, 1)
            shared = Int32(sBlocks.iterator.toint()) + place
            if cutlass.const_expr(config.to_soa):
                store_short(shared, gRest[0])
            else:
                gRest[0] = load_short(shared)

    @cute.jit
    def take_apart(
        self, shared: Int32, quants: Int64, scales: Int64, count: Int32, thread: Int32
    ) -> None:
        """Blocks in shared memory to arrays."""
        config = self.config
        for turn in cutlass.range_constexpr(config.halves):
            half = thread + turn * config.threads
            if half < 2 * count:
                words = cute.make_rmem_tensor(4, Uint32)
                words[0], words[1], words[2], words[3] = cute.arch.inline_ptx(
                    READ_HALF,
                    write_only_types=[Uint32] * 4,
                    read_only_args=[place_of(shared, half)],
                )
                gHalf = vector_at(quants + Int64(half) * HALF_BYTES, Uint32, VECTOR_BYTES // 4)
                cute.autovec_copy(words, gHalf)
        for turn in cutlass.range_constexpr(config.tile // config.threads):
            block = thread + turn * config.threads
            if block < count:
                gScale = vector_at(scales + Int64(block) * SCALE_BYTES, Uint16, 1)
                gScale[0] = load_short(shared + block * BLOCK_BYTES)

    @cute.jit
    def put_together(
        self, shared: Int32, quants: Int64, scales: Int64, count: Int32, thread: Int32
    ) -> None:
        """Arrays to blocks in shared memory; all of a thread is loaded before any is stored."""
        config, halves, shorts = self.config, [], []
        for turn in cutlass.range_constexpr(config.halves):
            half, words = thread + turn * config.threads, cute.make_rmem_tensor(4, Uint32)
            if half < 2 * count:
                gHalf = vector_at(quants + Int64(half) * HALF_BYTES, Uint32, VECTOR_BYTES // 4)
                cute.autovec_copy(gHalf, words)
            halves.append(words)
        for turn in cutlass.range_constexpr(config.tile // config.threads):
            block, short = thread + turn * config.threads, cute.make_rmem_tensor(1, Uint16)
            if block < count:
                short[0] = vector_at(scales + Int64(block) * SCALE_BYTES, Uint16, 1)[0]
            shorts.append(short)
        for turn in cutlass.range_constexpr(config.halves):
            half, words = thread + turn * config.threads, halves[turn]
            if half < 2 * count:
                cute.arch.inline_ptx(
                    WRITE_HALF,
                    read_only_args=[
                        place_of(shared, half), words[0], words[1], words[2], words[3]
                    ],
                )  # fmt: skip
        for turn in cutlass.range_constexpr(config.tile // config.threads):
            block = thread + turn * config.threads
            if block < count:
                store_short(shared + block * BLOCK_BYTES, shorts[turn][0])


@cute.jit
def place_of(shared: Int32, half: Int32) -> Int32:
    """Return the address of a half-block's quants in a tile in shared memory."""
    return shared + half // 2 * BLOCK_BYTES + SCALE_BYTES + half % 2 * HALF_BYTES


@cute.jit
def load_short(address: Int32) -> Uint16:
    """16 bits of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.b16 {$w0}, [{$r0}];", write_only_types=[Uint16], read_only_args=[address]
    )


@cute.jit
def store_short(address: Int32, value: Uint16) -> None:
    """16 bits to shared memory."""
    cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[address, value])


def host_function(config: RepackConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Repack(config).with_table(RepackParams)
