"""Store of O of 16 rows to global memory (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint16, Uint32

from fmha.portable.args import Scope
from fmha.portable.plan import PortablePlan
from fmha.shared.args import Lane, Work
from fmha.shared.epilogue import rotate_back, round_output, store_pieces
from fmha.shared.two_rows import rescale
from fmha.shared.walk import entry_of_q
from kernelkit.device.narrow import inverse_of

TRADED = 32  # columns whose pieces four lanes exchange, so that each lane stores a longer piece


@cute.jit
def store_o(
    plan: PortablePlan,
    work: Work,
    lane: Lane,
    o: cute.Tensor,
    factors: tuple[Float32, Float32],
    scope: Scope,
) -> None:
    """Store the slice's columns: normalised, rotated back and rounded per the config."""
    layout, config = plan.layout, plan.config
    if cutlass.const_expr(config.normalize):
        rescale(o, factors)
    whole = layout.o_columns * layout.shape.slices == config.v_dim
    if cutlass.const_expr(config.rope_dim > 0):
        rotate_back(plan, work, lane, o, scope, whole=whole)
    rounded = round_output(plan, o, inverse_of(scope.tensors.tables.out_scale))
    if cutlass.const_expr(whole and (layout.o_columns % TRADED == 0 or config.out_bytes == 4)):
        store_pieces(plan, work, lane, rounded, scope)
    else:
        store_pairs(plan, work, lane, rounded, scope)


@cute.jit
def store_pairs(
    plan: PortablePlan, work: Work, lane: Lane, rounded: cute.Tensor, scope: Scope
) -> None:
    """Store two adjacent columns at a time, for columns that exist."""
    columns, entry = plan.layout.o_columns, entry_of_q(plan, work)
    unit = Uint16 if plan.config.out_bytes == 1 else Uint32
    unit_bytes = unit.width // 8
    size = 2 * plan.config.out_bytes // unit_bytes  # units of two columns
    words = cute.recast_tensor(rounded, unit)
    pair = cute.make_rmem_tensor(size, unit)
    for half in cutlass.range_constexpr(2):
        row = lane.rows[half]
        if lane.real[half]:
            line = scope.tensors.o[work.q_start + row.token, None, row.head, entry]
            start = cute.recast_ptr(line.iterator, dtype=unit)
            for block in cutlass.range_constexpr(columns // 8):
                column = lane.part * columns + 8 * block + lane.column
                if column < plan.config.v_dim:
                    for word in cutlass.range_constexpr(size):
                        pair[word] = words[(2 * block + half) * size + word]
                    target = (start + column // 2 * size).align(unit_bytes * size)
                    cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(size)))
