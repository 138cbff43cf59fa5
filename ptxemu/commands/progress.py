"""How far a long launch is, on stderr."""

from __future__ import annotations

import sys
import time

_FIRST, _NEXT = 5.0, 20.0  # seconds


class Progress:
    """For `Options.progress`: says nothing of what is quick."""

    def __init__(self) -> None:
        self._began = self._said = 0.0
        self._last = (0, 0)

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if total != self._last[1] or done < self._last[0]:  # another launch
            self._began = self._said = now
        self._last = done, total
        seconds = now - self._began
        if seconds >= _FIRST and now - self._said >= (
            _NEXT if self._said > self._began else _FIRST
        ):
            self._said = now
            left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
            told = f"ptxemu: {done} of {total} clusters after {seconds:.0f} s{left}"
            print(told, file=sys.stderr, flush=True)
