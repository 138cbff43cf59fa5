"""A latent entry from registers to the bytes of its record (device code), for every kernel that
makes one. `kvcache.movement.reference` defines the bits.

Lanes of a warp have neighbouring pieces of an entry. A piece is of NoPE or of RoPE elements;
groups that share a scale begin at a lane that is a multiple of how many share it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from kernelkit.narrow import packed_elements
from kernelkit.words import float_of, vector_at
from kvcache.layouts.latent import INLINE_SCALE_BYTES, Latent
from kvcache.movement.device import bf16_pair, place_of, store_bytes, store_word, zeros
from kvcache.movement.scales import inverse_of, scale_bits, scale_code

# `.rn` keeps ptxas from fusing what it should not.
ROTATION = (
    "{ .reg .f32 a, b; mul.rn.f32 a, {$r0}, {$r2}; mul.rn.f32 b, {$r1}, {$r3}; "
    "sub.rn.f32 {$w0}, a, b; mul.rn.f32 a, {$r1}, {$r2}; mul.rn.f32 b, {$r0}, {$r3}; "
    "add.rn.f32 {$w1}, a, b; }"
)


@dataclass(frozen=True)
class Pieces:
    """What the lanes of a warp have of an entry at a time.

    size: elements of a lane, an even number. nope, rope: whether some lanes have such elements.
    """

    latent: Latent
    size: int
    nope: bool = True
    rope: bool = True

    @property
    def group_lanes(self) -> int:
        """That share a scale."""
        return self.latent.group // self.size


@cute.jit
def load_angles(
    tables: tuple, position: Int64, pair: Int32, count: cutlass.Constexpr[int], wanted: Boolean
) -> cute.Tensor:
    """`count` cosines from `pair` on, and behind them as many sines; zeros where not wanted.

    tables: addresses of cosines and sines, bytes between positions in each of the two, positions.
    """
    angles = zeros(2 * count, Float32)
    if wanted:
        position = cutlass.max(cutlass.min(position, tables[4] - 1), Int64(0))
        for part in cutlass.range_constexpr(2):
            place = tables[part] + position * tables[2 + part] + pair * 4
            gAngles = vector_at(place, Float32, count)
            cute.autovec_copy(gAngles, cute.local_tile(angles, (count,), (part,)))
    return angles


@cute.jit
def rotated(values: cute.Tensor, angles: cute.Tensor) -> cute.Tensor:
    """fp32 RoPE elements, rotated, in bf16, two to a word."""
    words = cute.size(values) // 2
    found = cute.make_rmem_tensor(words, Uint32)
    for pair in cutlass.range_constexpr(words):
        turned = cute.arch.inline_ptx(
            ROTATION,
            write_only_types=[Float32, Float32],
            read_only_args=[
                values[2 * pair], values[2 * pair + 1], angles[pair], angles[words + pair]
            ],
        )  # fmt: skip
        found[pair] = bf16_pair(*turned)
    return found


@cute.jit
def rounded(values: cute.Tensor) -> cute.Tensor:
    """fp32 elements in bf16, two to a word."""
    words = cute.make_rmem_tensor(cute.size(values) // 2, Uint32)
    for word in cutlass.range_constexpr(cute.size(words)):
        words[word] = bf16_pair(values[2 * word], values[2 * word + 1])
    return words


@cute.jit
def widened(words: cute.Tensor) -> cute.Tensor:
    """bf16, two to a word, in fp32."""
    values = cute.make_rmem_tensor(2 * cute.size(words), Float32)
    for word in cutlass.range_constexpr(cute.size(words)):
        values[2 * word] = float_of(words[word] << 16)
        values[2 * word + 1] = float_of(words[word] & Uint32(0xFFFF0000))
    return values


@cute.jit
def places_of(latent: cutlass.Constexpr[Latent], target: tuple, entry: Int32) -> tuple:
    """Addresses of the data and scales of an entry; of entry 0 for one that is negative.

    target: addresses of the first data and scales, bytes between slots, rows.
    """
    slot, inside = place_of(cutlass.max(entry, Int32(0)), target[3])
    data = target[0] + slot * target[2] + inside * latent.record.data_bytes
    scales = data
    if cutlass.const_expr(latent.record.scale_bytes > 0):
        scales = target[1] + slot * target[2] + inside * latent.record.scale_bytes
    return data, scales


@cute.jit
def store_piece(
    pieces: cutlass.Constexpr[Pieces], row: tuple, places: tuple, column: Int32, exists: Boolean
) -> None:
    """A lane's elements from `column` on, by all lanes of a warp.

    row: (bf16 words as they are, the same rotated), None where no lane needs them.
    places: see `places_of`. exists: whether this lane has a piece and there is an entry.
    """
    latent, (words, turned), (data, scales) = pieces.latent, row, places
    is_rope = Boolean(False)
    if cutlass.const_expr(pieces.rope):
        is_rope = column >= latent.nope
    if cutlass.const_expr(not latent.group):
        if cutlass.const_expr(pieces.rope):
            for word in cutlass.range_constexpr(cute.size(words)):
                words[word] = turned[word] if is_rope else words[word]
        if exists:
            store_bytes(words, data + column * 2)
    else:
        if cutlass.const_expr(pieces.nope):
            values, lanes = widened(words), pieces.group_lanes
            code = scale_code(values, lanes)
            elements = packed_elements(values, inverse_of(code), "e4m3", "sm_90a")
            if exists and not is_rope:
                store_bytes(elements, data + column)
            if exists and cute.arch.lane_idx() % lanes == 0:
                group = column // latent.group
                if cutlass.const_expr(latent.inline):
                    if not is_rope:
                        place = data + latent.nope + group * INLINE_SCALE_BYTES
                        store_word(scale_bits(code), place)
                else:  # the byte behind the last one is 0
                    store_word(Uint8(Uint32(0) if is_rope else code), scales + group)
        if cutlass.const_expr(pieces.rope):  # last of all: angles arrive last
            if exists and is_rope:
                store_bytes(turned, data + latent.rope_offset + (column - latent.nope) * 2)
