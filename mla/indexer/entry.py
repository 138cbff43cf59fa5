"""Device code that converts a row of an index key or query from fp32 in registers to record bytes.

A row is held by 16 neighbouring lanes; lane l of them holds elements 8 l to 8 l + 7. A warp holds
two rows. `mla.indexer.quantised` defines the bits: every sum here is rounded by itself, since `.rn`
keeps ptxas from fusing it with the instructions that computed its operands. All lanes of a warp
call these functions together.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from kernelkit.device.narrow import packed_elements
from kernelkit.device.words import fused, two_of_bf16
from kvcache.layouts.latent import ROPE
from kvcache.movement.config import Angles
from kvcache.movement.device import EntryAddress, bf16_pair, store_bytes, store_word
from kvcache.movement.entry import (
    E2M1_RULE,
    E4M3_RULE,
    inverse_of,
    load_pairs,
    scale_bits,
    scale_code,
    turned,
)
from mla.indexer.formats import LANES, PIECE, PLAIN, WIDTH, IndexFormat, Rotation
from mla.indexer.params import HeadRows

PAIRS = PIECE // 2  # of neighbours in a lane
ROPE_LANES = ROPE // PIECE  # lanes whose elements are rotated
NORM = WIDTH**-0.5
RULES = {"e2m1": E2M1_RULE, "e4m3": E4M3_RULE}


@cute.jit
def store_index_row(
    values: cute.Tensor,
    angles: list[cute.Tensor],
    form: cutlass.Constexpr[IndexFormat],
    arch: cutlass.Constexpr[str],
    address: EntryAddress,
    exists: Boolean,
    rotation: cutlass.Constexpr[Rotation] = PLAIN,
) -> None:
    """Convert a row in fp32 that is not rotated yet to the record's bytes, and store it.

    Args:
        values: the lane's 8 elements.
        angles: those of the lane's pairs, see `load_row_angles`.
        form: one of `mla.indexer.formats.FORMATS`.
        arch: "sm_100a" or "sm_90a".
        address: address of the record. Its data begin at a multiple of 16 bytes, the scales of
            INDEXER_FP8 at a multiple of 4.
        exists: whether anything is stored; the same in all lanes of a row.
    """
    words = prepared_row(values, angles, rotation)
    elements, code = quantised_row(words, form, arch)
    store_row(elements, code, form, address, exists)


@cute.jit
def row_address(rows: HeadRows, token: Uint32, head: Uint32) -> Int64:
    """Return the address of a row."""
    return rows.address + Int64(token) * rows.token_stride + Int64(head) * rows.head_stride


@cute.jit
def prepared_row(
    values: cute.Tensor,
    angles: list[cute.Tensor],
    rotation: cutlass.Constexpr[Rotation] = PLAIN,
) -> cute.Tensor:
    """Return a lane's elements, rotated and transformed, as bf16, two in each word."""
    lane = cute.arch.lane_idx() % LANES
    row = turned(values, angles, rotation.pairs, is_rotated(lane, rotation))
    factor = Float32(1.0)
    if cutlass.const_expr(rotation.hadamard):
        transform(row, lane)
        factor = Float32(NORM)
    words = cute.make_rmem_tensor(PAIRS, Uint32)
    for pair in cutlass.range_constexpr(PAIRS):
        words[pair] = bf16_pair(row[2 * pair] * factor, row[2 * pair + 1] * factor)
    return words


@cute.jit
def is_rotated(lane: Int32, rotation: cutlass.Constexpr[Rotation]) -> Boolean:
    """Whether elements of a lane of a row, 0 to 15, are rotated."""
    if cutlass.const_expr(rotation.rope_first):
        return Boolean(lane < ROPE_LANES)
    return Boolean(lane >= LANES - ROPE_LANES)


@cute.jit
def load_row_angles(
    angles: Angles, position: Int64, rotation: cutlass.Constexpr[Rotation]
) -> list[cute.Tensor]:
    """The angles that `prepared_row` needs, of a lane's elements; zeros for those not rotated."""
    lane = cute.arch.lane_idx() % LANES
    wanted = is_rotated(lane, rotation)
    return load_pairs(angles, position, lane % ROPE_LANES, rotation.pairs, wanted)


@cute.jit
def transform(row: cute.Tensor, lane: Int32) -> None:
    """Multiply a row by H_128, without its factor, in place.

    Neighbours within a lane are combined first, then those of other lanes.
    """
    for step in (1, 2, 4):
        for index in cutlass.range_constexpr(PIECE):
            if cutlass.const_expr(index & step == 0):
                row[index], row[index + step] = cute.arch.inline_ptx(
                    "{ .reg .f32 a; add.rn.f32 a, {$r0}, {$r1}; "
                    "sub.rn.f32 {$w1}, {$r0}, {$r1}; mov.f32 {$w0}, a; }",
                    write_only_types=[Float32, Float32],
                    read_only_args=[row[index], row[index + step]],
                )
    for step in (1, 2, 4, 8):
        sign = Float32(-1.0) if lane & step != 0 else Float32(1.0)
        for index in cutlass.range_constexpr(PIECE):
            other = cute.arch.shuffle_sync_bfly(row[index], step)
            # The product is exact, so the result is rounded once, as a sum is.
            row[index] = fused(row[index], sign, other)


@cute.jit
def quantised_row(
    words: cute.Tensor, form: cutlass.Constexpr[IndexFormat], arch: cutlass.Constexpr[str]
) -> tuple[cute.Tensor, Uint32]:
    """Quantise a lane's elements, given as bf16, two in each word.

    Returns:
        The words of the elements, and the exponent byte of their scale (0 for bf16).
    """
    if cutlass.const_expr(not form.group):
        return words, Uint32(0)
    values = cute.make_rmem_tensor(PIECE, Float32)
    for pair in cutlass.range_constexpr(PAIRS):
        values[2 * pair], values[2 * pair + 1] = two_of_bf16(words[pair])
    code = scale_code(values, form.group_lanes, RULES[form.element])
    return packed_elements(values, inverse_of(code), form.element, arch), code


@cute.jit
def store_row(
    elements: cute.Tensor,
    code: Uint32,
    form: cutlass.Constexpr[IndexFormat],
    address: EntryAddress,
    exists: Boolean,
    *,
    scaled: cutlass.Constexpr[bool] = True,
) -> None:
    """Store what `quantised_row` returned in a record.

    address, exists: see `store_index_row`.
    scaled: whether to store the scales, too.
    """
    lane = cute.arch.lane_idx() % LANES
    if exists:
        store_bytes(elements, address.data + Int64(lane * form.piece_bytes))
        if cutlass.const_expr(scaled and form.group):
            if lane % form.group_lanes == 0:
                target = address.scales + Int64(lane // form.group_lanes * form.scale_size)
                if cutlass.const_expr(form.scale_size == 1):
                    store_word(Uint8(code), target)
                else:
                    store_word(scale_bits(code), target)
