"""Random operations by seed, and a failing list of them made short.

A list of operations is a log that `fails` runs again, so what fails after a million operations
fails again from a file of a few.
"""

from __future__ import annotations

import inspect
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter

from kvcache.books.checkpoints import Policy
from kvcache.books.slot_pool import Sizes
from lab.soak.cases import CASES, Case
from lab.soak.driver import Driver, Operation

# operation -> how often, of the sum
WEIGHTS = {
    "admit": 7,
    "append": 20,
    "append_unknown": 10,
    "resolve": 8,
    "rollback": 9,
    "fork": 4,
    "free": 6,
    "preempt": 1.5,
    "resume": 3,
    "offload": 2,
    "fetch": 3,
    "clear": 0.1,
    "abandon": 0.6,
    "discard": 0.6,
    "over": 13,
    "report": 4,
    "poll": 1,
    "misuse": 3,
}
HIGHEST = 1 << 16  # of an operation's numbers
DEEP = 64  # checkpoints and all requests are looked at after so many operations, at most


@cache
def takes(operation: str) -> int:
    """How many numbers an operation takes."""
    return len(inspect.signature(getattr(Driver, operation)).parameters) - 1  # without self


def drawn(seed: int, operations: int) -> list[Operation]:
    """So many operations, always the same ones of a seed."""
    source = random.Random(seed)
    kinds = source.choices(list(WEIGHTS), list(WEIGHTS.values()), k=operations)
    return [(kind, tuple(source.randrange(HIGHEST) for _ in range(takes(kind)))) for kind in kinds]


def case_of(name: str, seed: int) -> Case:
    """A case; for most seeds with pools and a policy of their own."""
    source = random.Random(seed)
    if seed % 4 == 0:
        return CASES[name]
    sizes = Sizes(
        blocks=source.randint(10, 48),
        states=source.randint(1, 7),
        checkpoints=source.randint(0, 6),
        host_blocks=source.randint(0, 16),
        host_states=source.randint(0, 3),
    )
    every = source.choice([None, 1, 2, 3])
    policy = Policy(every, prompt_end=source.random() < 0.7, rolling=source.random() < 0.7)
    return replace(CASES[name], sizes=sizes, policy=policy)


@dataclass(frozen=True)
class Failure:
    """What broke, and the operations after which it did."""

    error: str
    trace: str
    log: list[Operation]


@dataclass(frozen=True)
class Run:
    """One life of a cache."""

    case: str
    seed: int
    operations: int
    counts: Counter[str]
    seconds: float
    failure: Failure | None = None


def run(case: str, seed: int, operations: int, every: int = 1) -> Run:
    """Random operations on a fresh cache; contents are compared after `every` of them."""
    begun = perf_counter()
    driver = Driver(case_of(case, seed), every=every)
    failure = None
    try:
        for index, (operation, numbers) in enumerate(drawn(seed, operations)):
            driver.run(operation, *numbers)
            if index % DEEP == 0:
                driver.ledger.deep()
        driver.finish()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is to be shrunk
        failure = Failure(repr(error), traceback.format_exc(), driver.log)
    return Run(case, seed, len(driver.log), driver.counts, perf_counter() - begun, failure)


def fails(case: str, seed: int, log: Sequence[Operation]) -> str:
    """What breaks when a log is replayed on the cache of that seed, "" for nothing."""
    driver = Driver(case_of(case, seed))
    try:
        for operation, numbers in log:
            driver.run(operation, *numbers)
        driver.finish()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__
    return ""


def shrunk(
    log: Sequence[Operation], broken: Callable[[Sequence[Operation]], bool]
) -> list[Operation]:
    """Operations left out while what is left is still `broken`: half of them at a time, at last
    one by one; then their numbers made small."""
    log, size = list(log), len(log) // 2
    while size:
        at = 0
        while at < len(log):
            without = log[:at] + log[at + size :]
            if broken(without):
                log = without
            else:
                at += size
        size = size // 2 if size > 1 or len(log) > 100 else 0
    for at, (operation, numbers) in enumerate(log):
        for place, number in enumerate(numbers):
            for smaller in (0, 1, 2, number % 8, number % 40):
                changed = (*numbers[:place], smaller, *numbers[place + 1 :])
                shorter = [*log[:at], (operation, changed), *log[at + 1 :]]
                if smaller < number and broken(shorter):
                    log, numbers = shorter, changed
                    break
    return log
