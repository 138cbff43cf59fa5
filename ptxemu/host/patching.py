"""Temporary changes to this process: attributes, environment, imports, threads."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar, copy_context
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex

if TYPE_CHECKING:
    from ptxemu.host.runtime_symbols import Launcher

# The launcher of a script that is run as if there were a GPU, by `python -m ptxemu`.

pretended: ContextVar[Launcher | None] = ContextVar("pretended", default=None)


_ABSENT = object()


@contextmanager
def patched(target: Any, replacements: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes of a module or class; on exit each is what it was, or gone if it was absent.

    An attribute that `target` only inherits counts as absent, so that restoring removes ours.
    """
    before = {name: vars(target).get(name, _ABSENT) for name in replacements}
    try:
        for name, value in replacements.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not _ABSENT:
                setattr(target, name, value)
            elif name in vars(target):
                delattr(target, name)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def on_arrival(actions: Mapping[str, Callable[[], None]]) -> Iterator[None]:
    """Call `actions[name]()` when the top-level module of that name is there, now or within the
    block; each at most once."""
    awaited = {name: act for name, act in actions.items() if name not in sys.modules}
    for name, act in actions.items():
        if name not in awaited:
            act()
    before, finder = sys.meta_path, _Finder(awaited)
    sys.meta_path = _FinderFirst([finder, *before])
    try:
        yield
    finally:
        before[:] = [each for each in sys.meta_path if each is not finder]
        sys.meta_path = before


class _FinderFirst(list[Any]):
    """Finders whose first one stays first: pytest inserts its own later, in front of all."""

    def insert(self, index: SupportsIndex, finder: Any) -> None:
        super().insert(max(int(index), 1), finder)


class _Finder(MetaPathFinder):
    """Finds nothing by itself: it gives the others' loaders something to do afterwards.

    A search is no import: torch asks whether there is a module `triton` long before a script
    imports it. So a module is awaited until it is executed.
    """

    def __init__(self, awaited: dict[str, Callable[[], None]]) -> None:
        self._awaited = awaited
        self._searched: set[str] = set()  # names that the other finders look for now

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._awaited or fullname in self._searched:
            return None
        self._searched.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searched.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda: self._arrived(fullname))
        return spec

    def _arrived(self, name: str) -> None:
        act = self._awaited.pop(name, None)
        if act is not None:
            act()


class _Loader(Loader):
    """Loader that calls `act` after the loader `own`; the module does not see it."""

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


# Threads that a program starts while it is run as if it had a GPU.
#
# Python gives a new thread an empty context, and torch gives it no function mode. Without this
# module, watchers would miss its launches, and its tensors would be requested on a GPU.


@contextmanager
def threads_within(entered: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within the block, run each started thread within `entered()`, in a copy of its starter's
    context."""
    start = threading.Thread.start

    def start_within(self: threading.Thread) -> None:
        context, run = copy_context(), self.run

        def run_within() -> None:
            vars(self).pop("run", None)  # else the thread would refer to itself
            with entered():
                run()

        self.run = lambda: context.run(run_within)  # type: ignore[method-assign]
        start(self)

    with patched(threading.Thread, {"start": start_within}):
        yield
