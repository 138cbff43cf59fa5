"""What is to happen once a library has been imported: at once, where it was imported before."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


@contextmanager
def on_arrival(actions: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Call `actions[name]()` when the top-level module of that name is there, now or within the
    block; each at most once."""
    awaited = {name: act for name, act in actions.items() if name not in sys.modules}
    for name, act in actions.items():
        if name not in awaited:
            act()
    finder = _Finder(awaited)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds nothing by itself: it gives the others' loaders something to do afterwards."""

    def __init__(self, awaited: dict[str, Callable[[], None]]) -> None:
        self._awaited = awaited

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        act = self._awaited.pop(fullname, None)
        if act is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, act)
        return spec


class _Loader(Loader):
    """The loader `own`, with `act` behind it; the module does not learn of it."""

    def __init__(self, own: Loader, act: Callable[[], None]) -> None:
        self._own = own
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        module.__loader__ = self._own
        self._own.exec_module(module)
        self._act()
