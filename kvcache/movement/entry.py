"""A latent entry from registers to the bytes of its record (device code), for every kernel that
makes one. `kvcache.movement.reference` defines the bits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from kernelkit.device.narrow import packed_elements
from kernelkit.device.words import bits_of, float_of, two_of_bf16, vector_at
from kvcache.layouts.latent import INLINE_SCALE_BYTES, NEIGHBOURS, ROPE, Latent
from kvcache.movement.config import PIECE, Angles
from kvcache.movement.device import EntryAddress, bf16_pair, store_bytes, store_word, zeros

# ---- Scales: the power of two by which a group of elements is divided, as its exponent byte

MANTISSA = 23
INFINITY, NAN_CODE, NAN_BITS = 0x7F800000, 255, 0x7FFFFFFF
LARGEST_CODE = 254  # exponent byte of a finite number


@dataclass(frozen=True)
class ScaleRule:
    """The rule s = 2^ceil(log2(max(amax / largest, least))), with largest = x * 2^exponent.

    carry: what the mantissa of x lacks of 2, less a bit; added to amax it carries into the exponent
    where x is exceeded. least: the exponent byte of the smallest power that is not below the least
    scale.
    """

    carry: int
    exponent: int
    least: int


E4M3_RULE = ScaleRule(0x1FFFFF, 8, 127 - 13)  # 448 is 1.75 * 2^8; 2^-13 is not below 1e-4
E2M1_RULE = ScaleRule(0x3FFFFF, 2, 1)  # 6 is 1.5 * 2^2; 2^-126, of which inverses are normal


@cute.jit
def scale_code(
    values: cute.Tensor,
    lanes: cutlass.Constexpr[int],
    rule: cutlass.Constexpr[ScaleRule] = E4M3_RULE,
) -> Uint32:
    """The exponent byte of the scale of a group, in all lanes that share the group (4, 8 or 16);
    NAN_CODE where one of its elements is not finite."""
    top = Float32(0.0)
    for index in cutlass.range_constexpr(cute.size(values)):
        magnitude = float_of(bits_of(values[index]) & Uint32(0x7FFFFFFF))
        top = cute.arch.fmax(top, magnitude, nan=True)
    bits = bits_of(top)  # in the order of the numbers, NaN last
    for step in (1, 2, 4, 8):
        if cutlass.const_expr(step < lanes):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, step))
    code = cutlass.max(Int32((bits + rule.carry) >> MANTISSA) - rule.exponent, Int32(rule.least))
    return Uint32(NAN_CODE) if bits >= INFINITY else Uint32(code)


@cute.jit
def scale_bits(code: Uint32) -> Uint32:
    """The scale in fp32, which is a normal number, or a NaN."""
    return Uint32(NAN_BITS) if code == NAN_CODE else code << MANTISSA


@cute.jit
def inverse_of(code: Uint32) -> Float32:
    """The factor of elements: 1 / s exactly, and a NaN for NAN_CODE."""
    bits = (Uint32(LARGEST_CODE) - code) << MANTISSA
    return float_of(Uint32(NAN_BITS) if code == NAN_CODE else bits)


# ---- Entries
#
# The lanes of a warp have neighbouring pieces of an entry. A piece has NoPE or RoPE elements; the
# lanes that share a scale begin at a multiple of their number.

# `.rn` keeps ptxas from fusing what it should not.
ROTATION = (
    "{ .reg .f32 a, b; mul.rn.f32 a, {$r0}, {$r2}; mul.rn.f32 b, {$r1}, {$r3}; "
    "sub.rn.f32 {$w0}, a, b; mul.rn.f32 a, {$r1}, {$r2}; mul.rn.f32 b, {$r0}, {$r3}; "
    "add.rn.f32 {$w1}, a, b; }"
)

LOWER_PIECES = ROPE // 2 // PIECE  # pieces with the first elements of pairs, if these are halves


@dataclass(frozen=True)
class Pieces:
    """The part of an entry that the lanes of a warp have at a time.

    size: number of elements of a lane, even.
    nope, rope: whether some lanes have such elements.
    """

    latent: Latent
    size: int
    nope: bool = True
    rope: bool = True

    @property
    def group_lanes(self) -> int:
        """Number of lanes that share a scale."""
        return self.latent.group // self.size


@cute.jit
def load_angles(
    angles: Angles, position: Int64, pair: Int32, count: cutlass.Constexpr[int], wanted: Boolean
) -> cute.Tensor:
    """`count` cosines from `pair` on, and behind them as many sines; zeros where not wanted. A
    position that the tables do not have counts as the nearest one that they have."""
    found = zeros(2 * count, Float32)
    if wanted:
        position = cutlass.max(cutlass.min(position, angles.positions - 1), Int64(0))
        tables = (angles.cos, angles.cos_stride), (angles.sin, angles.sin_stride)
        for part, (table, stride) in enumerate(tables):
            gAngles = vector_at(table + position * stride + pair * 4, Float32, count)
            cute.autovec_copy(gAngles, cute.local_tile(found, (count,), (part,)))
    return found


@cute.jit
def rotated(values: cute.Tensor, angles: cute.Tensor) -> cute.Tensor:
    """RoPE elements in fp32, rotated by their angles, in bf16, two to a word."""
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
def load_pairs(
    angles: Angles,
    position: Int64,
    piece: Int32,
    pairs: cutlass.Constexpr[str],
    wanted: Boolean,
) -> list[cute.Tensor]:
    """The angles that `turned` needs for a piece of PIECE RoPE elements, 0 to 7; zeros where not
    wanted. Each fragment has cosines and as many sines."""
    count = PIECE // 2
    if cutlass.const_expr(pairs == NEIGHBOURS):
        return [load_angles(angles, position, piece * count, count, wanted)]
    first = piece % LOWER_PIECES * PIECE
    return [load_angles(angles, position, first + part * count, count, wanted) for part in (0, 1)]


@cute.jit
def turned(
    values: cute.Tensor,
    angles: list[cute.Tensor],
    pairs: cutlass.Constexpr[str],
    wanted: Boolean,
) -> cute.Tensor:
    """A piece of PIECE elements in fp32, rotated where wanted and as it is elsewhere.

    All lanes of a warp call this. Eight lanes have the RoPE elements; the first of them is a
    multiple of eight. angles: what `load_pairs` returned.
    """
    row, half = cute.make_rmem_tensor(PIECE, Float32), PIECE // 2
    if cutlass.const_expr(pairs == NEIGHBOURS):
        for pair in cutlass.range_constexpr(half):
            x, y = values[2 * pair], values[2 * pair + 1]
            both = _rotated_pair(x, y, angles[0][pair], angles[0][half + pair])
            row[2 * pair] = both[0] if wanted else x
            row[2 * pair + 1] = both[1] if wanted else y
    else:
        upper = cute.arch.lane_idx() & LOWER_PIECES != 0
        for index in cutlass.range_constexpr(PIECE):
            mine, place = values[index], index % half
            other = cute.arch.shuffle_sync_bfly(mine, LOWER_PIECES)
            x, y = other if upper else mine, mine if upper else other
            found = angles[index // half]
            both = _rotated_pair(x, y, found[place], found[half + place])
            new = both[1] if upper else both[0]
            row[index] = new if wanted else mine
    return row


@cute.jit
def _rotated_pair(x: Float32, y: Float32, cos: Float32, sin: Float32) -> tuple[Float32, ...]:
    return cute.arch.inline_ptx(
        ROTATION, write_only_types=[Float32, Float32], read_only_args=[x, y, cos, sin]
    )


@cute.jit
def rounded(values: cute.Tensor) -> cute.Tensor:
    """The fp32 elements of a fragment in bf16, two to a word."""
    words = cute.make_rmem_tensor(cute.size(values) // 2, Uint32)
    for word in cutlass.range_constexpr(cute.size(words)):
        words[word] = bf16_pair(values[2 * word], values[2 * word + 1])
    return words


@cute.jit
def widened(words: cute.Tensor) -> cute.Tensor:
    """The bf16 elements of a fragment, two to a word, in fp32."""
    values = cute.make_rmem_tensor(2 * cute.size(words), Float32)
    for word in cutlass.range_constexpr(cute.size(words)):
        values[2 * word], values[2 * word + 1] = two_of_bf16(words[word])
    return values


@cute.jit
def store_piece(
    pieces: cutlass.Constexpr[Pieces],
    words: cute.Tensor | None,
    turned: cute.Tensor | None,
    address: EntryAddress,
    column: Int32,
    exists: Boolean,
) -> None:
    """Store a lane's elements from `column` on to their entry; called by all lanes of a warp.

    words: the elements in bf16, two to a word.
    turned: the rotated elements; None if no lane needs them.
    exists: whether this lane has a piece and there is an entry.
    """
    latent, is_rope = pieces.latent, Boolean(False)
    if cutlass.const_expr(pieces.rope):
        is_rope = column >= latent.nope
    if cutlass.const_expr(not latent.group):
        if cutlass.const_expr(pieces.rope):
            for word in cutlass.range_constexpr(cute.size(words)):
                words[word] = turned[word] if is_rope else words[word]
        if exists:
            store_bytes(words, address.data + column * 2)
    else:
        if cutlass.const_expr(pieces.nope):
            _store_quantised(pieces, words, address, column, exists, is_rope)
        if cutlass.const_expr(pieces.rope):  # last of all: angles arrive last
            if exists and is_rope:
                place = address.data + latent.rope_offset
                store_bytes(turned, place + (column - latent.nope) * 2)


@cute.jit
def _store_quantised(
    pieces: cutlass.Constexpr[Pieces],
    words: cute.Tensor,
    address: EntryAddress,
    column: Int32,
    exists: Boolean,
    is_rope: Boolean,
) -> None:
    """A lane's NoPE elements in e4m3 and, by the first lane of a group, the scale of the group."""
    latent, values, lanes = pieces.latent, widened(words), pieces.group_lanes
    code = scale_code(values, lanes)
    elements = packed_elements(values, inverse_of(code), "e4m3", "sm_90a")
    if exists and not is_rope:
        store_bytes(elements, address.data + column)
    if exists and cute.arch.lane_idx() % lanes == 0:
        group = column // latent.group
        if cutlass.const_expr(latent.inline):
            if not is_rope:
                place = address.data + latent.nope + group * INLINE_SCALE_BYTES
                store_word(scale_bits(code), place)
        else:  # the byte behind the last one is 0
            store_word(Uint8(Uint32(0) if is_rope else code), address.scales + group)
