"""Kernels compiled in processes of their own, which leave them in the cache on disk."""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from kernelkit.compile import store
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import ready
from lab.problems.draws import Kernel

Compiled = tuple[Kernel, float, str]  # seconds; what was wrong, '' for nothing


def compiled(
    kernels: Sequence[Kernel],
    keys: Callable[[Kernel], Sequence[KernelKey]],
    jobs: int,
    seconds: float,
) -> Iterator[Compiled]:
    """Each kernel as soon as all of its keys are there, as far as they come within `seconds`.

    `keys` is called in a thread, for one kernel after the other, while the first ones compile: it
    may draw thousands of problems. ValueError where there is no cache through which processes could
    hand kernels over.
    """
    if store.from_environment() is None:
        raise ValueError(f"{store.VARIABLE} switches the cache off: --jobs 1 compiles without one")
    ends = time.monotonic() + seconds
    numbered = ((number, keys(kernel)) for number, kernel in enumerate(kernels))
    with multiprocessing.get_context("spawn").Pool(jobs, _leave_interrupts) as pool:
        results = pool.imap_unordered(_compile, numbered)
        for _ in kernels:
            try:
                left = max(ends - time.monotonic(), 0.0)
                number, *found = results.next(timeout=None if left == math.inf else left)
            except multiprocessing.TimeoutError:
                return
            yield kernels[number], *found


def _leave_interrupts() -> None:
    """To the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(numbered: tuple[int, Sequence[KernelKey]]) -> tuple[int, float, str]:
    number, keys = numbered
    began, wrong = time.monotonic(), ""
    try:
        for key in keys:
            ready(key)
    except Exception as error:  # noqa: BLE001 - of one kernel, whatever it is
        wrong = f"{type(error).__name__} while compiling: {error}"
    return number, time.monotonic() - began, wrong
