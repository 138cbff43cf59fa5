"""mbarrier arithmetic: phases, transaction counts in any order, drops, and what is refused."""

from __future__ import annotations

import pytest

from ptxemu.errors import HardwareRefusal
from ptxemu.machine.mbarrier import MAX_COUNT, MBarrier


class Sleeper:
    """Stands for a warp: remembers which fragments were woken."""

    def __init__(self) -> None:
        self.woken: list[object] = []

    def wake(self, fragment: object) -> None:
        self.woken.append(fragment)


def arrive_expect(barrier: MBarrier, nbytes: int) -> None:
    """arrive.expect_tx: the expectation first, so that the phase cannot complete between."""
    barrier.expect(nbytes)
    barrier.arrive()


def test_phases_follow_arrivals() -> None:
    barrier = MBarrier("0x400", 3)
    assert barrier.done(1)  # the phase before the first counts as complete
    for phase in range(4):
        assert not barrier.done(phase & 1)
        states = [barrier.arrive() for _ in range(3)]
        assert [state & 0xFFFFFFFF for state in states] == [phase] * 3
        assert [state >> 32 for state in states] == [3, 2, 1]  # what was pending before
        assert barrier.done(phase & 1)
        assert barrier.pending == 3


def test_an_arrival_may_count_for_many() -> None:
    barrier = MBarrier("0x400", 40)
    barrier.arrive(39)
    assert not barrier.done(0)
    barrier.arrive()
    assert barrier.done(0)


def test_arrivals_of_lanes_may_complete_phases_midway() -> None:
    barrier = MBarrier("0x400", 16)
    barrier.arrive_each(32)
    assert (barrier.phase, barrier.pending) == (2, 16)
    barrier.arrive_each(8)
    assert (barrier.phase, barrier.pending) == (2, 8)


def test_too_many_arrivals_in_one_are_refused() -> None:
    with pytest.raises(HardwareRefusal, match="5 arrivals, 4 pending"):
        MBarrier("0x400", 4).arrive(5)


@pytest.mark.parametrize("order", ["expect first", "bytes first", "bytes in between"])
def test_bytes_may_land_before_they_are_expected(order: str) -> None:
    barrier = MBarrier("0x400", 2)
    steps = {
        "expect first": [
            lambda: arrive_expect(barrier, 96),
            lambda: barrier.complete(64),
            lambda: barrier.complete(32),
        ],
        "bytes first": [
            lambda: barrier.complete(64),
            lambda: barrier.complete(32),
            lambda: arrive_expect(barrier, 96),
        ],
        "bytes in between": [
            lambda: barrier.complete(64),
            lambda: arrive_expect(barrier, 96),
            lambda: barrier.complete(32),
        ],
    }[order]
    for step in steps:
        step()
        assert barrier.phase == 0
    barrier.arrive()
    assert (barrier.phase, barrier.tx, barrier.pending) == (1, 0, 2)


def test_the_last_bytes_complete_the_phase() -> None:
    barrier = MBarrier("0x400", 1)
    arrive_expect(barrier, 32)
    assert not barrier.done(0)
    barrier.complete(16)
    barrier.expect(16)
    barrier.complete(16)
    assert not barrier.done(0)
    barrier.complete(16)
    assert barrier.done(0)


def test_drop_lowers_the_count_of_later_phases() -> None:
    barrier = MBarrier("0x400", 2)
    barrier.arrive(drop=True)
    assert not barrier.done(0)
    barrier.arrive()
    assert barrier.done(0)
    barrier.arrive()
    assert barrier.phase == 2


def test_waiters_are_woken_once_when_the_phase_completes() -> None:
    barrier, warp = MBarrier("0x400", 1), Sleeper()
    barrier.waiters.append((warp, "fragment"))
    arrive_expect(barrier, 8)
    assert not warp.woken
    barrier.complete(8)
    assert warp.woken == ["fragment"]
    barrier.arrive()
    assert warp.woken == ["fragment"]


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_count_limits(count: int) -> None:
    with pytest.raises(HardwareRefusal, match="count"):
        MBarrier("0x400", count)


@pytest.mark.parametrize("sign", [1, -1])
def test_transaction_count_limits(sign: int) -> None:
    barrier = MBarrier("0x400", 1)
    change = barrier.expect if sign > 0 else barrier.complete
    change(MAX_COUNT)
    with pytest.raises(HardwareRefusal, match="transaction count"):
        change(1)


def test_description_names_what_is_outstanding() -> None:
    barrier = MBarrier("0x440 of cta (0,0,0)", 5)
    barrier.arrive(2)
    barrier.expect(48)
    text = barrier.describe()
    for part in ("0x440", "phase 0", "3 of 5 arrivals", "48 bytes"):
        assert part in text
