"""How the warps of a team add up Q K^T and tell each other P, where each has a slice of the head
dim (device code).

Sums travel as lanes have them, 16 bytes of a lane behind those of the lane before: all warps have
the same elements in the same lane. For each 16 rows there is a warp that weighs them; where a team
has more warps than rows, several do the same, from the same sums in the same order, and one of them
leaves P. P lies in rows, for ldmatrix.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from fmha.portable.args import Buffers, Place
from fmha.portable.layout import ROWS
from fmha.portable.plan import PortablePlan
from fmha.shared.two_rows import rescale
from kernelkit.device.barriers import meet
from kernelkit.device.branch import once
from kernelkit.device.shared_words import load, store
from kernelkit.device.warp_mma import CHUNK_BYTES, load_fragment
from kernelkit.plan import hw


@cute.jit
def meet_team(plan: PortablePlan, place: Place) -> None:
    """All warps of the team."""
    meet(plan.barriers, "team", place.team)


@cute.jit
def own_tile(plan: PortablePlan, place: Place) -> Int32:
    """Which 16 rows of the team the warp weighs."""
    return place.slice % plan.layout.shape.row_tiles


@cute.jit
def add_up(
    plan: PortablePlan,
    partial: tuple[cute.Tensor, ...],
    own: cute.Tensor,
    place: Place,
    buffers: Buffers,
) -> None:
    """own: the sum of all warps' `partial` of the warp's own rows."""
    if cutlass.const_expr(plan.layout.sized.trades):
        _swap(plan, partial, own, place, buffers)
        return
    for part in cutlass.range_constexpr(len(partial)):
        _leave(plan, partial[part], place, buffers, place.slice * len(partial) + part)
    meet_team(plan, place)
    row_tile = own_tile(plan, place)
    own.fill(0.0)
    for warp in cutlass.range_constexpr(plan.layout.shape.slices):
        _add(plan, own, place, buffers, row_tile + warp * len(partial))


@cute.jit
def _swap(
    plan: PortablePlan,
    partial: tuple[cute.Tensor, ...],
    own: cute.Tensor,
    place: Place,
    buffers: Buffers,
) -> None:
    """Two warps, each with 16 rows of its own: each needs half of what the other has."""
    first = Boolean(place.slice == 0)
    sent = cute.make_rmem_tensor_like(own)
    for number in cutlass.range_constexpr(cute.size(own)):
        one, other = partial[0][number], partial[1][number]
        own[number] = one if first else other
        sent[number] = other if first else one
    _leave(plan, sent, place, buffers, place.slice)
    meet_team(plan, place)
    _add(plan, own, place, buffers, 1 - place.slice)


@cute.jit
def _leave(
    plan: PortablePlan, sums: cute.Tensor, place: Place, buffers: Buffers, slot: Int32
) -> None:
    start = _slot(plan, place, buffers, slot)
    for group in cutlass.range_constexpr(cute.size(sums) // 4):
        four = tuple(sums[4 * group + number] for number in range(4))
        store(start + group * (hw.WARP_THREADS * CHUNK_BYTES), Float32, four)


@cute.jit
def _add(plan: PortablePlan, own: cute.Tensor, place: Place, buffers: Buffers, slot: Int32) -> None:
    start = _slot(plan, place, buffers, slot)
    for group in cutlass.range_constexpr(cute.size(own) // 4):
        four = load(start + group * (hw.WARP_THREADS * CHUNK_BYTES), Float32, 4)
        for number in cutlass.range_constexpr(4):
            own[4 * group + number] = own[4 * group + number] + four[number]


@cute.jit
def _slot(plan: PortablePlan, place: Place, buffers: Buffers, slot: Int32) -> Int32:
    """Where the lane's part of 16 rows of sums begins."""
    return buffers.sums + slot * (ROWS * plan.layout.tile_n * 4) + place.lane * CHUNK_BYTES


@cute.jit
def tell_weights(
    plan: PortablePlan,
    p: cute.Tensor,
    moved: Boolean,
    factors: tuple[Float32, Float32],
    place: Place,
    buffers: Buffers,
) -> None:
    """P of the warp's own rows, and by what O of them is to be multiplied, if by anything."""
    row_tile = own_tile(plan, place)
    if place.slice < plan.layout.shape.row_tiles:
        leave_weights(plan, p, place, buffers.p + row_tile * (ROWS * plan.layout.sized.p_row_bytes))
        if place.lane == 0:
            store(buffers.moved + row_tile * 4, Int32, (Int32(moved),))
        for _ in cutlass.range(once(moved), unroll=1):
            tell_factors(plan, factors, place, buffers)


@cute.jit
def leave_weights(plan: PortablePlan, p: cute.Tensor, place: Place, first: Int32) -> None:
    """P of 16 rows, in rows from `first` on."""
    row_bytes, words = plan.layout.sized.p_row_bytes, cute.recast_tensor(p, Uint32)
    start = first + place.lane // 4 * row_bytes + place.lane % 4 * 4
    for number in cutlass.range_constexpr(cute.size(words)):
        offset = number % 2 * 8 * row_bytes + number // 2 * CHUNK_BYTES
        store(start + offset, Uint32, (words[number],))


@cute.jit
def fetch_weights(plan: PortablePlan, p: cute.Tensor, place: Place, first: Int32) -> None:
    """The same as A operands."""
    row_bytes, words = plan.layout.sized.p_row_bytes, cute.recast_tensor(p, Uint32)
    start = first + place.lane % ROWS * row_bytes + place.lane // ROWS * CHUNK_BYTES
    for step in cutlass.range_constexpr(cute.size(words) // 4):
        four = load_fragment(start + step * 2 * CHUNK_BYTES, False)
        for number in cutlass.range_constexpr(4):
            words[4 * step + number] = four[number]


@cute.jit
def tell_factors(
    plan: PortablePlan, factors: tuple[Float32, Float32], place: Place, buffers: Buffers
) -> None:
    """Of the warp's own rows, to all warps of the team."""
    start = buffers.factors + (own_tile(plan, place) * ROWS + place.lane // 4) * 4
    if place.slice < plan.layout.shape.row_tiles and place.lane % 4 == 0:
        store(start, Float32, factors[:1])
        store(start + 8 * 4, Float32, factors[1:])


@cute.jit
def told_factors(
    place: Place, buffers: Buffers, row_tile: cutlass.Constexpr
) -> tuple[Float32, Float32]:
    """Of the lane's two rows of 16."""
    start = buffers.factors + (row_tile * ROWS + place.lane // 4) * 4
    return load(start, Float32), load(start + 8 * 4, Float32)


@cute.jit
def take_weights(
    plan: PortablePlan,
    p: tuple[cute.Tensor, ...],
    o: tuple[cute.Tensor, ...],
    place: Place,
    buffers: Buffers,
) -> None:
    """P of all rows of the team as A operands; O as the maxima ask for it."""
    for part in cutlass.range_constexpr(len(p)):
        first = buffers.p + part * (ROWS * plan.layout.sized.p_row_bytes)
        fetch_weights(plan, p[part], place, first)
        moved = load(buffers.moved + part * 4, Int32)
        for _ in cutlass.range(once(moved != 0), unroll=1):
            rescale(o[part], told_factors(place, buffers, part))
