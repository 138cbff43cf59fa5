"""The heap of the device, from which kernels allocate: CUDA C++ Programming Guide, "Dynamic Global
Memory Allocation and Operations".

It has the 8 MB that a GPU has by default, for all launches of the process. A block lives until a
kernel frees it; another launch may use and free it.
"""

from __future__ import annotations

import numpy as np

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.memory import GlobalMemory

SIZE = 8 << 20  # cudaLimitMallocHeapSize
_ALIGN = 16
_GAP = 16  # bytes between blocks, so that an access beyond one is outside
_POISON = 0xFF


class Heap:
    """blocks: bytes that were asked for, by address, in the order of allocation."""

    def __init__(self, size: int = SIZE) -> None:
        self._size = size
        self._arena: np.ndarray | None = None
        self._start = self._next = 0
        self.blocks: dict[int, int] = {}

    def allocate(self, nbytes: int, memory: GlobalMemory) -> int:
        """Return the address of a new block, or 0 if there is no room. `memory` then allows it."""
        taken = -(-nbytes // _ALIGN) * _ALIGN + _GAP
        address = self._place(taken) if 0 < nbytes <= self._size else 0
        if address and self._arena is not None:
            first = address - self._start
            self._arena[first : first + nbytes] = _POISON
            self.blocks[address] = nbytes
            memory.insert(address, nbytes)
        return address

    def _place(self, taken: int) -> int:
        """Addresses are not used again before the arena's end has been reached."""
        if self._arena is None:
            raw = np.zeros(self._size + _ALIGN, np.uint8)
            first = -raw.ctypes.data % _ALIGN
            self._arena = raw[first : first + self._size]
            self._start = self._next = self._arena.ctypes.data
        end = self._start + self._size
        if self._next + taken <= end:
            address, self._next = self._next, self._next + taken
            return address
        address = self._start
        for start, nbytes in sorted(self.blocks.items()):
            if address + taken <= start:
                return address
            address = start + -(-nbytes // _ALIGN) * _ALIGN + _GAP
        return address if address + taken <= end else 0

    def release(self, address: int, memory: GlobalMemory) -> None:
        """Free a block; HardwareRefusal for an address that is not the begin of one."""
        if not address:
            return
        if address not in self.blocks:
            raise HardwareRefusal(
                f"free of {address:#x}: not the begin of a block that malloc has returned, or"
                " freed before"
            )
        del self.blocks[address]
        memory.remove(address)

    def admit(self, memory: GlobalMemory) -> None:
        """A launch may access the blocks of the launches before."""
        for address, nbytes in self.blocks.items():
            memory.insert(address, nbytes)


HEAP = Heap()
