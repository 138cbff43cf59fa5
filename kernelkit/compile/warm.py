"""Kernels compiled before they are needed, with progress: for `warmup` of each family and for the
command line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TextIO

from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.compile.keys import KernelKey
from kernelkit.plan.limits import MAX_POSITION

Progress = Callable[[int, int, KernelKey, float], None]


@dataclass
class Warmed:
    """Result of a warm-up.

    seconds: seconds per kernel, including those found on disk
    """

    keys: list[KernelKey] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{len(self.keys)} kernels in {sum(self.seconds):.1f} s"


def warm(keys: Iterable[KernelKey], progress: Progress | bool | None = None) -> Warmed:
    """Find or compile each kernel once.

    Args:
        keys: of the kernels; one that comes twice counts once.
        progress: called behind each kernel with how many are done, of how many, its key, and
            seconds; True prints to stderr.

    Returns:
        The keys, and the seconds of each, of those found on disk as well.
    """
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress is {type(progress).__name__}, expected a function, bool or None")
    wanted, done = list(dict.fromkeys(keys)), Warmed()
    report = print_progress if progress is True else progress
    for number, key in enumerate(wanted, 1):
        start = time.perf_counter()
        ready(key)
        done.keys.append(key)
        done.seconds.append(time.perf_counter() - start)
        if report:
            report(number, len(wanted), key, done.seconds[-1])
    return done


def counts(name: str, values: Iterable[int], most: int = MAX_POSITION) -> list[int]:
    """The sizes of a warm-up, those above 0, as ints; TypeError or ValueError for what is no
    sequence of numbers from 0 to `most`."""
    is_row = isinstance(values, Iterable) and getattr(values, "ndim", 1) == 1
    if isinstance(values, str | bytes | Mapping) or not is_row:
        raise TypeError(f"{name} is {type(values).__name__}, expected a sequence of ints")
    found = [*values]
    for place, value in enumerate(found):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{name}[{place}] is {value!r}, expected int")
        if not 0 <= value <= most:
            raise ValueError(f"{name}[{place}] {value}: from 0 to {most}")
    return [int(value) for value in found if value]


def ready(key: KernelKey) -> CompiledKernel | None:
    """The kernel of a key, found or compiled."""
    return compile_once(key.config, key.arch, key.source)


def print_progress(
    number: int, count: int, key: KernelKey, seconds: float, file: TextIO | None = None
) -> None:
    """A line for each kernel."""
    line = f"[{number}/{count}] {seconds:6.2f} s  {key.title()}"
    print(line, file=file or sys.stderr, flush=True)


def kernels_over(
    sizes: Sequence[int], kernels_at: Callable[[int], list[KernelKey]]
) -> list[KernelKey]:
    """Return the kernels of all sizes, each once, for choices that change at thresholds.

    If two sizes choose the same kernels, the sizes between them are assumed to do so, too.

    sizes: sizes in any order
    kernels_at: returns the kernels of one size
    """
    ordered, known = sorted(set(sizes)), {}

    def at(place: int) -> list[KernelKey]:
        if place not in known:
            known[place] = kernels_at(ordered[place])
        return known[place]

    def look(low: int, high: int) -> None:
        if high - low > 1 and at(low) != at(high):
            middle = (low + high) // 2
            at(middle)  # which no other look asks for, where it is alone between two thresholds
            look(low, middle)
            look(middle, high)

    if ordered:
        at(0), at(len(ordered) - 1)
        look(0, len(ordered) - 1)
    return list(dict.fromkeys(key for place in sorted(known) for key in known[place]))
