"""Threads that a program starts while it is run as if it had a GPU.

Python gives a new thread an empty context, and torch gives it no function mode. So its launches
would go past whoever watches, and its tensors would be asked for on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from typing import Any

from ptxemu.host.patching import patched


@contextmanager
def threads_within(entered: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """While active, a thread that starts runs within `entered()`, in a copy of the context of
    whoever starts it."""
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
