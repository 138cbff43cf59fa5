"""What scores and values of e4m3 tensors are multiplied by (device code). 1 is not multiplied by:
None stands for it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.shared.args import Tables, Work


@cute.jit
def score_scale(tables: Tables, work: Work, head: Int32) -> Float32 | None:
    """Of q.k, for a query head."""
    q_scale, k_scale = tables.q_scale, tables.k_scale
    if cutlass.const_expr(q_scale is None and k_scale is None):
        return None
    scale = Float32(1.0)
    if cutlass.const_expr(q_scale is not None):
        scale = scale * q_scale[head]
    if cutlass.const_expr(k_scale is not None):
        scale = scale * k_scale[work.kv_head]
    return scale


@cute.jit
def value_scale(tables: Tables, work: Work) -> Float32 | None:
    """Of V, and with it of O."""
    if cutlass.const_expr(tables.v_scale is None):
        return None
    return tables.v_scale[work.kv_head]
