"""Global addresses in the words of a launch: which kernel parameter points there, how far on."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from ptxemu.machine.memory import Block, GlobalMemory

_WORD = 8  # bytes of a pointer, which structures align to as much


class Pointers:
    """places: (offset, bytes) of each parameter within `params`, all of them packed."""

    def __init__(
        self, memory: GlobalMemory, params: np.ndarray, places: Sequence[tuple[int, int]]
    ) -> None:
        self._memory = memory
        self._words = [
            (int.from_bytes(params[at : at + _WORD].tobytes(), "little"), number)
            for number, (offset, nbytes) in enumerate(places)
            for at in range(offset, offset + nbytes - _WORD + 1, _WORD)
        ]

    def name(self, address: int) -> str:
        """Such as "parameter 2 + 1,024 bytes"; "" where no parameter points to this allocation."""
        block = self._memory.block_at(address)
        return "" if block is None else self._from(address, block)

    def near(self, address: int, block: Block | None) -> str:
        """The same of an address outside of every allocation, from `block`, the nearest."""
        return "" if block is None else self._from(address, block)

    def of_block(self, block: Block) -> str:
        """Such as "parameter 2"."""
        return self._from(block.start, block).partition(" +")[0].partition(" -")[0]

    def _from(self, address: int, block: Block) -> str:
        inside = sorted((word, k) for word, k in self._words if block.start <= word < block.end)
        if not inside:
            return ""
        place = bisect.bisect_right(inside, (address, len(self._words)))
        pointer, number = inside[max(place - 1, 0)]
        gap = address - pointer
        far = f" {'-' if gap < 0 else '+'} {abs(gap):,} bytes" if gap else ""
        return f"parameter {number}{far}"
