"""The softmax of 16 rows of a warp and some keys (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from fmha.portable.args import Scope, Seen
from fmha.portable.plan import PortablePlan
from fmha.portable.rows import own_lane
from fmha.shared.two_rows import (
    Reference,
    bring_near,
    exponentiate,
    mask,
    refer_to,
    round_weights,
    softcap,
    tile_sums,
    tops_of,
)
from fmha.shared.types import IO_TYPES
from kernelkit.device.branch import once


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
        mask(plan, scores, reference, lane, seen.key, 0, every)


@cute.jit
def follow_maximum(
    plan: PortablePlan, scope: Scope, tops: tuple[Float32, Float32], reference: Reference
) -> tuple[Boolean, tuple[Float32, Float32]]:
    """Return whether the maximum of any row of the warp moved, and the factors for O of both rows.

    The maximum of a row lags while no weight of the row is above 2 ** lag_log2. tops: the largest
    scores of the lane's rows so far.
    """
    scale, lag = scope.scalars.scale_log2, plan.config.lag_log2
    # (-inf) - (-inf) is NaN, the comparison false: a row that saw no key stays at -inf.
    rows = tuple((tops[half] - reference.row_max[half]) * scale > lag for half in range(2))
    moved = cute.arch.vote_any_sync(rows[0] or rows[1])
    factors = (Float32(1.0), Float32(1.0))
    if moved:
        factors = refer_to(plan, tops_of(reference, tops, rows), reference, scope.scalars)
    return moved, factors


@cute.jit
def weigh(
    plan: PortablePlan,
    scope: Scope,
    scores: cute.Tensor,
    p: cute.Tensor,
    reference: Reference,
    maximum_is_new: cutlass.Constexpr = True,
) -> tuple[Float32, Float32]:
    """S becomes weights, and P; returns the lane's sums of them.

    maximum_is_new: False if weights of far rows do not matter yet, since they ask for another one.
    """
    if cutlass.const_expr(maximum_is_new):
        bring_near(plan, scores, reference, scope.scalars)
    exponentiate(plan, scores, reference, scope.scalars, 0, cute.size(scores))
    round_weights(plan, scores, p)
    return tile_sums(plan, scores, p)
