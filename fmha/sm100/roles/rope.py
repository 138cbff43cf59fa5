"""The inverse rotation of the last dims of O, in registers (device code).

A model that caches rotated keys as values (multi-head latent attention) gets an O whose last dims
are rotated; turning them back by the angle of the query's position leaves relative positions.
"""

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.shared.args import Tables, Work
from fmha.shared.walk import angle_row
from fmha.sm100.args import OwnRow
from fmha.sm100.plan import Plan

VECTOR = 4  # fp32 angles of a 16-byte load


@cute.jit
def rotate_back(
    plan: Plan,
    work: Work,
    row: OwnRow,
    values: cute.Tensor,
    first: cutlass.Constexpr,
    tables: Tables,
) -> None:
    """values (N,): dims of O from `first` on; in a CTA pair `first` is that of its first half.

    Of them those in the last rope_dim, as neighbouring pairs (x, y), become
    (x cos + y sin, y cos - x sin), the angle being that of the row's position.
    """
    config = plan.config
    rope_begin = config.v_dim - config.rope_dim
    pairs = gcd(VECTOR, config.rope_dim // 2)
    position = angle_row(work, row.token, tables)
    for start in cutlass.range_constexpr(0, cute.size(values), 2 * pairs):
        dim = first + start - rope_begin
        last_dim = dim + (plan.layout.halves - 1) * plan.layout.o_columns
        part = cute.make_tensor(values.iterator + start, cute.make_layout(2 * pairs))
        if cutlass.const_expr(dim >= 0):
            rotate_pairs(part, tables, position, dim + row.half * (last_dim - dim))
        elif cutlass.const_expr(last_dim >= 0):
            if row.half == 1:
                rotate_pairs(part, tables, position, last_dim)


@cute.jit
def rotate_pairs(part: cute.Tensor, tables: Tables, position: Int32, dim: Int32) -> None:
    """Turn `part` (2 * pairs,), whose first element is dim `dim` of the rotated ones."""
    pairs = cute.size(part) // 2
    cos, sin = (cute.make_rmem_tensor(pairs, Float32) for _ in range(2))
    for table, angles in ((tables.cos, cos), (tables.sin, sin)):
        source = cute.local_tile(table[position, None], (pairs,), (dim // (2 * pairs),))
        cute.autovec_copy(source, angles)
    for pair in cutlass.range_constexpr(pairs):
        x, y = part[2 * pair], part[2 * pair + 1]
        part[2 * pair] = x * cos[pair] + y * sin[pair]
        part[2 * pair + 1] = y * cos[pair] - x * sin[pair]
