"""Interleaved times, in a fresh random order per round, of kernels long enough to heat the GPU.

A GPU at its power limit slows down while it computes: the contestant that runs last runs hottest,
and one that follows a frugal contestant coolest. So no order of the contestants is kept for two
rounds. A turn is about TURN_SECONDS of calls of one of them, long enough for the clock to follow
its power; a sample is the median of the calls of a turn.

A call is timed between CUDA events. Optionally a buffer larger than L2 is overwritten before each
call, as `triton.testing.do_bench` does. The host has no part in a time: all calls are queued after
work that keeps the GPU busy. If the GPU reaches a call before the host has queued all of them, the
turn is repeated after more of such work.
"""

from __future__ import annotations

import random
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from lab.measure.timing import HEAD_START, smi

T = TypeVar("T")

HOW = (
    "median over turns of medians of calls, between CUDA events, enqueued behind work that keeps "
    "the GPU busy; the order of the contestants is drawn anew in each round"
)
TURN_SECONDS = 0.1  # of calls, as do_bench takes them
CALLS = (5, 100)  # of a turn, at least and at most
FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU
SMI = {"sm_mhz": "clocks.sm", "watts": "power.draw"}  # fields of nvidia-smi
MAX_HEAD_START = 64 * HEAD_START  # cycles, about 50 ms

Launch = Callable[[], object]  # only enqueues work on the current stream
Pair = tuple[torch.cuda.Event, torch.cuda.Event]


def how(rounds: int, *, flush: bool) -> dict[str, object]:
    """Return what a file of figures says of turns."""
    order = f"{rounds} rounds, {'cold L2' if flush else 'L2 as it is'}"
    return {"timing": HOW, "order": order, "flush": flush}


@dataclass(frozen=True)
class Turn:
    """Microseconds of a call, and in the midst of the turn sm_mhz and watts, where something says
    so in time; NVML's power is a mean over the last second."""

    us: float
    state: Mapping[str, float]


def take_turns(contestants: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return the results of each contestant, round by round. Orders are random but reproducible."""
    names = [*contestants]
    found: dict[str, list[T]] = {name: [] for name in names}
    orders = random.Random(rounds)
    for _ in range(rounds):
        for name in orders.sample(names, len(names)):
            found[name].append(contestants[name]())
    return found


def flush_buffer() -> torch.Tensor:
    """Return the buffer that is overwritten before a call."""
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


class Contestant:
    """Turns of one launch; flush: a buffer that is overwritten in front of each call."""

    def __init__(self, launch: Launch, flush: torch.Tensor | None) -> None:
        self.launch, self.flush = launch, flush
        self.head_start, self.calls = HEAD_START, CALLS[0]
        self.calls = calls_of(self().us)
        self()  # until the head start is enough for so many

    def __call__(self) -> Turn:
        """Run one round, with fewer calls if the host is too slow for any head start. Raise
        RuntimeError if even the fewest are too many."""
        pairs = self.enqueue()
        while pairs is None:
            if 2 * self.head_start <= MAX_HEAD_START:
                self.head_start *= 2
            elif self.calls > CALLS[0]:
                self.calls = max(CALLS[0], self.calls // 2)
            else:
                raise RuntimeError(f"{self.calls} calls take the host longer than the GPU")
            pairs = self.enqueue()
        pairs[len(pairs) // 4][0].synchronize()
        state = gpu_state()
        if pairs[-1][1].query():  # the turn was over first
            state = {}
        pairs[-1][1].synchronize()
        return Turn(statistics.median(begin.elapsed_time(end) * 1e3 for begin, end in pairs), state)

    def enqueue(self) -> list[Pair] | None:
        """Events around each call of a turn; None where the GPU came to one before all of it was
        there."""
        torch.cuda.synchronize()
        torch.cuda._sleep(self.head_start)
        pairs, late = [], False
        for _ in range(self.calls):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if self.flush is not None:
                self.flush.zero_()
            begin.record()
            self.launch()
            end.record()
            late = late or begin.query()
            pairs.append((begin, end))
        return None if late else pairs


def calls_of(us: float) -> int:
    """Calls that fill a turn."""
    least, most = CALLS
    return max(least, min(most, round(TURN_SECONDS * 1e6 / max(us, 1))))


def figures(turns: Sequence[Turn]) -> dict[str, object]:
    """Figures of one contestant: every sample, the median, (third quartile - first) / median, and
    the median state of the GPU."""
    samples = [turn.us for turn in turns]
    low, middle, high = statistics.quantiles(samples, n=4) if samples[1:] else samples * 3
    found: dict[str, object] = {
        "us": middle,
        "spread": (high - low) / middle,
        "samples_us": samples,
    }
    for name in dict.fromkeys(name for turn in turns for name in turn.state):
        found[name] = statistics.median(turn.state[name] for turn in turns if name in turn.state)
    return found


def gpu_state() -> dict[str, float]:
    """SM clock and power now; empty where nothing says so."""
    if meter() == "NVML":
        return {"sm_mhz": torch.cuda.clock_rate(), "watts": torch.cuda.power_draw() / 1000}
    if meter() == "nvidia-smi":
        found = smi([*SMI.values()])
        said = {name: found.get(field, "").partition(" ")[0] for name, field in SMI.items()}
        return {name: float(text) for name, text in said.items() if text[:1].isdigit()}
    return {}


@cache
def meter() -> str:
    """Tool that reads clock and power; empty where nobody does."""
    try:
        torch.cuda.clock_rate(), torch.cuda.power_draw()
    except Exception:  # noqa: BLE001  of a package that may not be there, and has its own errors
        return "nvidia-smi" if shutil.which("nvidia-smi") else ""
    return "NVML"
