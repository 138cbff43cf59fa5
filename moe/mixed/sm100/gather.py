"""Gather role: as on Hopper, but where a row comes from stays in registers.

The tensor core is done with a stage in half of the time: beside it a load of the token from shared
memory for each row would be what everybody waits for.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from kernelkit.device.boxes import swizzled
from kernelkit.device.warp_mma import CHUNK_BYTES, copy_chunk
from moe.mixed.fragments import DEPTH
from moe.mixed.shared import gather
from moe.mixed.shared.args import Scope
from moe.mixed.shared.gather import NO_ROW
from moe.sm100.args import Tile


class Gather(gather.Gather):
    """Fills the ring of x."""

    @cute.jit
    def find_rows(self, scope: Scope, tile: Tile) -> cute.Tensor:
        """The tokens of the thread's rows, Int32 in registers, NO_ROW where there is no row."""
        turns = -(-self.own // self.at_once)
        tokens = cute.make_rmem_tensor(turns, Int32)
        for turn in cutlass.range_constexpr(turns):
            inside = turn * self.at_once + cute.arch.lane_idx() // self.lanes
            row, token = self.warp() * self.own + inside, Int32(NO_ROW)
            if (inside < self.own) & (row < tile.rows):
                token = scope.tensors.rows[tile.first + row] // scope.sizes.slots
            tokens[turn] = token
        return tokens

    @cute.jit
    def fetch(self, scope: Scope, tokens: cute.Tensor, step: Int32, stage: Int32) -> None:
        """Begin to copy this warp's rows of a stage."""
        plan, x, lane = self.plan, scope.x, cute.arch.lane_idx()
        own_row, chunk = lane // self.lanes, lane % self.lanes
        size, width = plan.config.x_bits // 8, cute.size(x, mode=[1])
        first = scope.buffers.x.toint() + stage * (plan.units * plan.x_bytes)
        start = step * plan.units * DEPTH + chunk * (CHUNK_BYTES // size)
        for turn in cutlass.range_constexpr(cute.size(tokens)):
            inside, token = turn * self.at_once + own_row, tokens[turn]
            row = self.warp() * self.own + inside
            source = x[cutlass.max(token, 0), None].iterator.toint()
            place = first + swizzled(row * plan.line + chunk * CHUNK_BYTES, plan.line)
            if Boolean(inside < self.own):
                for unit in cutlass.range_constexpr(plan.units):
                    column = start + unit * DEPTH
                    valid = (token >= 0) & (column < width)
                    column = column if valid else Int32(0)
                    target = place + unit * plan.x_bytes
                    copy_chunk(target, source + Int64(column) * size, valid)
