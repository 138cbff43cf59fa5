"""Where TMA and the tensor core expect the units of a swizzled line: 16 bytes each, in lines of 64
or 128 bytes of a buffer aligned to 1024 (device code; PTX ISA, "Swizzling modes").

A unit moves inside its line, by the number of whole 128 bytes before it.
"""

import cutlass
from cutlass import Int32

from kernelkit.plan import hw


def turn(line: Int32, line_bytes: cutlass.Constexpr) -> Int32:
    """What the numbers of the units of a line are XORed with."""
    units = line_bytes // hw.SMEM_UNIT_BYTES
    return line // (hw.SMEM_LINE_BYTES // line_bytes) % units


def swizzled(offset: Int32, line_bytes: cutlass.Constexpr) -> Int32:
    """A byte's place in the buffer."""
    return offset ^ (turn(offset // line_bytes, line_bytes) * hw.SMEM_UNIT_BYTES)
