"""What the lanes of a warp say to each other, and floats that compare as integers (device code)."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

LOWEST = -(1 << 31)  # below the key of any number; what can no longer be chosen


@cute.jit
def key_of(value: Float32) -> Int32:
    """An integer that is larger where the number is larger; NaN counts as -inf."""
    return flip(number(value).bitcast(Int32))


@cute.jit
def number(value: Float32) -> Float32:
    """-inf for NaN."""
    return cute.arch.fmax(value, -Float32.inf)


@cute.jit
def value_of(key: Int32) -> Float32:
    """The number of a key."""
    return flip(key).bitcast(Float32)


@cute.jit
def flip(bits: Int32) -> Int32:
    """Negative floats grow as their magnitude falls: all bits but the sign change. Its own inverse,
    and +0 stands above -0."""
    return bits ^ ((bits >> 31) & Int32(0x7FFFFFFF))


@cute.jit
def is_first(mask: Int32, lane: Int32) -> Boolean:
    """Whether no lane below `lane` is in the mask."""
    return (mask & lanes_below(lane)) == 0


@cute.jit
def lanes_below(lane: Int32) -> Int32:
    """A mask of them."""
    return (Int32(1) << lane) - 1


@cute.jit
def lanes_alike(value: Int32, bits: cutlass.Constexpr[int]) -> Int32:
    """A mask of the lanes whose values have the same lowest `bits`, by all 32 lanes.

    A vote for each bit: match.any takes its time over many different values.
    """
    alike = Int32(-1)
    for bit in cutlass.range_constexpr(bits):
        is_set = (value >> bit) & 1
        alike = alike & (cute.arch.vote_ballot_sync(is_set != 0) ^ (is_set - 1))
    return alike


@cute.jit
def lanes_equal(value: Int32) -> Int32:
    """A mask of the lanes that hold the same value, by all 32 lanes."""
    return cute.arch.inline_ptx(
        "match.any.sync.b32 {$w0}, {$r0}, 0xffffffff;",
        write_only_types=[Int32],
        read_only_args=[value],
    )
