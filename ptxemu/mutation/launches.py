"""Every launch of a module, whoever makes it, sent through a function of one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ptxemu.module import Module
from ptxemu.report import LaunchReport

Launch = Callable[..., LaunchReport]


@contextmanager
def launching(through: Callable[[Launch, Module], Launch]) -> Iterator[None]:
    """Within the block a launch of a module is `through(launch, module)(entry, ...)`, where
    launch(module, entry, ...) is `Module.launch`."""
    launch = Module.launch

    def instead(self: Module, *args: Any, **kwargs: Any) -> LaunchReport:
        return through(launch, self)(*args, **kwargs)

    Module.launch = instead  # type: ignore[method-assign]
    try:
        yield
    finally:
        Module.launch = launch  # type: ignore[method-assign]
