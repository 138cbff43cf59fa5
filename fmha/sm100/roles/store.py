"""Store role: one warp sends O to global memory, panel by panel, as it is handed over."""

import cutlass
import cutlass.cute as cute

from fmha.shared.args import Scope
from fmha.shared.boxes import o_box, panel_at
from fmha.shared.order import count_rounds
from fmha.shared.walk import box_row, entry_of_q, locate, own_tile, stored_by_tma
from fmha.sm100.plan import Plan
from kernelkit.device.boxes import BoxPosition, copy_out
from kernelkit.device.pipelines import consumer_state


class Store:
    """Empties sO. Rows beyond the tensor are dropped; nobody waits for the rest of a copy."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.role = plan.roles["store"]

    @cute.jit
    def run(self, scope: Scope) -> None:
        """Whole life of the warp."""
        box, layout = o_box(self.plan), self.plan.layout
        pipes, order = scope.pipes, scope.tensors.order
        state = consumer_state(self.plan.edges["out"].stages)
        for turn in cutlass.range(count_rounds(self.plan, order), unroll=1):
            work = locate(self.plan, scope.tensors, turn)
            if stored_by_tma(self.plan, work):
                entry = entry_of_q(self.plan, work)
                for q_tile in cutlass.range_constexpr(layout.q_tiles):
                    tile = own_tile(self.plan, work, q_tile)
                    row = box_row(self.plan, work, tile)
                    for piece in cutlass.range_constexpr(layout.out_pieces):
                        pipes.out.wait(state)
                        for half in cutlass.range_constexpr(layout.halves):
                            column = out_column(self.plan, piece, half)
                            position = BoxPosition(row, column, work.head, entry)
                            index = state.index * layout.halves + half
                            source = panel_at(layout, box, scope.buffers.o, index)
                            copy_out(scope.tma.o, box, position, source)
                        cute.arch.cp_async_bulk_commit_group()
                        # The shared memory is the store's until the copy has read it.
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                        pipes.out.release(state.index)
                        state.advance()


def out_column(plan: Plan, piece: int, half: int) -> int:
    """First column of O in panel `piece` of a lane that holds this half of the row."""
    layout = plan.layout
    v_piece, column = divmod(piece * layout.o_panel, layout.o_columns)
    return v_piece * layout.o_tile + half * layout.o_columns + column
