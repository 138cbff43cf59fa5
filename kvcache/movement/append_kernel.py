"""Entries of a sliding window: rotated, quantised if wished, and put where a mapping says (device
code). `kvcache.movement.reference` defines the bits, `kvcache.movement.config` who does what.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from kernelkit.device.device_table import DeviceTable
from kernelkit.device.table_kernel import TableKernel
from kernelkit.device.words import float_of, vector_at
from kernelkit.plan.hw import WARP_THREADS
from kvcache.movement.config import PIECE, VECTOR_BYTES, AppendConfig, AppendParams, TokenRows
from kvcache.movement.device import EntryAddress, entry_address, entry_of, int64_at, zeros
from kvcache.movement.entry import Pieces, load_angles, rotated, rounded, store_piece, widened


class Append(TableKernel):
    """The kernel of one AppendConfig; table: `AppendParams`."""

    config: AppendConfig

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """CTAs divide the tokens."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        self.run_cta(table.unpack(AppendParams), cta, ctas)

    @cute.jit
    def run_cta(self, params: AppendParams, cta: Int32, ctas: Int32) -> None:
        """Append the tokens of CTA number `cta` of `ctas`; its warps take turns at them."""
        config, kv, entries = self.config, params.kv, params.entries
        tokens = Int32(kv.count)
        thread, _, _ = cute.arch.thread_idx()
        lane, warps = thread % WARP_THREADS, ctas * config.rows
        mine = cta * config.rows + thread // WARP_THREADS
        for token in cutlass.range(mine, tokens, warps, unroll=1):
            # Only the angles depend on a position: all loads are issued before their use.
            position = Int64(0)
            if lane >= config.rope_lane and lane < config.last_lanes:
                position = int64_at(params.positions, token)
            loaded = self.load(kv, token, lane)
            entry = entry_of(params.slots, token, entries.count)
            wanted = lane >= config.rope_lane and lane < config.last_lanes
            pair = (lane - config.rope_lane) * (PIECE // 2)
            angles = load_angles(params.angles, position, pair, PIECE // 2, wanted)
            address = entry_address(config.latent.record, entries, entry)
            self.store(loaded, angles, address, entry, lane)

    @cute.jit
    def load(self, kv: TokenRows, token: Int32, lane: Int32) -> list[cute.Tensor]:
        """The pieces of a lane, as they lie in memory, in words of 32 bits."""
        config = self.config
        size = PIECE * (2 if config.dtype == "bf16" else 4)
        pieces = []
        for piece in cutlass.range_constexpr(config.pieces):
            words = zeros(size // 4)
            place = kv.address + Int64(token) * kv.stride + (piece * WARP_THREADS + lane) * size
            if piece < config.pieces - 1 or lane < config.last_lanes:
                for part in cutlass.range_constexpr(size // VECTOR_BYTES):
                    gPart = vector_at(place + part * VECTOR_BYTES, Uint32, VECTOR_BYTES // 4)
                    cute.autovec_copy(gPart, cute.local_tile(words, (4,), (part,)))
            pieces.append(words)
        return pieces

    @cute.jit
    def store(
        self,
        loaded: list[cute.Tensor],
        angles: cute.Tensor,
        address: EntryAddress,
        entry: Int32,
        lane: Int32,
    ) -> None:
        """The pieces of a lane to their entry; nothing where the entry is negative."""
        config = self.config
        for piece in cutlass.range_constexpr(config.pieces):
            is_last, exists = piece == config.pieces - 1, entry >= 0
            words = turned = None
            if cutlass.const_expr(is_last):
                exists = exists and lane < config.last_lanes
                turned = rotated(self.numbers(loaded[piece]), angles)
            pieces = Pieces(config.latent, PIECE, not is_last or config.rope_lane > 0, is_last)
            if cutlass.const_expr(pieces.nope or not config.latent.group):
                words = self.packed(loaded[piece])
            column = (piece * WARP_THREADS + lane) * PIECE
            store_piece(pieces, words, turned, address, column, exists)

    @cute.jit
    def numbers(self, words: cute.Tensor) -> cute.Tensor:
        """The elements of a piece in fp32, from the words that were loaded."""
        if cutlass.const_expr(self.config.dtype == "bf16"):
            return widened(words)
        values = cute.make_rmem_tensor(PIECE, Float32)
        for index in cutlass.range_constexpr(PIECE):
            values[index] = float_of(words[index])
        return values

    @cute.jit
    def packed(self, words: cute.Tensor) -> cute.Tensor:
        """The elements of a piece in bf16, two to a word."""
        if cutlass.const_expr(self.config.dtype == "bf16"):
            return words
        return rounded(self.numbers(words))


def host_function(config: AppendConfig, _arch: str) -> tuple:
    """Return the function to compile for `config`, and example arguments."""
    return Append(config).with_table(AppendParams)
