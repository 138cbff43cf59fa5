"""Load role of Q: one warp fills sQ once, zeros where there is no row.

Row r of a KV head is head r mod group of token r / group, for any group: no box of TMA has that
shape. Rows of 16 bits are copied by cp.async; with e4m3 keys `quantise` makes e4m3 of them.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from gqa_lowlatency.shared.args import Place, Tensors
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import ROLES, Plan100
from gqa_lowlatency.sm100.roles.quantise import quantise_row
from kernelkit.device import warp_mma
from kernelkit.device.swizzle import swizzled
from kernelkit.plan import hw


class LoadQ:
    """Owner of sQ until the MMA warp has it."""

    def __init__(self, plan: Plan100) -> None:
        self.plan = plan
        self.role = ROLES["load_q"]

    @property
    def begins_early(self) -> bool:
        """Whether copies begin before the CTA has met: not where they wait for a grid for which
        nothing else waits."""
        return not self.plan.is_fp8 and not self.plan.config.kv_ready

    @cute.jit
    def begin(self, tensors: Tensors, place: Place, target: Int32) -> None:
        """The first thing that the CTA does: what is asked for behind K and V comes behind them."""
        if cutlass.const_expr(self.plan.config.pdl):
            cute.arch.griddepcontrol_wait()
        self.copy_rows(tensors, place, target)

    @cute.jit
    def run(self, scope: Scope) -> None:
        """The rest of the warp's life. Q is what the grid before this one may still write."""
        if cutlass.const_expr(self.plan.config.pdl and not self.begins_early):
            cute.arch.griddepcontrol_wait()
        if scope.share.count > 0:
            if cutlass.const_expr(self.plan.is_fp8):
                for column in cutlass.range(self.plan.columns, unroll=4):
                    row, valid = self.row_of(scope.tensors, scope.place, column)
                    quantise_row(self.plan, scope, row, column, valid)
            elif cutlass.const_expr(not self.begins_early):
                self.copy_rows(scope.tensors, scope.place, scope.buffers.q.toint())
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        scope.pipes.q.signal(0)

    @cute.jit
    def copy_rows(self, tensors: Tensors, place: Place, target: Int32) -> None:
        """Neighbouring lanes take neighbouring 16 bytes of a row."""
        plan, config = self.plan, self.plan.config
        line_bytes, unit_bytes = hw.SMEM_LINE_BYTES, hw.SMEM_UNIT_BYTES
        per_row = config.head_dim * config.io_bytes // unit_bytes
        per_line = line_bytes // unit_bytes
        for turn in cutlass.range(plan.columns * per_row // hw.WARP_THREADS, unroll=4):
            index = turn * hw.WARP_THREADS + cute.arch.lane_idx()
            column, unit = index // per_row, index % per_row
            row, valid = self.row_of(tensors, place, column)
            panel, line = unit // per_line, unit % per_line
            offset = (panel * plan.columns + column) * line_bytes + line * unit_bytes
            warp_mma.copy_chunk(
                target + swizzled(offset, line_bytes),
                row.iterator.toint() + Int64(unit * unit_bytes),
                valid,
            )
        cute.arch.cp_async_commit_group()

    @cute.jit
    def row_of(self, tensors: Tensors, place: Place, column: Int32) -> tuple[cute.Tensor, Boolean]:
        """(row of Q of a column, whether there is one)."""
        config = self.plan.config
        row = place.row_tile * self.plan.columns + column
        valid = row < config.rows
        existing = row if valid else 0
        head = place.head * config.group + existing % config.group
        return tensors.q[place.entry, existing // config.group, head, None], valid
