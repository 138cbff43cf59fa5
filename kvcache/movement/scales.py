"""The power of two by which a group of elements is divided, as its exponent byte (device code)."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from kernelkit.device.words import bits_of, float_of

MANTISSA = 23
INFINITY, NAN_CODE, NAN_BITS = 0x7F800000, 255, 0x7FFFFFFF
LARGEST_CODE = 254  # exponent byte of a finite number


@dataclass(frozen=True)
class ScaleRule:
    """The rule s = 2^ceil(log2(max(amax / largest, least))), with largest = x * 2^exponent.

    carry: what the mantissa of x lacks of 2, less a bit; added to amax it carries into the exponent
    where x is exceeded. least: the exponent byte of the smallest power that is not below the least
    scale.
    """

    carry: int
    exponent: int
    least: int


E4M3_RULE = ScaleRule(0x1FFFFF, 8, 127 - 13)  # 448 is 1.75 * 2^8; 2^-13 is not below 1e-4
E2M1_RULE = ScaleRule(0x3FFFFF, 2, 1)  # 6 is 1.5 * 2^2; 2^-126, of which inverses are normal


@cute.jit
def scale_code(
    values: cute.Tensor,
    lanes: cutlass.Constexpr[int],
    rule: cutlass.Constexpr[ScaleRule] = E4M3_RULE,
) -> Uint32:
    """The exponent byte of the scale of a group, in all lanes that share the group (4, 8 or 16);
    NAN_CODE where one of its elements is not finite."""
    top = Float32(0.0)
    for index in cutlass.range_constexpr(cute.size(values)):
        magnitude = float_of(bits_of(values[index]) & Uint32(0x7FFFFFFF))
        top = cute.arch.fmax(top, magnitude, nan=True)
    bits = bits_of(top)  # in the order of the numbers, NaN last
    for step in (1, 2, 4, 8):
        if cutlass.const_expr(step < lanes):
            bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, step))
    code = cutlass.max(Int32((bits + rule.carry) >> MANTISSA) - rule.exponent, Int32(rule.least))
    return Uint32(NAN_CODE) if bits >= INFINITY else Uint32(code)


@cute.jit
def scale_bits(code: Uint32) -> Uint32:
    """The scale in fp32, which is a normal number, or a NaN."""
    return Uint32(NAN_BITS) if code == NAN_CODE else code << MANTISSA


@cute.jit
def inverse_of(code: Uint32) -> Float32:
    """The factor of elements: 1 / s exactly, and a NaN for NAN_CODE."""
    bits = (Uint32(LARGEST_CODE) - code) << MANTISSA
    return float_of(Uint32(NAN_BITS) if code == NAN_CODE else bits)
