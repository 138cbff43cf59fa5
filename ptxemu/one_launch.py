"""Lock for one launch at a time: threads that launch wait for each other.

A program has one scratch for all of its launches, the checker has arrays of its own, and the
OpenBLAS of numpy has one number of threads. Two launches that alternate block by block would
overwrite each other's values there. Python runs one thread at a time anyway, so waiting costs next
to nothing.

The lock is reentrant: host code launches while it holds the lock, and so may a callback for the
progress of a launch.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Turn:
    """The lock of this process; a fork has a new one, since its parent's may be locked forever."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()


_turn = _Turn()


def launch_lock() -> threading.RLock:
    """The lock that a thread holds while it launches. Keep the object to release the same one."""
    return _turn.lock


def one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that launches, or that shares state with launches."""

    @functools.wraps(function)
    def in_turn(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with _turn.lock:
            return function(*args, **kwargs)

    return in_turn
