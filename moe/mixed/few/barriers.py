"""The mbarriers of the launch for few rows, by name (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from kernelkit.plan.hw import WARP_THREADS
from moe.mixed.few.args import Scope
from moe.mixed.few.config import GROUPS
from moe.mixed.few.plan import FewPlan


def weights_full(plan: FewPlan, scope: Scope, stage: Int32) -> cute.Pointer:
    """The weights of a stage are there."""
    return scope.buffers.barriers + stage


def rows_full(plan: FewPlan, scope: Scope, stage: Int32) -> cute.Pointer:
    """The rows of a stage are there."""
    return scope.buffers.barriers + (plan.config.stages + stage)


def stage_free(plan: FewPlan, scope: Scope, stage: Int32) -> cute.Pointer:
    """Every warp has read its part of a stage."""
    return scope.buffers.barriers + (2 * plan.config.stages + stage)


def sums_full(plan: FewPlan, scope: Scope) -> cute.Pointer:
    """Every warp has left its sums of a chunk."""
    return scope.buffers.barriers + (plan.boxes - 3)


def sums_free(plan: FewPlan, scope: Scope) -> cute.Pointer:
    """The sums of a chunk have been read."""
    return scope.buffers.barriers + (plan.boxes - 2)


def h_ready(plan: FewPlan, scope: Scope) -> cute.Pointer:
    """All CTAs have stored their part of h."""
    return scope.buffers.barriers + (plan.boxes - 1)


@cute.jit
def open_barriers(plan: cutlass.Constexpr[FewPlan], barriers: cute.Pointer) -> None:
    """Initialise all mbarriers, by the first thread of a warp."""
    stages, warps = plan.config.stages, plan.config.warps
    if cute.arch.lane_idx() == 0:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(barriers + stage, plan.weight_arrivals)
            cute.arch.mbarrier_init(barriers + (stages + stage), WARP_THREADS)
            cute.arch.mbarrier_init(barriers + (2 * stages + stage), warps)
        for number, count in enumerate((warps, GROUPS, 1)):
            cute.arch.mbarrier_init(barriers + (3 * stages + number), count)
    cute.arch.mbarrier_init_fence()


@cute.jit
def following(stage: Int32, parity: Int32, stages: cutlass.Constexpr[int]) -> tuple[Int32, Int32]:
    """Return the next stage of the ring, and the parity of its phase."""
    stage += 1
    if stage == stages:
        stage = Int32(0)
        parity = parity ^ 1
    return stage, parity
