"""What a load warp fetches: x by TMA and the weights as they lie, a stage of K at a time."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from kernelkit.device.boxes import Box, BoxPosition, copy_in
from moe.mixed.fragments import DEPTH
from moe.mixed.plan import ProductPlan
from moe.mixed.shared.args import Scope
from moe.mixed.shared.types import X_TYPES
from moe.sm100.args import Tile


def x_box(plan: ProductPlan) -> Box:
    """One unit of K of the fewest rows that are multiplied."""
    return Box(plan.widths[-1], DEPTH, X_TYPES[plan.config.x])


class Loader:
    """What fills the rings. Rows behind the last one, and K behind its end, arrive as zeros of x;
    the weights that these are multiplied by are those before."""

    def __init__(self, plan: ProductPlan) -> None:
        self.plan = plan
        self.role = plan.roles["load"]

    @cute.jit
    def stage_bytes(self, rows: Int32, others: cutlass.Constexpr) -> Int32:
        """Bytes of x of a stage of a tile that has so many rows, and as many others."""
        plan = self.plan
        size = Int32(others)
        for number in cutlass.range_constexpr(self.boxes):
            if self.is_needed(number, rows):
                size += plan.units * plan.widths[-1] * plan.line
        return size

    @property
    def boxes(self) -> int:
        """Of rows of a tile, that TMA fetches."""
        return 0 if self.plan.config.gather else self.plan.config.tile_rows // self.plan.widths[-1]

    def is_needed(self, number: int, rows: Int32) -> Boolean:
        """Whether box `number` has rows that are multiplied: twice as many as one, or all."""
        behind = self.plan.widths[-1] << number.bit_length() - 1 if number else 0
        return rows > behind

    @cute.jit
    def fetch_weights(
        self, scope: Scope, tile: Tile, step: Int32, stage: Int32, barrier: cute.Pointer
    ) -> None:
        """Those of one stage of a tile."""
        plan, sizes, buffers = self.plan, scope.sizes, scope.buffers
        every = scope.tensors.weights[tile.expert, None].iterator.toint()
        first = scope.share.first + step * plan.units
        for part in cutlass.range_constexpr(plan.tall):
            row = cutlass.min(tile.n * plan.tall + part, sizes.tall - 1)
            source = every + Int64(row * sizes.units + first) * plan.unit_bytes
            place = (stage * plan.tall + part) * plan.units
            target = buffers.w.toint() + place * plan.unit_bytes
            if first + plan.units <= sizes.units:
                copy_bytes(source, target, plan.units * plan.unit_bytes, barrier)
            else:
                for unit in cutlass.range_constexpr(plan.units):
                    own = cutlass.min(Int32(unit), sizes.units - 1 - first)
                    place = target + unit * plan.unit_bytes
                    copy_bytes(
                        source + Int64(own) * plan.unit_bytes, place, plan.unit_bytes, barrier
                    )

    @cute.jit
    def fetch_rows(
        self, scope: Scope, tile: Tile, step: Int32, stage: Int32, barrier: cute.Pointer
    ) -> None:
        """Rows of x of one stage, where they are not gathered."""
        plan, box = self.plan, x_box(self.plan)
        for number in cutlass.range_constexpr(self.boxes):
            if self.is_needed(number, tile.rows):
                for unit in cutlass.range_constexpr(plan.units):
                    row = tile.first + number * box.rows
                    column = scope.share.first + step * plan.units + unit
                    position = BoxPosition(row, column * DEPTH, 0, 0)
                    target = (stage * plan.units + unit) * self.boxes + number
                    copy_in(scope.x, box, position, box.at(scope.buffers.x, target), barrier)


@cute.jit
def copy_bytes(
    source: Int64, target: Int32, size: cutlass.Constexpr, barrier: cute.Pointer
) -> None:
    """Start to copy neighbouring bytes of global memory, whole 16 of them, to shared memory."""
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[{{$r0}}], [{{$r1}}], {size}, [{{$r2}}];",
            read_only_args=[target, source, Int32(barrier.toint())],
        )
