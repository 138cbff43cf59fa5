"""Which memory a program has allocated, as far as it can be seen from outside: torch's tensors."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import Any

from ptxemu.machine.memory import Range


class LiveTensors:
    """The storages of CPU tensors, from one look to the next."""

    def __init__(self) -> None:
        self._seen: dict[Range, Any] = {}  # range -> a weak reference to its storage

    def look(self) -> tuple[list[Range] | None, list[Range]]:
        """(ranges that are alive, None without torch; ranges freed since the last look)."""
        torch = sys.modules.get("torch")
        if torch is None:
            return None, []
        reductions: Any = import_module("torch.multiprocessing.reductions")

        freed = [range_ for range_, storage in self._seen.items() if storage.expired()]
        self._seen, kinds = {}, _with_subclasses(torch.Tensor)
        for item in [each for each in gc.get_objects() if type(each) in kinds]:
            if item.device.type == "cpu" and _stored(item):
                storage = item.untyped_storage()
                range_ = (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), True)
                self._seen[range_] = reductions.StorageWeakRef(storage)
        return sorted(self._seen), freed


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _stored(tensor: Any) -> bool:
    """Whether it has bytes of its own: a fake or sparse tensor has none."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False
