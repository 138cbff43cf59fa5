"""Outputs of a warpgroup: scales of rows on their way in, sums on their way out (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from kernelkit.device.shared_words import store as store_words
from moe.mixed.fragments import THREADS
from moe.mixed.plan import CHUNK
from moe.mixed.shared.args import Scope
from moe.mixed.shared.output import OwnRows, meet, own_rows, put, take
from moe.mixed.sm90.plan import MixedPlan
from moe.sm100.args import Tile


@cute.jit
def store(
    plan: cutlass.Constexpr[MixedPlan],
    scope: Scope,
    tile: Tile,
    team: Int32,
    sums: list[cute.Tensor],
    own: OwnRows | None,
) -> None:
    """A warpgroup's columns of a tile to global memory. own: None where it is not there yet."""
    config = plan.config
    rows = min(CHUNK, config.tile_rows)
    if cutlass.const_expr(own is None):
        own = own_rows(plan, scope, tile, team)
    meet(team)  # the rows of the tile before have been read, and the scales of these are there
    for chunk in cutlass.range_constexpr(config.tile_rows // rows):
        if chunk * rows < tile.rows:
            buffer = scope.buffers.out.toint() + (team * 2 + chunk % 2) * plan.out_bytes
            kept = cute.make_layout(4 * (rows // 8))
            mine = [
                cute.make_tensor(each.iterator + chunk * cute.size(kept), kept) for each in sums
            ]
            put(plan, scope, team, chunk, buffer, mine, own)
            meet(team)
            take(plan, scope, tile, team, chunk, buffer)


@cute.jit
def fetch_scales(plan: cutlass.Constexpr[MixedPlan], scope: Scope, tile: Tile, team: Int32) -> None:
    """The scales of the rows of a tile to shared memory, where each has one, and 0 behind the last
    one, which shares registers with a row before it. The warpgroup has read those of the tile
    before, since it has met behind that."""
    if cutlass.const_expr(plan.config.row_scale):
        tensors = scope.tensors
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % THREADS
        for first in cutlass.range_constexpr(0, plan.config.tile_rows, THREADS):
            place = first + thread
            if place < plan.config.tile_rows:
                scale = Float32(0.0)
                if place < tile.rows:
                    row = tile.first + place
                    if cutlass.const_expr(plan.config.gather):
                        row = tensors.rows[row] // scope.sizes.slots
                    scale = tensors.x_scale[row]
                scales = team * plan.config.tile_rows + place
                store_words(scope.buffers.scales.toint() + 4 * scales, Float32, (scale,))
        cute.arch.sync_warp()  # one lane of the warp frees stages of the ring from here on
