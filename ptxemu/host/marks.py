"""Marks of torch storages that count as memory of the pretended GPU.

All memory is the host's, so the difference is a mark: on storages, which views share. A mark leaves
with its storage. Threads may share one instance.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

_FIRST_LOOK = 1024  # marks, before those of storages that are gone are looked for


class Marks:
    """Storages on the pretended GPU, by weak references, which keep no memory alive."""

    def __init__(self) -> None:
        # A weak reference keeps the address of the (freed) storage object from being used again.
        self._marked: dict[int, Any] = {}
        self._look_at = _FIRST_LOOK
        self._forgetting = threading.Lock()

    def add(self, storage: Any) -> None:
        """Mark an UntypedStorage."""
        key = storage._cdata
        if key in self._marked:
            return
        if len(self._marked) >= self._look_at:
            self._forget()
        reductions: Any = import_module("torch.multiprocessing.reductions")
        self._marked[key] = reductions.StorageWeakRef(storage)

    def holds(self, tensor: Any) -> bool:
        """Whether a tensor is in marked memory."""
        try:
            return tensor.untyped_storage()._cdata in self._marked
        except (NotImplementedError, RuntimeError):  # it has no storage
            return False

    def any_of(self, keys: set[int]) -> bool:
        """Whether one of `keys_of` some tensors is marked."""
        return not self._marked.keys().isdisjoint(keys)

    def add_tensors(self, value: Any) -> None:
        """Mark the memory of the CPU tensors among a value, in tuples, lists and dicts."""
        for tensor in tensors_in(value):
            storage = storage_of(tensor)
            if storage is not None and storage.device.type == "cpu":
                self.add(storage)

    def _forget(self) -> None:
        """Drop the marks of storages that are gone; by one thread at a time."""
        if not self._forgetting.acquire(blocking=False):
            return
        try:
            for key, reference in [*self._marked.items()]:
                if reference.expired():
                    del self._marked[key]
            self._look_at = max(_FIRST_LOOK, 2 * len(self._marked))
        finally:
            self._forgetting.release()


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors among a value, in tuples, lists and dicts."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def storage_of(tensor: Any) -> Any:
    """Return the UntypedStorage of a tensor, or None if it has none, as fake and sparse ones."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def keys_of(tensors: list[Any]) -> set[int]:
    """Return a number for each storage of tensors, valid while it exists."""
    storages = map(storage_of, tensors)
    return {storage._cdata for storage in storages if storage is not None}
