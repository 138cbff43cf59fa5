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
from kernelkit.merge_kernel import vector_at
from kernelkit.param_table import DeviceTable, ParamTable
from kvcache.kernels.config import (
    GROUP_LANES,
    GROUPS,
    NOPE,
    PIECE,
    PIECES,
    ROPE,
    ROPE_LANE,
    VECTOR_BYTES,
    AppendConfig,
)
from kvcache.kernels.device import (
    bf16_pair,
    bits_of,
    entry_of,
    float_of,
    number_at,
    numbers_of,
    place_of,
    store_bytes,
    table_of,
    zeros,
)
from kvcache.records import BF16_512, FP8_584

NUMBERS = 15
WORDS = PIECE // 2  # of a piece in bf16
LAST = PIECES - 1
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
        for first in cutlass.range(mine, tokens, warps * config.unrolled, unroll=1):
            entries, loaded = [], []  # each for all rows before the next: the loads do not wait
            for index in cutlass.range_constexpr(config.unrolled):
                token = first + index * warps
                entries.append(entry_of(tables[1], token, token < tokens, target[4]))
                loaded.append(self.load(source, tables[0], (token, token < tokens), lane))
            angles = []
            for index in cutlass.range_constexpr(config.unrolled):
                angles.append(self.load_angles(tables, loaded[index][1], entries[index], lane))
            for index in cutlass.range_constexpr(config.unrolled):
                row = loaded[index][0], angles[index]
                if cutlass.const_expr(config.quantised):
                    self.store_quantised(row, target, entries[index], lane)
                else:
                    self.store_plain(row, target, entries[index], lane)

    @cute.jit
    def load(self, source: tuple, positions: Int64, row: tuple, lane: Int32) -> tuple:
        """(pieces of a lane as words, position) of a token; row: (token, whether it exists)."""
        address, stride, _ = source
        token, exists = row
        size = PIECE * (2 if self.config.dtype == "bf16" else 4)
        pieces, position = [], Int64(0)
        for piece in cutlass.range_constexpr(PIECES):
            words = zeros(size // 4)
            if exists:
                place = address + Int64(token) * stride
                place += (piece * WARP_THREADS + lane) * size
                for part in cutlass.range_constexpr(size // VECTOR_BYTES):
                    gPart = vector_at(place + part * VECTOR_BYTES, Uint32, VECTOR_BYTES // 4)
                    cute.autovec_copy(gPart, cute.local_tile(words, (4,), (part,)))
            pieces.append(words)
        if exists and lane >= ROPE_LANE:
            position = number_at(positions, token)
        return pieces, position

    @cute.jit
    def load_angles(self, tables: tuple, position: Int64, entry: Int32, lane: Int32) -> cute.Tensor:
        """Cosines, and behind them sines, of a lane's RoPE elements."""
        angles = zeros(PIECE, Float32)
        if entry >= 0 and lane >= ROPE_LANE:
            position = cutlass.max(cutlass.min(position, tables[6] - 1), Int64(0))
            for part in cutlass.range_constexpr(2):
                place = tables[2 + part] + position * tables[4 + part]
                place += (lane - ROPE_LANE) * VECTOR_BYTES
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
        """An entry of BF16_512; row: (pieces, angles)."""
        pieces, angles = row
        if entry >= 0:
            slot, inside = place_of(entry, target[3])
            place = target[0] + slot * target[2] + inside * BF16_512.data_bytes
            for piece in cutlass.range_constexpr(PIECES):
                words = self.packed(pieces[piece])
                if cutlass.const_expr(piece == LAST):
                    turned = self.rotated(pieces[piece], angles)
                    for word in cutlass.range_constexpr(WORDS):
                        words[word] = turned[word] if lane >= ROPE_LANE else words[word]
                store_bytes(words, place + (piece * WARP_THREADS + lane) * (PIECE * 2))

    @cute.jit
    def store_quantised(self, row: tuple, target: tuple, entry: Int32, lane: Int32) -> None:
        """An entry of FP8_584; row: (pieces, angles)."""
        pieces, angles = row
        slot, inside = place_of(cutlass.max(entry, Int32(0)), target[3])
        place = target[0] + slot * target[2] + inside * FP8_584.data_bytes
        scales = target[1] + slot * target[2] + inside * FP8_584.scale_bytes
        for piece in cutlass.range_constexpr(PIECES):
            values = self.numbers(pieces[piece])
            code = scale_code(values)
            elements = quantised(values, code)
            is_rope = Boolean(False)
            if cutlass.const_expr(piece == LAST):
                is_rope = lane >= ROPE_LANE
            if entry >= 0:
                if is_rope:
                    column = NOPE + (lane - ROPE_LANE) * (PIECE * 2)
                    store_bytes(self.rotated(pieces[piece], angles), place + column)
                else:
                    store_bytes(elements, place + (piece * WARP_THREADS + lane) * PIECE)
                if lane % GROUP_LANES == 0:
                    group = piece * (WARP_THREADS // GROUP_LANES) + lane // GROUP_LANES
                    gCode = vector_at(scales + group, Uint8, 1)
                    gCode[0] = Uint8(Uint32(0) if is_rope else code)


@cute.jit
def scale_code(values: cute.Tensor) -> Uint32:
    """The exponent byte of the scale of a group, in all its lanes."""
    top = Float32(0.0)
    for index in cutlass.range_constexpr(PIECE):
        magnitude = float_of(bits_of(values[index]) & Uint32(0x7FFFFFFF))
        top = cute.arch.fmax(top, magnitude, nan=True)
    bits = bits_of(top)  # in the order of the numbers, NaN last
    for step in (1, 2, 4):
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


assert ROPE_LANE + ROPE // PIECE == WARP_THREADS
assert GROUPS * GROUP_LANES == LAST * WARP_THREADS + ROPE_LANE
