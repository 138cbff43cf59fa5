"""Load role of Q: one warp fills sQ once, zeros where there is no row.

Row r of a KV head is head r mod group of token r / group, for any group: no box of TMA has that
shape. Rows of 16 bits are copied by cp.async; with e4m3 keys `quantise` makes e4m3 of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import ROLES, Plan100
from gqa_lowlatency.sm100.roles.quantise import quantise_row
from kernelkit import hw, warp_mma
from kernelkit.swizzle import swizzled


class LoadQ:
    """Owner of sQ until the MMA warp has it."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = ROLES["load_q"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp. Q is what the grid before this one may still write."""
        if cutlass.const_expr(self.plan.config.pdl):
            cute.arch.griddepcontrol_wait()
        if scope.share.count > 0:
            if cutlass.const_expr(self.plan.is_fp8):
                for column in cutlass.range(self.plan.columns, unroll=4):
                    row, valid = self.row_of(scope, column)
                    quantise_row(self.plan, scope, row, column, valid)
            else:
                self.copy_rows(scope)
            cute.arch.fence_proxy("async.shared", space="cta")
            scope.pipes.q.signal(0)

    @cute.jit
    def copy_rows(self, scope: Scope) -> None:
        """Neighbouring lanes take neighbouring 16 bytes of a row."""
        plan, config = self.plan, self.plan.config
        line_bytes, unit_bytes = hw.SMEM_LINE_BYTES, hw.SMEM_UNIT_BYTES
        per_row = config.head_dim * config.io_bytes // unit_bytes
        per_line = line_bytes // unit_bytes
        for turn in cutlass.range(plan.columns * per_row // hw.WARP_THREADS, unroll=4):
            index = turn * hw.WARP_THREADS + cute.arch.lane_idx()
            column, unit = index // per_row, index % per_row
            row, valid = self.row_of(scope, column)
            panel, place = unit // per_line, unit % per_line
            offset = (panel * plan.columns + column) * line_bytes + place * unit_bytes
            warp_mma.copy_chunk(
                scope.buffers.q.toint() + swizzled(offset, line_bytes),
                row.iterator.toint() + Int64(unit * unit_bytes),
                valid,
            )
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)

    @cute.jit
    def row_of(self, scope: Scope, column: Int32) -> tuple[cute.Tensor, Boolean]:
        """(row of Q of a column, whether there is one)."""
        config, place = self.plan.config, scope.place
        row = place.row_tile * self.plan.columns + column
        valid = row < config.rows
        existing = row if valid else 0
        head = place.head * config.group + existing % config.group
        return scope.tensors.q[place.entry, existing // config.group, head, None], valid
