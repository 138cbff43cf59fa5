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
        self._words: dict[int, int] = {}  # the first parameter with this word: others are its maps
        for number, (offset, nbytes) in enumerate(places):
            for at in range(offset, offset + nbytes - _WORD + 1, _WORD):
                word = int.from_bytes(params[at : at + _WORD].tobytes(), "little")
                self._words.setdefault(word, number)

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
        inside = sorted(word for word in self._words if block.start <= word < block.end)
        if not inside:
            return ""
        pointer = inside[max(bisect.bisect_right(inside, address) - 1, 0)]
        number, gap = self._words[pointer], address - pointer
        far = f" {'-' if gap < 0 else '+'} {abs(gap):,} bytes" if gap else ""
        return f"parameter {number}{far}"
