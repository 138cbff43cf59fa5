"""Successive halving: the fastest of many contestants, by few samples of noisy times.

All are sampled a few times in turns, so that clocks drift alike for all of them; the slower half
leaves, and those who stay are sampled again. The last ones, and those who have to stay, get many
samples; those of them who are close, more of them, until their noise no longer hides who is first.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Sampler = Callable[[], float]  # microseconds of one launch
Name = TypeVar("Name", bound=Hashable)

FIRST = 3  # samples of each in a round
LAST = 21  # of the finalists, at least
FINALISTS = 6
MARGIN = 0.03  # candidates within this part of the fastest stay
SIGMAS = 2.0  # of both times, by which one has to be faster to be called so
PRECISE = 0.003  # relative error, from which more samples of a time say nothing new
MOST = 147  # samples of one contestant


@dataclass(frozen=True)
class Time:
    """Time of a candidate.

    us: median of the samples
    error: its relative standard error
    """

    us: float
    error: float
    samples: int

    @classmethod
    def of(cls, samples: Collection[float]) -> Time:
        """Estimate from quartiles, as of a normal distribution, so that outliers do not affect the
        spread."""
        middle = statistics.median(samples)
        low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [middle] * 3
        deviation = (high - low) / 1.349
        return cls(middle, 1.2533 * deviation / middle / len(samples) ** 0.5, len(samples))

    def beats(self, other: Time) -> bool:
        """Whether it is less by more than the noise of both."""
        noise = SIGMAS * (self.error**2 + other.error**2) ** 0.5
        return self.us < other.us * (1 - noise)


def race(
    samplers: Mapping[Name, Sampler], staying: Collection[Name], *, exhaustive: bool = False
) -> dict[Name, Time]:
    """The time of each; those who left early have fewer samples.

    Args:
        samplers: contestants; each call is one sample.
        staying: who is sampled to the end, whatever its times.
        exhaustive: nobody leaves.
    """
    taken: dict[Name, list[float]] = {name: [] for name in samplers}
    order, inside = random.Random(len(taken)), [*samplers]
    while not exhaustive and len(inside) > FINALISTS:
        _turns(samplers, inside, taken, FIRST, order)
        left = _faster_half(inside, taken, staying)
        if len(left) == len(inside):
            break
        inside = left
    missing = LAST - min((len(taken[name]) for name in inside), default=LAST)
    _turns(samplers, inside, taken, max(missing, 0), order)
    while unsure := _unsure(inside, taken, staying):
        _turns(samplers, unsure, taken, LAST, order)
    return {name: Time.of(samples) for name, samples in taken.items()}


def _unsure(
    inside: list[Name], taken: Mapping[Name, list[float]], staying: Collection[Name]
) -> list[Name]:
    """Return the candidates to sample again: possible winners and those to keep, while one is
    noisy."""
    times = {name: Time.of(taken[name]) for name in inside}
    close = min((time.us for time in times.values()), default=0.0) * (1 + MARGIN)
    asked = [name for name in inside if name in staying or times[name].us <= close]
    noisy = any(times[name].error > PRECISE for name in asked)
    return asked if noisy and max(times[name].samples for name in asked) < MOST else []


def _turns(
    samplers: Mapping[Name, Sampler],
    inside: list[Name],
    taken: dict[Name, list[float]],
    rounds: int,
    order: random.Random,
) -> None:
    for _ in range(rounds):
        for name in order.sample(inside, len(inside)):
            taken[name].append(samplers[name]())


def _faster_half(
    inside: list[Name], taken: Mapping[Name, list[float]], staying: Collection[Name]
) -> list[Name]:
    middles = {name: statistics.median(taken[name]) for name in inside}
    ranked = sorted(inside, key=middles.__getitem__)
    half = max(FINALISTS, len(ranked) // 2)
    close = middles[ranked[0]] * (1 + MARGIN)
    # Close candidates stay beyond the half, but at most half as many again.
    near = [name for name in ranked[half:] if middles[name] <= close]
    kept = {*ranked[:half], *near[: half // 2], *staying}
    return [name for name in inside if name in kept]
