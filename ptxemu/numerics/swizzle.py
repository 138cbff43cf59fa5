"""The shared-memory swizzles that TMA and tcgen05 share, as functions of the absolute address.

`Swizzle<B, M, S>` permutes 2**M-byte atoms: B address bits starting at bit M + S are XORed into the
B bits starting at bit M. Hardware takes the bits of the absolute shared-memory offset, not of the
offset inside a tile, so a tile may start anywhere inside the repeating pattern.
Source: PTX ISA, tensor swizzling modes and tcgen05 canonical layouts (same formula for both).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Offsets = TypeVar("Offsets", int, np.ndarray)


@dataclass(frozen=True)
class Swizzle:
    """Swizzle mode: `bits`, `base` and `shift` are the B, M and S of Swizzle<B, M, S>."""

    name: str
    bits: int
    base: int
    shift: int

    @property
    def span(self) -> int:
        """Bytes of one row of the pattern (32, 64, 128); 16 for the mode `none`."""
        return 1 << (self.base + self.bits)

    @property
    def period(self) -> int:
        """Bytes after which the permutation repeats; 1 for the mode `none`, the identity."""
        return 1 << (self.base + self.shift + self.bits) if self.bits else 1

    def apply(self, offsets: Offsets) -> Offsets:
        """Physical byte offset(s) of the logical byte offset(s); its own inverse. Int or array."""
        mask = (1 << self.bits) - 1
        return offsets ^ (((offsets >> (self.base + self.shift)) & mask) << self.base)


NONE = Swizzle("none", 0, 4, 3)
SWIZZLE_32B = Swizzle("32B", 1, 4, 3)
SWIZZLE_64B = Swizzle("64B", 2, 4, 3)
SWIZZLE_128B = Swizzle("128B", 3, 4, 3)
SWIZZLE_128B_ATOM_32B = Swizzle("128B_ATOM_32B", 2, 5, 2)

BY_NAME: dict[str, Swizzle] = {
    swizzle.name: swizzle
    for swizzle in (NONE, SWIZZLE_32B, SWIZZLE_64B, SWIZZLE_128B, SWIZZLE_128B_ATOM_32B)
}
