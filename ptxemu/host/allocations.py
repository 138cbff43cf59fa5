"""Which memory a program has allocated, as far as it can be seen from outside: torch's tensors,
numpy arrays that were arguments, and what the stubs of the CUDA runtime have handed out."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

from ptxemu.machine.memory import Block, Range


class _Known(NamedTuple):
    block: Block
    is_gone: Callable[[], bool]


class LiveTensors:
    """The storages of CPU tensors, by weak references: it keeps nothing alive.

    `note` and the others tell of some at once; `look` goes through all objects that the garbage
    collector knows, which takes tens of milliseconds.
    """

    def __init__(self) -> None:
        self._seen: dict[object, _Known] = {}
        self._freed: list[Range] = []

    # -- what it is told ----------------------------------------------------------------------

    def note(self, values: Iterable[Any]) -> None:
        """Tell of tensors and arrays among values, also in tuples and lists."""
        for value in values:
            if isinstance(value, tuple | list):
                self.note(value)
            elif hasattr(value, "untyped_storage"):
                if value.is_cpu and _stored(value):
                    self.note_storage(value.untyped_storage())
            elif type(value).__module__ == "numpy" and hasattr(value, "ctypes"):
                self._note_array(value)

    def note_storage(self, storage: Any, block_bytes: int = 0) -> None:
        """Tell of a storage of torch, in a block of so many bytes where that is known."""
        start, key = storage.data_ptr(), storage._cdata
        end = start + storage.nbytes()
        known = self._seen.get(key)
        if known is None or known.block.start != start or known.block.end != end:
            reductions: Any = import_module("torch.multiprocessing.reductions")
            reference = reductions.StorageWeakRef(storage)
            block = Block(start, end, max(end, start + block_bytes))
            self._seen[key] = _Known(block, reference.expired)

    def note_memory(self, owner: Any, start: int, nbytes: int) -> None:
        """Tell of memory that is there as long as `owner`, which has weak references."""
        reference = weakref.ref(owner)
        block = Block(start, start + nbytes, start + nbytes)
        self._seen["memory", id(owner)] = _Known(block, lambda: reference() is None)

    def _note_array(self, array: Any) -> None:
        while type(array.base).__module__ == "numpy" and hasattr(array.base, "ctypes"):
            array = array.base
        if array.nbytes:
            self.note_memory(array, array.ctypes.data, array.nbytes)

    # -- what it knows ------------------------------------------------------------------------

    def known(self) -> list[Block]:
        """What is alive of that which has been seen or told of."""
        gone = [key for key, known in self._seen.items() if known.is_gone()]
        for key in gone:
            start, end, _ = self._seen.pop(key).block
            self._freed.append((start, end, True))
        return [known.block for known in self._seen.values()]

    def look(self) -> list[Block]:
        """The same after a look at all that is there."""
        torch = sys.modules.get("torch")
        if torch is not None:
            kinds = _with_subclasses(torch.Tensor)
            self.note([each for each in gc.get_objects() if type(each) in kinds])
        return self.known()

    def take_freed(self) -> list[Range]:
        """What has been freed since the last call."""
        self.known()
        freed, self._freed = self._freed, []
        return freed


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
    """Whether it has bytes of its own: a fake or sparse tensor has none."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False
