"""What becomes e4m3 where K and V are: rows of Q, each with a scale of its own (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from gqa_lowlatency.shared.signature import TYPES
from gqa_lowlatency.sm100.args import Scope
from gqa_lowlatency.sm100.plan import Plan100
from kernelkit.device.online_softmax import bounded_factor
from kernelkit.device.shared_words import store
from kernelkit.device.swizzle import swizzled
from kernelkit.device.warp_mma import pack_e4m3
from kernelkit.plan import hw

LARGEST = 448.0  # e4m3
SMALLEST = 2.0**-100  # of a row's maximum, below which the row counts as zeros


@cute.jit
def quantise_row(
    plan: Plan100, scope: Scope, source: cute.Tensor, column: Int32, valid: Boolean
) -> None:
    """A row of Q to sQ by a whole warp, and the factor of its products to `row_scales`.

    The factor has the scales of the row, of K and of the softmax.

    valid: whether there is such a row.
    """
    config = plan.config
    lane, count = cute.arch.lane_idx(), config.head_dim // hw.WARP_THREADS
    values = cute.make_rmem_tensor(count, TYPES[config.dtype])
    values.fill(0.0)
    if valid:
        part = cute.make_tensor(
            (source.iterator + lane * count).align(count * config.io_bytes),
            cute.make_layout(count),
        )
        cute.autovec_copy(part, values)
    numbers = values.load().to(Float32)
    top = Float32(0.0)
    for k in cutlass.range_constexpr(count):
        top = cutlass.max(top, cutlass.max(numbers[k], -numbers[k]))
    top = cute.arch.warp_redux_sync(top, "fmax", nan=True)
    factor = LARGEST * cute.arch.rcp_approx(top) if top > SMALLEST else Float32(0.0)
    offset = lane * count // plan.panel * (plan.columns * plan.line_bytes)
    offset += column * plan.line_bytes + lane * count % plan.panel
    target = scope.buffers.q.toint() + swizzled(offset, plan.line_bytes)
    for first in cutlass.range_constexpr(0, count, 4):
        scaled = [numbers[first + k] * factor for k in range(min(count, 4))]
        store_bits(target + first, pack_e4m3(*scaled), 8 * len(scaled))
    if lane == 0:
        scalars = scope.scalars
        factor = scalars.softcap_log2 if config.softcap else scalars.scale_log2
        scale = top * (1.0 / LARGEST)
        if cutlass.const_expr(config.k_scale):
            scale = bounded_factor(
                scale * bounded_factor(factor * scope.tables.k_scale[scope.place.head])
            )
        else:
            scale *= factor
        store(scope.buffers.row_scales + column * 4, Float32, (scale,))


@cute.jit
def store_bits(address: Int32, word: Uint32, bits: cutlass.Constexpr) -> None:
    """The lowest 8, 16 or 32 bits of a word to shared memory."""
    cute.arch.inline_ptx(f"st.shared.b{bits} [{{$r0}}], {{$r1}};", read_only_args=[address, word])
