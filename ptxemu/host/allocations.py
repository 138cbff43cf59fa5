"""Memory that a program has allocated, as far as it is visible from outside.

It includes torch's tensors and storages, numpy arrays that were arguments, and allocations of the
CUDA runtime's stubs.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

from ptxemu.machine.memory import Block, Range
from ptxemu.one_launch import one_at_a_time

_MOST_FREED = 1 << 14  # ranges that are remembered as freed
_EVERYTHING: Range = (0, 1 << 47, True)


class _Known(NamedTuple):
    block: Block
    is_gone: Callable[[], bool]


class _Witness:
    """An object that is frozen if the program has called `gc.freeze` since it was made."""


class LiveTensors:
    """Storages of CPU tensors, by weak references, which keep nothing alive.

    `note` and related methods add storages at once. `look` searches all objects of the garbage
    collector, which needs tens of milliseconds. Threads may share one instance.
    """

    def __init__(self) -> None:
        self._seen: dict[object, _Known] = {}
        self._freed: list[Range] = []
        self._forgotten = 0  # how many were freed before those in the list
        self._witness: _Witness | None = None  # made after the last look at frozen objects
        self._hidden = False  # the last look has not seen everything

    # -- what it is told ----------------------------------------------------------------------

    @one_at_a_time
    def note(self, values: Iterable[Any]) -> None:
        """Add tensors, storages and arrays among values, also in tuples and lists."""
        for value in values:
            if isinstance(value, tuple | list):
                self.note(value)
            elif hasattr(value, "untyped_storage"):
                if _stored(value):
                    self.note_storage(value.untyped_storage())
            elif type(value).__name__ == "UntypedStorage":
                if value.device.type == "cpu" and value.data_ptr():
                    self.note_storage(value)
            elif type(value).__module__ == "numpy" and hasattr(value, "ctypes"):
                self._note_array(value)

    @one_at_a_time
    def note_storage(self, storage: Any, block_bytes: int = 0) -> None:
        """Add a storage of torch; block_bytes: size of its block, if known."""
        start, key = storage.data_ptr(), storage._cdata
        end = start + storage.nbytes()
        known = self._seen.get(key)
        if known is None or known.block.start != start or known.block.end != end:
            reductions: Any = import_module("torch.multiprocessing.reductions")
            reference = reductions.StorageWeakRef(storage)
            block = Block(start, end, max(end, start + block_bytes))
            self._seen[key] = _Known(block, reference.expired)

    @one_at_a_time
    def note_memory(self, owner: Any, start: int, nbytes: int) -> None:
        """Add memory that exists as long as `owner`, which supports weak references."""
        reference = weakref.ref(owner)
        block = Block(start, start + nbytes, start + nbytes)
        self._seen["memory", id(owner)] = _Known(block, lambda: reference() is None)

    def _note_array(self, array: Any) -> None:
        while type(array.base).__module__ == "numpy" and hasattr(array.base, "ctypes"):
            array = array.base
        if array.nbytes:
            self.note_memory(array, array.ctypes.data, array.nbytes)

    # -- what it knows ------------------------------------------------------------------------

    @one_at_a_time
    def known(self) -> list[Block]:
        """Return the known blocks that still exist."""
        gone = [key for key, known in self._seen.items() if known.is_gone()]
        for key in gone:
            start, end, _ = self._seen.pop(key).block
            self._freed.append((start, end, True))
        surplus = len(self._freed) - _MOST_FREED
        if surplus > 0:
            del self._freed[:surplus]
            self._forgotten += surplus
        return [known.block for known in self._seen.values()]

    @one_at_a_time
    def look(self) -> list[Block]:
        """Return the known blocks after a search of all objects of the garbage collector."""
        torch = sys.modules.get("torch")
        if torch is not None:
            kinds = _with_subclasses(torch.Tensor) | {torch.UntypedStorage, _Witness}
            found = [each for each in gc.get_objects() if type(each) in kinds]
            self._hidden = self._hidden or self._has_been_frozen(found)
            self.note(found)
        return self.known()

    def _has_been_frozen(self, found: list[Any]) -> bool:
        """Whether objects were frozen since the last look, or ever at the first one."""
        if self._witness is None:
            self._witness = _Witness()
            return gc.get_freeze_count() > 0  # it walks over all of them: once
        return not any(each is self._witness for each in found)

    @one_at_a_time
    def look_at_frozen(self) -> list[Block]:
        """Return the known blocks, including those that `gc.freeze` hid from `look`.

        Call it after `look`. Hidden objects are unfrozen for this, and frozen again with all other
        existing objects. It is therefore used only if an address is not found otherwise, once for
        each `gc.freeze` of the program.
        """
        if self._hidden:
            gc.unfreeze()
            try:
                self.look()
            finally:
                gc.freeze()
            self._witness, self._hidden = _Witness(), False
        return self.known()

    @one_at_a_time
    def freed_since(self, mark: int) -> tuple[list[Range], int]:
        """Return what was freed after an earlier call that returned this mark, and a new mark. Too
        long ago, it may be anything."""
        self.known()
        first = mark - self._forgotten
        freed = [_EVERYTHING] if first < 0 else self._freed[first:]
        return freed, self._forgotten + len(self._freed)


LIVE = LiveTensors()  # of this process


def unseen(value: Any) -> bool:
    """Whether an argument may point to memory that `LIVE.note` does not learn of: a pointer, or a
    tensor of the DSL that was made before anybody listened."""
    if isinstance(value, tuple | list):
        return any(map(unseen, value))
    numpy = type(value).__module__ == "numpy"
    return not (
        value is None
        or numpy
        or type(value).__name__ == "CUstream"
        or isinstance(value, int | float | str)
        or hasattr(value, "untyped_storage")
    )


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _stored(tensor: Any) -> bool:
    """Whether a tensor has memory here; a fake or sparse tensor has none. A tensor may say that it
    is on a GPU which is only pretended; its storage does not."""
    try:
        storage = tensor.untyped_storage()
        return storage.device.type == "cpu" and storage.data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False
