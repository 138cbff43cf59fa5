"""Entries of a sliding window: rotated, quantised if wished, and put where a mapping says (device
code). `kvcache.reference` defines the bits, `kvcache.kernels.config` who does what.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from kernelkit.compile import compile_once
from kernelkit.hw import WARP_THREADS
from kernelkit.param_table import DeviceTable, ParamTable
from kernelkit.words import bits_of, float_of, vector_at
from kvcache.kernels.config import PIECE, VECTOR_BYTES, AppendConfig
from kvcache.kernels.device import (
    bf16_pair,
    entry_of,
    number_at,
    numbers_of,
    place_of,
    store_bytes,
    table_of,
    zeros,
)
from kvcache.latent import INLINE_SCALE_BYTES

NUMBERS = 15
WORDS = PIECE // 2  # of a piece in bf16
MANTISSA = 23
# 448 is 1.75 * 2^8: adding what 1.75 lacks of 2 carries into the exponent where it is exceeded.
CARRY, EXPONENT = 0x1FFFFF, 8
LEAST_CODE = 127 - 13  # 2^-13, the first power of two that is not below 1e-4
INFINITY, NAN_CODE, NAN_BITS = 0x7F800000, 255, 0x7FFFFFFF
# Four elements times a scale's inverse; `.rn` keeps ptxas from fusing what it should not.
ELEMENTS = (
    "{ .reg .f32 v<4>; .reg .b16 c<2>; "
    + "".join(f"mul.rn.f32 v{i}, {{$r{i}}}, {{$r4}}; " for i in range(4))
    + "cvt.rn.satfinite.e4m3x2.f32 c0, v1, v0; cvt.rn.satfinite.e4m3x2.f32 c1, v3, v2; "
    "mov.b32 {$w0}, {c0, c1}; }"
)
ROTATION = (
    "{ .reg .f32 a, b; mul.rn.f32 a, {$r0}, {$r2}; mul.rn.f32 b, {$r1}, {$r3}; "
    "sub.rn.f32 {$w0}, a, b; mul.rn.f32 a, {$r1}, {$r2}; mul.rn.f32 b, {$r0}, {$r3}; "
    "add.rn.f32 {$w1}, a, b; }"
)


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
            pieces = self.load(source, token, lane)
            entry = entry_of(tables[1], token, target[4])
            angles = self.load_angles(tables, position, lane)
            if cutlass.const_expr(config.latent.group):
                self.store_quantised((pieces, angles), target, entry, lane)
            else:
                self.store_plain((pieces, angles), target, entry, lane)

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
    def load_angles(self, tables: tuple, position: Int64, lane: Int32) -> cute.Tensor:
        """Cosines, and behind them sines, of a lane's RoPE elements."""
        config, angles = self.config, zeros(PIECE, Float32)
        if lane >= config.rope_lane and lane < config.last_lanes:
            position = cutlass.max(cutlass.min(position, tables[6] - 1), Int64(0))
            for part in cutlass.range_constexpr(2):
                place = tables[2 + part] + position * tables[4 + part]
                place += (lane - config.rope_lane) * VECTOR_BYTES
                cute.autovec_copy(
                    vector_at(place, Float32, 4), cute.local_tile(angles, (4,), (part,))
                )
        return angles

    @cute.jit
    def numbers(self, words: cute.Tensor) -> cute.Tensor:
        """fp32 of a piece, rounded to bf16 before where it is wider."""
        values = cute.make_rmem_tensor(PIECE, Float32)
        packed = self.packed(words)
        for word in cutlass.range_constexpr(WORDS):
            values[2 * word] = float_of(packed[word] << 16)
            values[2 * word + 1] = float_of(packed[word] & Uint32(0xFFFF0000))
        return values

    @cute.jit
    def packed(self, words: cute.Tensor) -> cute.Tensor:
        """A piece in bf16, two to a word."""
        if cutlass.const_expr(self.config.dtype == "bf16"):
            return words
        found = cute.make_rmem_tensor(WORDS, Uint32)
        for word in cutlass.range_constexpr(WORDS):
            found[word] = bf16_pair(float_of(words[2 * word]), float_of(words[2 * word + 1]))
        return found

    @cute.jit
    def rotated(self, words: cute.Tensor, angles: cute.Tensor) -> cute.Tensor:
        """A piece of RoPE elements, rotated, in bf16."""
        found = cute.make_rmem_tensor(WORDS, Uint32)
        for pair in cutlass.range_constexpr(WORDS):
            if cutlass.const_expr(self.config.dtype == "bf16"):
                x = float_of(words[pair] << 16)
                y = float_of(words[pair] & Uint32(0xFFFF0000))
            else:
                x, y = float_of(words[2 * pair]), float_of(words[2 * pair + 1])
            turned = cute.arch.inline_ptx(
                ROTATION,
                write_only_types=[Float32, Float32],
                read_only_args=[x, y, angles[pair], angles[WORDS + pair]],
            )
            found[pair] = bf16_pair(*turned)
        return found

    @cute.jit
    def store_plain(self, row: tuple, target: tuple, entry: Int32, lane: Int32) -> None:
        """An entry in bf16; row: (pieces, angles)."""
        config, (pieces, angles) = self.config, row
        slot, inside = place_of(cutlass.max(entry, Int32(0)), target[3])
        place = target[0] + slot * target[2] + inside * config.latent.record.data_bytes
        for piece in cutlass.range_constexpr(config.pieces):
            words, exists = self.packed(pieces[piece]), entry >= 0
            if cutlass.const_expr(piece == config.pieces - 1):
                exists = exists and lane < config.last_lanes
                turned = self.rotated(pieces[piece], angles)
                for word in cutlass.range_constexpr(WORDS):
                    words[word] = turned[word] if lane >= config.rope_lane else words[word]
            if exists:
                store_bytes(words, place + (piece * WARP_THREADS + lane) * (PIECE * 2))

    @cute.jit
    def store_quantised(self, row: tuple, target: tuple, entry: Int32, lane: Int32) -> None:
        """An entry with scales; row: (pieces, angles)."""
        config, (pieces, angles) = self.config, row
        latent, lanes = config.latent, config.group_lanes
        slot, inside = place_of(cutlass.max(entry, Int32(0)), target[3])
        data = target[0] + slot * target[2] + inside * latent.record.data_bytes
        scales = target[1] + slot * target[2] + inside * latent.record.scale_bytes
        for piece in cutlass.range_constexpr(config.pieces):
            is_last = piece == config.pieces - 1
            is_rope, exists = Boolean(False), entry >= 0
            if cutlass.const_expr(is_last):
                is_rope, exists = lane >= config.rope_lane, exists and lane < config.last_lanes
            if cutlass.const_expr(not is_last or config.rope_lane > 0):
                values = self.numbers(pieces[piece])
                code = scale_code(values, lanes)
                elements = quantised(values, code)
                if exists and not is_rope:
                    store_bytes(elements, data + (piece * WARP_THREADS + lane) * PIECE)
                group = piece * (WARP_THREADS // lanes) + lane // lanes
                if exists and lane % lanes == 0:
                    if cutlass.const_expr(latent.inline):
                        bits = Uint32(NAN_BITS) if code == NAN_CODE else code << MANTISSA
                        if not is_rope:
                            store_word(bits, data + latent.nope + group * INLINE_SCALE_BYTES)
                    else:  # the byte behind the last one is 0
                        store_word(Uint8(Uint32(0) if is_rope else code), scales + group)
            if cutlass.const_expr(is_last):  # last of all: angles arrive last
                turned = self.rotated(pieces[piece], angles)
                if exists and is_rope:
                    column = latent.rope_offset + (lane - config.rope_lane) * (PIECE * 2)
                    store_bytes(turned, data + column)


@cute.jit
def store_word(value: Any, address: Int64) -> None:
    """A number to memory, as wide as it is."""
    gWord = vector_at(address, type(value), 1)
    gWord[0] = value


@cute.jit
def scale_code(values: cute.Tensor, lanes: cutlass.Constexpr[int]) -> Uint32:
    """The exponent byte of the scale of a group, in all its lanes, of which there are 8 or 16."""
    top = Float32(0.0)
    for index in cutlass.range_constexpr(PIECE):
        magnitude = float_of(bits_of(values[index]) & Uint32(0x7FFFFFFF))
        top = cute.arch.fmax(top, magnitude, nan=True)
    bits = bits_of(top)  # in the order of the numbers, NaN last
    for step in (1, 2, 4, 8):
        if cutlass.const_expr(step < lanes):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, step))
    code = cutlass.max(Int32((bits + CARRY) >> MANTISSA) - EXPONENT, Int32(LEAST_CODE))
    return Uint32(NAN_CODE) if bits >= INFINITY else Uint32(code)


@cute.jit
def quantised(values: cute.Tensor, code: Uint32) -> cute.Tensor:
    """Elements of a piece, four to a word."""
    inverse = float_of(Uint32(NAN_BITS) if code == NAN_CODE else (Uint32(254) - code) << MANTISSA)
    words = cute.make_rmem_tensor(PIECE // 4, Uint32)
    for word in cutlass.range_constexpr(PIECE // 4):
        words[word] = cute.arch.inline_ptx(
            ELEMENTS,
            write_only_types=[Uint32],
            read_only_args=[*(values[4 * word + index] for index in range(4)), inverse],
        )
    return words


def compile_append(config: AppendConfig, arch: str) -> Any:
    """The compiled `Append.__call__` of `config`; compiled once per process."""

    def describe() -> tuple:
        return Append(config), table_of([0] * NUMBERS), Int32(0), CUstream(0)

    return compile_once(config, arch, describe)
