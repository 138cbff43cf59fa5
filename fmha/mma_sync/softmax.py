"""The softmax of 16 rows of a warp and some keys (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fmha.device.two_rows import (
    Reference,
    exponentiate,
    mask,
    refer_to,
    round_weights,
    softcap,
    tile_sums,
)
from fmha.device.types import IO_TYPES
from fmha.mma_sync.args import Scope, Seen
from fmha.mma_sync.branch import once
from fmha.mma_sync.plan import PortablePlan
from fmha.mma_sync.rows import own_lane


@cute.jit
def make_weights(plan: PortablePlan, keys: cutlass.Constexpr) -> tuple[cute.Tensor, ...]:
    """Registers of P of so many keys, for each 16 rows of a team."""
    dtype, row_tiles = IO_TYPES[plan.config.dtype], plan.layout.shape.row_tiles
    return tuple(cute.make_rmem_tensor(keys // 2, dtype) for _ in range(row_tiles))


@cute.jit
def begin_rows(reference: Reference) -> None:
    """No key has been seen."""
    reference.row_max.fill(-Float32.inf)
    reference.row_sum.fill(0.0)
    reference.shift.fill(0.0)
    reference.limit.fill(0.0)


@cute.jit
def prepare(
    plan: PortablePlan,
    scope: Scope,
    seen: Seen,
    scores: cute.Tensor,
    reference: Reference,
    row_tile: Int32,
) -> None:
    """S of 16 rows of the team as it is to be weighed."""
    every = cute.size(scores)
    if cutlass.const_expr(plan.config.softcap):
        softcap(plan, scores, reference, scope.scalars, 0, every)
    for _ in cutlass.range(once(seen.masked), unroll=1):
        # Here, since the numbers of a row would take registers in the loop over key tiles.
        lane = own_lane(plan, seen.work, scope.scalars, seen.place, row_tile, Int32(0))
        mask(plan, scores, lane, seen.key, 0, every)


@cute.jit
def follow_maximum(
    plan: PortablePlan, scope: Scope, tops: tuple[Float32, Float32], reference: Reference
) -> tuple[Boolean, tuple[Float32, Float32]]:
    """(whether weights of any row of the warp refer to another maximum from now on, by what O of
    the lane's rows is to be multiplied then). It lags while no weight is above 2 ** lag_log2.
    tops: the largest scores of the lane's rows so far."""
    scale, lag = scope.scalars.scale_log2, plan.config.lag_log2
    # (-inf) - (-inf) is NaN, the comparison false: a row that saw no key stays at -inf.
    mine = (tops[0] - reference.row_max[0]) * scale > lag
    mine = mine or (tops[1] - reference.row_max[1]) * scale > lag
    moved = cute.arch.vote_any_sync(mine)
    factors = (Float32(1.0), Float32(1.0))
    if moved:
        factors = refer_to(plan, tops, reference, scope.scalars)
    return moved, factors


@cute.jit
def weigh(
    plan: PortablePlan, scope: Scope, scores: cute.Tensor, p: cute.Tensor, reference: Reference
) -> tuple[Float32, Float32]:
    """S becomes weights, and P; returns the lane's sums of them."""
    exponentiate(plan, scores, reference, scope.scalars, 0, cute.size(scores))
    round_weights(plan, scores, p)
    return tile_sums(plan, scores, p)
