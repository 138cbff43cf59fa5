"""Where a swizzle puts 16 bytes (device code; PTX ISA, "Swizzling modes")."""

import cutlass
from cutlass import Int32

from gqa_lowlatency.sm100.plan import LINE_BYTES, UNIT_BYTES


def swizzled(offset: Int32, line_bytes: cutlass.Constexpr) -> Int32:
    """A byte's place in a buffer of lines of 64 or 128 bytes, aligned to 1024.

    16 bytes move as a whole inside their line, by the number of whole 128 bytes before it.
    """
    units = line_bytes // UNIT_BYTES
    return offset ^ (offset // LINE_BYTES % units * UNIT_BYTES)
