"""Where the CPU time of an emulated launch goes: samples of the stack, each worth the time it ends.

A timer interrupts the process every millisecond. What the process has computed since the last time
belongs to the part of ptxemu that is found on the stack: samples add up to the CPU time whatever
else the machine does, and a long call into C is one sample of its full length. A profiler that
times every call would charge short functions for its own work.

What one call into compiled code does counts as its caller: a native block is arithmetic with the
loads and stores that are compiled into it. A garbage collection is the host's, since it goes
through everything that the process has imported, wherever it begins.
"""

from __future__ import annotations

import gc
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from types import FrameType

PARTS = ARITHMETIC, MEMORY, MMA, SCHEDULING, CHECKER, HOST = (
    "arithmetic", "memory", "mma", "scheduling", "checker", "host",
)  # fmt: skip
PERIOD = 1e-3  # seconds

# Beginnings of paths below ptxemu/. An asked-for operation is what its first frame says: an MMA
# that reads shared memory is MMA, a barrier's word is scheduling.
ASKED = {
    MMA: (
        *("machine/mma", "machine/scale_factors", "machine/tensor_core", "machine/umma_desc"),
        *("machine/wgmma", "ops/tcgen05_mma", "ops/warp_mma", "ops/wgmma"),
    ),
    MEMORY: (
        *("machine/access", "machine/im2col", "machine/memory", "numerics/swizzle"),
        *("machine/tensor_map", "machine/tma_tile", "machine/tmem"),
        *("ops/async_copy", "ops/atomics", "ops/load_store", "ops/matrix_copy"),
        *("ops/tcgen05_copy", "ops/tensor_copy"),
    ),
    SCHEDULING: ("machine/mbarrier", "ops/barriers", "ops/mbarrier"),
}
# And of what is on the stack all the time: the innermost frame says what it is.
AROUND = {
    CHECKER: ("codegen/tainted", "machine/listener"),
    SCHEDULING: ("machine/",),
    ARITHMETIC: ("codegen/", "native/", "numerics/", "ops/"),
}
CHECKS = ("check/", "trace")
GENERATED = "<ptxemu"  # how the file names of generated code begin
BEGIN = "machine/machine.py", "run"  # everything a launch executes is below this function


def sampled(call: Callable[[], object], seconds: float) -> dict[str, float]:
    """Part -> its share of the CPU time of calls, as many as fill so many seconds of it. Of the
    main thread alone, which signals come to."""
    sampler = _Sampler()
    before = signal.signal(signal.SIGALRM, sampler.take)
    gc.callbacks.append(sampler.collection)
    signal.setitimer(signal.ITIMER_REAL, PERIOD, PERIOD)
    begin = time.process_time()
    try:
        while time.process_time() - begin < seconds:
            call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.callbacks.remove(sampler.collection)
    total = sum(sampler.found.values())
    return {part: sampler.found[part] / total for part in PARTS}


class _Sampler:
    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self._last = self._collecting = time.process_time()

    def take(self, _signal: int, frame: FrameType | None) -> None:
        self.found[part_of(frame)] += time.process_time() - self._last
        self._last = time.process_time()  # what the sample itself took is nobody's

    def collection(self, phase: str, _info: dict[str, int]) -> None:
        """A callback of the garbage collector: its time is taken out of the sample around it."""
        if phase == "start":
            self._collecting = time.process_time()
        else:
            # a sample may have been taken on the way
            took = time.process_time() - max(self._collecting, self._last)
            self.found[HOST] += took
            self._last += took


def part_of(frame: FrameType | None) -> str:
    """Of a stack, by its innermost frame. Whatever the checker calls is the checker."""
    asked = innermost = ""
    while frame is not None:
        kind, part = _place(frame.f_code.co_filename, frame.f_code.co_name)
        if kind == "check":
            return CHECKER
        if kind == "begin":
            return asked or innermost or SCHEDULING
        if kind == "asked":
            asked = part
        innermost = innermost or part
        frame = frame.f_back
    return HOST


@cache
def _place(file: str, function: str) -> tuple[str, str]:
    """('check', 'begin', 'asked', 'around' or '', part)."""
    if file.startswith(GENERATED):
        return "around", ARITHMETIC
    _, package, path = file.replace("\\", "/").rpartition("/ptxemu/")
    if not package:
        return "", ""
    if path.startswith(CHECKS):
        return "check", CHECKER
    if (path, function) == BEGIN:
        return "begin", ""
    for kind, table in (("asked", ASKED), ("around", AROUND)):
        for part, paths in table.items():
            if path.startswith(paths):
                return kind, part
    return "", ""
