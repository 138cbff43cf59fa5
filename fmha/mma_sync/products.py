"""S = Q K^T and O += P V of a warp, with what ldmatrix reads for them (device code).

`kernelkit.warp_mma` says which lane has what. A lane's address is that of its row of the first
matrices; all others lie at distances that are known when the kernel is compiled.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from fmha.mma_sync.args import Place, Scope
from fmha.mma_sync.plan import PortablePlan
from kernelkit import hw
from kernelkit.warp_mma import CHUNK_BYTES, load_fragment, multiply

TILE = 16  # rows, keys or columns of a matrix product
HALF = 8  # N of one


@cute.jit
def own_place(plan: PortablePlan, scope: Scope) -> Place:
    """Of this thread."""
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
    of_slice = part * (layout.dims * item)
    return Place(
        thread, lane, team, part, q + of_slice, k + of_slice, v + part * (layout.o_columns * item)
    )


@cute.jit
def accumulators(plan: PortablePlan, columns: cutlass.Constexpr) -> tuple[cute.Tensor, ...]:
    """fp32 of 16 rows by so many columns, for each 16 rows of a team."""
    shape = (4, columns // HALF)
    return tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(plan.layout.shape.row_tiles))


@cute.jit
def multiply_qk(
    plan: PortablePlan,
    scores: tuple[cute.Tensor, ...],
    place: Place,
    stage: Int32,
    half: cutlass.Constexpr,
) -> None:
    """S of as many keys of the tile in `stage` as scores are for, over the warp's slice of the head
    dim. half: whether they are the second ones."""
    layout, dtype = plan.layout, plan.config.dtype
    row_bytes, keys = layout.sized.k_row_bytes, cute.size(scores[0]) // 4 * HALF
    k = place.k + stage * (layout.tile_n * row_bytes) + half * keys * row_bytes
    for part in cutlass.range_constexpr(len(scores)):
        scores[part].fill(0.0)
    for step in cutlass.range_constexpr(layout.dims // TILE):
        begin = step * TILE * plan.config.q_item_bytes
        q = [
            load_fragment(place.q + (part * TILE * row_bytes + begin), False)
            for part in range(len(scores))
        ]
        for pair in cutlass.range_constexpr(keys // TILE):
            words = load_fragment(k + (pair * TILE * row_bytes + begin), False)
            for part in cutlass.range_constexpr(len(scores)):
                multiply(scores[part][None, 2 * pair], q[part], words[:2], dtype)
                multiply(scores[part][None, 2 * pair + 1], q[part], words[2:], dtype)


@cute.jit
def multiply_pv(
    plan: PortablePlan,
    o: tuple[cute.Tensor, ...],
    p: tuple[cute.Tensor, ...],
    place: Place,
    stage: Int32,
    half: cutlass.Constexpr,
) -> None:
    """O += P V, the warp's slice of its columns; keys as above."""
    layout, dtype = plan.layout, plan.config.dtype
    row_bytes, keys = layout.sized.v_row_bytes, cute.size(p[0]) * 2
    v = place.v + stage * (layout.tile_n * row_bytes) + half * keys * row_bytes
    weights = [cute.recast_tensor(part, Uint32) for part in p]
    for step in cutlass.range_constexpr(keys // TILE):
        a = [tuple(words[4 * step + number] for number in range(4)) for words in weights]
        for pair in cutlass.range_constexpr(layout.o_columns // TILE):
            begin = step * TILE * row_bytes + pair * TILE * plan.config.io_bytes
            words = load_fragment(v + begin, True)
            for part in cutlass.range_constexpr(len(o)):
                multiply(o[part][None, 2 * pair], a[part], words[:2], dtype)
                multiply(o[part][None, 2 * pair + 1], a[part], words[2:], dtype)
