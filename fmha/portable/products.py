"""Products S = Q K^T and O += P V of a warp, and the ldmatrix reads for them (device code).

`kernelkit.device.warp_mma` documents the elements of each lane. A lane's address is that of its row
of the first matrices; all others are at distances known at compile time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fmha.portable.args import Place, Scope
from fmha.portable.fetch import Coming, fetch_part
from fmha.portable.layout import ROWS
from fmha.portable.plan import PortablePlan
from fmha.shared.args import Lane, Work
from fmha.shared.walk import row_of
from kernelkit.device.warp_mma import CHUNK_BYTES, load_fragment, multiply
from kernelkit.plan import hw


@cute.jit
def own_lane(
    plan: PortablePlan,
    work: Work,
    scope: Scope,
    place: Place,
    row_tile: Int32,
    part: Int32,
) -> Lane:
    """Return the lane's position in the 16 rows `row_tile` of its team. part: slice of O that it
    stores.
    """
    first = row_tile * ROWS + place.lane // 4
    rows = (
        row_of(plan, work, scope.tensors, scope.scalars, place.team, first),
        row_of(plan, work, scope.tensors, scope.scalars, place.team, first + 8),
    )
    real = (rows[0].token < work.q_length, rows[1].token < work.q_length)
    column = place.lane % 4 * 2
    return Lane(place.team, place.team, part, first, Int32(0), column, rows, real)


TILE = 16  # rows, keys or columns of a matrix product
HALF = 8  # N of one


@cute.jit
def own_place(plan: PortablePlan, scope: Scope) -> Place:
    """Return the position of this thread."""
    layout, item = plan.layout, plan.config.q_item_bytes
    sized, slices = layout.sized, layout.shape.slices
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = cute.arch.make_warp_uniform(thread // hw.WARP_THREADS), thread % hw.WARP_THREADS
    team, part = warp // slices, warp % slices
    # Rows 0-15 at 8 columns, then at the next 8; keys 0-7 at 8 and 8 columns, then keys 8-15.
    a_row, a_chunk = lane % TILE, lane // TILE
    b_row, b_chunk = lane // TILE * HALF + lane % HALF, lane // HALF % 2
    q = scope.buffers.q + (team * layout.rows + a_row) * sized.k_row_bytes + a_chunk * CHUNK_BYTES
    k = scope.buffers.k + b_row * sized.k_row_bytes + b_chunk * CHUNK_BYTES
    v = scope.buffers.v + a_row * sized.v_row_bytes + a_chunk * CHUNK_BYTES
    v += part * (layout.o_columns * item)
    if cutlass.const_expr(layout.shape.shares_keys):
        return Place(
            thread, lane, team, part, q, k + part * (layout.shape.score_keys * sized.k_row_bytes), v
        )
    of_slice = part * (layout.dims * item)
    return Place(thread, lane, team, part, q + of_slice, k + of_slice, v)


@cute.jit
def accumulators(plan: PortablePlan, columns: cutlass.Constexpr) -> tuple[cute.Tensor, ...]:
    """Return fp32 accumulators of 16 rows by `columns` columns, for each 16 rows of a team."""
    shape = (4, columns // HALF)
    return tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(plan.layout.shape.row_tiles))


@cute.jit
def load_q(
    plan: PortablePlan, place: Place, step: cutlass.Constexpr
) -> tuple[tuple[Uint32, ...], ...]:
    """Load the A operands of 16 columns of Q, for each 16 rows of the team."""
    begin, row_bytes = step * TILE * plan.config.q_item_bytes, plan.layout.sized.k_row_bytes
    return tuple(
        load_fragment(place.q + (row_tile * TILE * row_bytes + begin), False)
        for row_tile in range(plan.layout.shape.row_tiles)
    )


@cute.jit
def hold_q(plan: PortablePlan, place: Place) -> cute.Tensor | None:
    """Load all of Q into registers, (word, row tile, step), if the plan holds it there.

    Return None if Q is read again for each key tile.
    """
    if cutlass.const_expr(not plan.layout.holds_q):
        return None
    steps, row_tiles = plan.layout.dims // TILE, plan.layout.shape.row_tiles
    held = cute.make_rmem_tensor((4, row_tiles, steps), Uint32)
    for step in cutlass.range_constexpr(steps):
        words = load_q(plan, place, step)
        for row_tile in cutlass.range_constexpr(row_tiles):
            for word in cutlass.range_constexpr(4):
                held[word, row_tile, step] = words[row_tile][word]
    return held


@cute.jit
def multiply_qk(
    plan: PortablePlan,
    scores: tuple[cute.Tensor, ...],
    held: cute.Tensor | None,
    place: Place,
    stage: Int32,
    half: cutlass.Constexpr = None,
    coming: Coming | None = None,
) -> None:
    """Compute S of the warp's keys of the tile in `stage`, over its slice of the head dim.

    Args:
        held: Q from `hold_q`.
        half: half of the slice to compute; None for all of it.
        coming: rows of K (half 0) or V (half 1) to fetch meanwhile.
    """
    layout, dtype = plan.layout, plan.config.dtype
    row_bytes, keys = layout.sized.k_row_bytes, layout.tile_n
    k = place.k + stage * (keys * row_bytes)
    if cutlass.const_expr(half != 1):
        for row_tile in cutlass.range_constexpr(len(scores)):
            scores[row_tile].fill(0.0)
    steps = layout.dims // TILE
    first, end = (0, steps) if half is None else (half * steps // 2, (half + 1) * steps // 2)
    if cutlass.const_expr(coming is not None and first == end):  # half of one step is none
        fetch_part(plan, coming, 0, 1, of="kv"[half])
    for step in cutlass.range_constexpr(first, end):
        begin = step * TILE * plan.config.q_item_bytes
        if cutlass.const_expr(held is None):
            q = load_q(plan, place, step)
        else:
            q = [
                tuple(held[word, row_tile, step] for word in range(4))
                for row_tile in range(len(scores))
            ]
        for pair in cutlass.range_constexpr(layout.shape.score_keys // TILE):
            words = load_fragment(k + (pair * TILE * row_bytes + begin), False)
            for row_tile in cutlass.range_constexpr(len(scores)):
                multiply(scores[row_tile][None, 2 * pair], q[row_tile], words[:2], dtype)
                multiply(scores[row_tile][None, 2 * pair + 1], q[row_tile], words[2:], dtype)
        if cutlass.const_expr(coming is not None):
            coming = fetch_part(plan, coming, step - first, end - first, of="kv"[half])


@cute.jit
def multiply_pv(
    plan: PortablePlan,
    o: tuple[cute.Tensor, ...],
    p: tuple[cute.Tensor, ...],
    place: Place,
    stage: Int32,
    first: Int32,
) -> None:
    """Add P V of keys of the tile in `stage` to O, for the warp's slice of columns.

    P begins with key number `first` of the tile.
    """
    layout, dtype = plan.layout, plan.config.dtype
    row_bytes, keys = layout.sized.v_row_bytes, layout.tile_n
    v = place.v + (stage * keys + first) * row_bytes
    weights = [cute.recast_tensor(row_tile, Uint32) for row_tile in p]
    for step in cutlass.range_constexpr(cute.size(weights[0]) // 4):
        a = [tuple(words[4 * step + number] for number in range(4)) for words in weights]
        for pair in cutlass.range_constexpr(layout.o_columns // TILE):
            begin = step * TILE * row_bytes + pair * TILE * plan.config.io_bytes
            words = load_fragment(v + begin, True)
            for row_tile in cutlass.range_constexpr(len(o)):
                multiply(o[row_tile][None, 2 * pair], a[row_tile], words[:2], dtype)
                multiply(o[row_tile][None, 2 * pair + 1], a[row_tile], words[2:], dtype)
