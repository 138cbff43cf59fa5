"""Entries of a sliding window: rotated, quantised if wished, and put where a mapping says (device
code). `kvcache.movement.reference` defines the bits, `kvcache.movement.config` who does what.
"""


import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, Uint32

from kernelkit.device_table import DeviceTable
from kernelkit.hw import WARP_THREADS
from kernelkit.param_table import ParamTable, table_of
from kernelkit.words import float_of, vector_at
from kvcache.movement.config import PIECE, VECTOR_BYTES, AppendConfig
from kvcache.movement.device import entry_of, number_at, numbers_of, zeros
from kvcache.movement.entry import (
    Pieces,
    load_angles,
    places_of,
    rotated,
    rounded,
    store_piece,
    widened,
)

NUMBERS = 15


class Append:
    """Host function and kernel of one AppendConfig."""

    def __init__(self, config: AppendConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(self, table: ParamTable, ctas: Int32, stream: CUstream) -> None:
        """table: kv's address, bytes between tokens, tokens; addresses of positions, slots, cos
        and sin, bytes between positions in each of the two, positions; addresses of the first data
        and scales, bytes between slots, rows, entries.
        """
        self.kernel(table).launch(
            grid=(ctas, 1, 1), block=(self.config.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, table: DeviceTable) -> None:
        """Warps take turns at the tokens; see `__call__`."""
        config, numbers = self.config, numbers_of(table, NUMBERS)
        source, tables, target = numbers[:3], numbers[3:10], numbers[10:]
        tokens = Int32(source[2])
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        lane, warps = thread % WARP_THREADS, ctas * config.rows
        mine = cta * config.rows + thread // WARP_THREADS
        for token in cutlass.range(mine, tokens, warps, unroll=1):
            # Angles wait for a position, the rest for nothing: all loads stand before their use.
            position = Int64(0)
            if lane >= config.rope_lane and lane < config.last_lanes:
                position = number_at(tables[0], token)
            loaded = self.load(source, token, lane)
            entry = entry_of(tables[1], token, target[4])
            wanted = lane >= config.rope_lane and lane < config.last_lanes
            pair = (lane - config.rope_lane) * (PIECE // 2)
            angles = load_angles(tables[2:], position, pair, PIECE // 2, wanted)
            self.store((loaded, angles), places_of(config.latent, target, entry), entry, lane)

    @cute.jit
    def load(self, source: tuple, token: Int32, lane: Int32) -> list:
        """The pieces of a lane, as words."""
        config = self.config
        size = PIECE * (2 if config.dtype == "bf16" else 4)
        pieces = []
        for piece in cutlass.range_constexpr(config.pieces):
            words = zeros(size // 4)
            place = source[0] + Int64(token) * source[1] + (piece * WARP_THREADS + lane) * size
            if piece < config.pieces - 1 or lane < config.last_lanes:
                for part in cutlass.range_constexpr(size // VECTOR_BYTES):
                    gPart = vector_at(place + part * VECTOR_BYTES, Uint32, VECTOR_BYTES // 4)
                    cute.autovec_copy(gPart, cute.local_tile(words, (4,), (part,)))
            pieces.append(words)
        return pieces

    @cute.jit
    def store(self, row: tuple, places: tuple, entry: Int32, lane: Int32) -> None:
        """An entry; row: (loaded pieces, angles)."""
        config, (loaded, angles) = self.config, row
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
            store_piece(pieces, (words, turned), places, column, exists)

    @cute.jit
    def numbers(self, words: cute.Tensor) -> cute.Tensor:
        """fp32 of a piece as it was loaded."""
        if cutlass.const_expr(self.config.dtype == "bf16"):
            return widened(words)
        values = cute.make_rmem_tensor(PIECE, Float32)
        for index in cutlass.range_constexpr(PIECE):
            values[index] = float_of(words[index])
        return values

    @cute.jit
    def packed(self, words: cute.Tensor) -> cute.Tensor:
        """A piece in bf16, two to a word."""
        if cutlass.const_expr(self.config.dtype == "bf16"):
            return words
        return rounded(self.numbers(words))


def host_function(config: AppendConfig, _arch: str) -> tuple:
    """What is compiled for `config`, and example arguments."""
    return Append(config), table_of([0] * NUMBERS), Int32(0), CUstream(0)
