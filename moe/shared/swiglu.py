"""SwiGLU of columns in registers (device code): h = (up + beta) (gate sigmoid(alpha gate)).

Gate is clamped above only, up on both sides (the form of gpt-oss and DeepSeek-V4).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from kernelkit.plan.log2 import LOG2_E


@cute.jit
def swiglu(config: cutlass.Constexpr, numbers: object, values: cute.Tensor) -> cute.Tensor:
    """Convert fp32 (N,), alternating config.granularity columns of gate and of up, to fp32 (N /
    2,)."""
    width = config.granularity
    result = cute.make_rmem_tensor(cute.size(values) // 2, Float32)
    for index in cutlass.range_constexpr(cute.size(result)):
        pair, inside = divmod(index, width)
        weight = gate_weight(config, numbers, values[2 * pair * width + inside])
        result[index] = weighted_up(
            config, numbers, values[(2 * pair + 1) * width + inside], weight
        )
    return result


@cute.jit
def gate_weight(config: cutlass.Constexpr, numbers: object, gate: Float32) -> Float32:
    """Return the factor of up: gate sigmoid(alpha gate)."""
    if cutlass.const_expr(config.limit):
        gate = cute.arch.fmin(gate, numbers.limit, nan=True)
    return gate * sigmoid(numbers.alpha * gate)


@cute.jit
def weighted_up(
    config: cutlass.Constexpr, numbers: object, up: Float32, weight: Float32
) -> Float32:
    """Return (up + beta) weight."""
    if cutlass.const_expr(config.limit):
        up = cute.arch.fmin(up, numbers.limit, nan=True)
        up = cute.arch.fmax(up, -numbers.limit, nan=True)
    return (up + numbers.beta) * weight


@cute.jit
def sigmoid(x: Float32) -> Float32:
    """1 / (1 + exp(-x))."""
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))
