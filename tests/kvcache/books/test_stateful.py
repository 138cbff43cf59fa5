"""The manager through any order of its operations, compared with a model that stores every token's
KV.

hypothesis chooses operations and shrinks failures; `scripts/soak.py` is the long run of the same
operations. `driver.Driver.verify` compares after each of them.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from kvcache.books.prefix import PrefixCache
from lab.soak.driver import Driver, Operation
from lab.soak.machine import Mismatch
from lab.soak.random_caches import WEIGHTS, drawn, fails, run, shrunk, takes
from lab.soak.small_caches import CASES, Case

NUMBER = st.integers(0, 127)
# The examples are the same each time; the long run has new ones. Examples have no deadline.
SETTINGS = settings(
    max_examples=8,
    stateful_step_count=60,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = 320  # of the random runs below


class Life(RuleBasedStateMachine):
    """Any operations on a cache, which is empty again at the end."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.driver = Driver(case)

    def teardown(self) -> None:
        self.driver.finish()


def _rule(operation: str):
    names = [f"number_{index}" for index in range(takes(operation))]

    def step(self, **numbers):
        self.driver.run(operation, *(numbers[name] for name in names))

    return rule(**dict.fromkeys(names, NUMBER))(step)


for _operation in WEIGHTS:
    # More rules for operations that create contents: hypothesis chooses among rules evenly.
    for _again in range(3 if _operation == "append" else 2 if _operation == "admit" else 1):
        setattr(Life, f"{_operation}_{_again}", _rule(_operation))


@pytest.mark.parametrize("case", CASES)
def test_a_random_life(case):
    """A longer run than those of hypothesis, with few evictions; seed 1 has its own pool sizes."""
    happened = Counter()
    for seed in (1, 4):
        lived = run(case, seed=seed, operations=OPERATIONS)
        assert lived.failure is None, lived.failure.trace
        happened += lived.counts
    for kind in ("hits", "block evictions", "blocks_copied_on_write"):
        assert happened[kind], f"no {kind} in {happened}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_any_operations_in_any_order(case):
    run_state_machine_as_test(lambda: Life(case), settings=SETTINGS)


def _live(driver: Driver, log: list[Operation]) -> None:
    for operation, numbers in log:
        driver.run(operation, *numbers)


@pytest.mark.parametrize("case", [name for name in CASES if name.endswith("deferred")])
def test_without_the_deferral_slots_serve_two(case, monkeypatch):
    driver = Driver(CASES[case])
    tickets = driver.manager._tickets
    monkeypatch.setattr(tickets, "over", lambda: tickets.last)  # as if all works were complete
    with pytest.raises(Mismatch, match="which is not over, may"):
        _live(driver, drawn(seed=0, operations=500))


def test_what_fails_is_made_short(monkeypatch):
    """A block is written while it can be found: one bug, which is found and shrunk to a few
    lines."""
    monkeypatch.setattr(PrefixCache, "forget", lambda self, slot: None)
    failure = run("plain", seed=0, operations=2000).failure
    assert failure is not None
    kind = fails("plain", 0, failure.log)
    short = shrunk(failure.log, lambda log: fails("plain", 0, log) == kind)
    assert len(short) <= 10 < len(failure.log), short
    assert fails("plain", 0, short) == kind
