"""Faults: each raises an exception that names request and limit, nothing is lost, and the next
request is served.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from kvcache.books.checkpoints import Policy
from kvcache.books.errors import DoubleFree, HostTierFull, InvariantBroken, PoolExhausted
from kvcache.books.manager import Manager
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Pool
from lab.soak.machine import Event
from lab.soak.small_caches import PLAIN, SPARSE
from lab.soak.wrong_types import books_of
from tests.kvcache.books.lone import admitted, appended, cache, case_names, freed, served, tokens

KINDS, CALLS = 7, 7  # of misuse, and of calls that have a request


def _fails(driver, error, call, *parts):
    """Check that `call` raises, and changes nothing; return the exception."""
    driver.verify()
    before = driver.ledger.snapshot(driver.live)
    with pytest.raises(error) as caught:
        call()
    assert driver.ledger.snapshot(driver.live) == before
    for part in parts:
        assert str(part) in str(caught.value), caught.value
    driver.verify()
    return caught.value


@pytest.mark.parametrize("name", case_names())
def test_blocks_run_out(name):
    driver = cache(name, sizes=Sizes(10, 4, 2))
    size = driver.layout.block_tokens
    first, second = served(driver, tokens(6 * size)), served(driver, tokens(3 * size, 1))
    error = _fails(
        driver,
        PoolExhausted,
        lambda: driver.manager.append(
            {first.request: [1] * size, second.request: [1] * (size + 1)}
        ),
        second.request.name, "needs 3 of blocks", "1 are free",
    )  # fmt: skip
    assert (error.pool, error.needed, error.available, error.held) == ("blocks", 3, 1, 0)
    appended(driver, first, tokens(size, 2))
    freed(driver, second)
    served(driver, tokens(3 * size, 4))
    driver.finish()


@pytest.mark.parametrize("name", case_names(state=True))
def test_states_run_out(name):
    driver = cache(name, sizes=Sizes(20, 2, 1, 20, 1))
    first = served(driver, tokens(9))
    served(driver, tokens(9, 1))
    for call in (
        lambda: driver.manager.admit("late", tokens(9)),
        lambda: driver.manager.fork(first.request, "late"),
    ):
        error = _fails(driver, PoolExhausted, call, "late", "needs 1 of states", "0 are free")
        assert error.request == "late"
    # A request in the host tier holds no slot, so another can be admitted; then the first cannot
    # return.
    driver.offload(0)
    third = served(driver, tokens(9, 2))
    _fails(driver, PoolExhausted, lambda: driver.manager.fetch(first.request), first.request.name)
    freed(driver, third)
    driver.fetch(0)
    driver.finish()


@pytest.mark.parametrize("name", case_names())
def test_the_host_tier_is_full(name):
    driver = cache(name, sizes=Sizes(30, 4, 1, 5, 1))
    state, size = driver.layout.has_state, driver.layout.block_tokens
    lives = [served(driver, tokens(3 * size, variety)) for variety in range(2)]
    driver.offload(0)
    error = _fails(
        driver,
        HostTierFull,
        lambda: driver.manager.offload(lives[1].request),
        lives[1].request.name, "needs 3 of host blocks", "2 are free",
    )  # fmt: skip
    assert isinstance(error, PoolExhausted)
    small = served(driver, tokens(size, 5))
    if state:
        call = lambda: driver.manager.offload(small.request)  # noqa: E731
        _fails(driver, HostTierFull, call, small.request.name, "needs 1 of host states")
    driver.fetch(0)
    driver.offload(1)
    assert not lives[1].request.resident
    driver.finish()


@pytest.mark.parametrize("name", case_names())
def test_every_misuse_of_every_call_is_refused(name):
    """Misuses are handles of requests that are freed, in the host tier, or of another manager, too
    many tokens, and senseless arguments; see `lab.soak.wrong_types`."""
    driver = cache(name)
    served(driver, tokens(9))
    gone, other = served(driver, tokens(9, 1)), served(driver, tokens(9, 2))
    freed(driver, gone)
    driver.offload(0)
    for kind in range(KINDS):
        for call in range(CALLS):
            driver.run("misuse", kind, 1, call)
    refused = {"DoubleFree", "NotResident", "PoolExhausted", "RollbackPastRing", "ValueError"}
    assert {f"refused: {error}" for error in refused} <= driver.counts.keys()
    both = {other.request: [1], gone.request: [1]}  # all or none
    _fails(driver, DoubleFree, lambda: driver.manager.append(both), gone.request.name)
    appended(driver, other, [1])
    driver.finish()


@pytest.mark.parametrize("name", [*case_names(), *case_names(deferred=True)])
def test_every_call_with_a_wrong_type_leaves_the_books_as_they_were(name):
    """Some hundred calls, with one request at hand, one in the host tier, and work in flight;
    errors name what is wrong."""
    driver = cache(name)
    served(driver, tokens(9))
    request = served(driver, tokens(9, 1)).request
    driver.offload(0)
    calls = driver._misuse.wrong_calls(request)
    assert len(calls) > 250
    for what, call in calls:
        driver._misuse.refused_at_once(what, call)
    for what, call in driver._misuse.wrong_calls(None):
        driver._misuse.refused_at_once(what, call)
    driver.verify()
    driver.finish()


def test_the_books_are_seen_to_change():
    """`books_of` covers every internal table."""
    manager = Manager(SPARSE, Sizes(8, 3, 2), policy=Policy(every=1), keep_events=True)
    states = [books_of(manager)]
    request = manager.admit("one", tokens(9)).request
    for call in (
        lambda: manager.append({request: tokens(8)}),
        lambda: manager.rollback(request, 1),
        lambda: manager.counters.__setattr__("forked", 1),
        lambda: request.__setattr__("salt", b"other"),
        lambda: manager.pools[Pool.HOST_BLOCKS].take(0),
    ):
        states.append(books_of(manager))
        call()
    assert books_of(manager) == states.pop()
    assert all(one != other for one, other in pairwise(states))


@pytest.mark.parametrize("name", case_names(deferred=True))
def test_a_fork_bomb_ends_at_the_limit(name):
    driver = cache(name, sizes=Sizes(12, 6, 2, 1, 1))
    size, manager = driver.layout.block_tokens, driver.manager
    served(driver, tokens(2 * size + 1))
    twins = 0
    try:
        while twins < 50:
            driver.manager.fork(driver.live[0].request, f"twin {twins}")
            twins += 1
    except PoolExhausted as error:
        assert (error.pool, error.request) == ("states", f"twin {twins}")  # noqa: PT017
    assert twins == (5 if driver.layout.has_state else 50)
    requests = list(manager.requests)
    # Each needs its own copy of the last block; all but one find no free slot.
    with pytest.raises(PoolExhausted) as error:
        manager.append({request: tokens(4 * size, 3) for request in requests})
    assert error.value.request in {request.name for request in requests}
    manager.check()
    for request in requests:
        manager.free(request)
    driver.live.clear()
    while driver.machine.in_flight:
        driver.over(0)
    for ticket in list(manager._tickets._events):  # works of the forks, which were never executed
        manager._tickets.issued(ticket, None)
    served(driver, tokens(11 * size, 5))
    driver.machine.in_flight[-1].event.over = True
    manager.check()


@pytest.mark.parametrize("name", case_names(deferred=True))
def test_an_abort_in_flight_holds_slots_until_the_work_is_over(name):
    driver = cache(name, sizes=Sizes(8, 2, 1), policy=Policy(prompt_end=False, rolling=False))
    size, manager = driver.layout.block_tokens, driver.manager
    live = served(driver, tokens(6 * size - 1))
    events = [work.event for work in driver.machine.in_flight]
    slots = set(live.request.blocks)
    freed(driver, live)
    assert manager.metrics.blocks_waiting == 6
    late = manager.admit("late", tokens(3 * size, 1))
    manager.issued(late)
    with pytest.raises(PoolExhausted, match=r"'late' needs 3 of blocks, 2 are free, 6 more wait"):
        manager.append({late.request: tokens(3 * size, 1)})
    manager.append({late.request: tokens(2 * size, 1)})
    assert not slots & set(late.request.blocks)
    # Works complete in reverse order: slots are free only when all are complete.
    for event in events[::-1]:
        assert manager.metrics.blocks_waiting == 6
        for work in driver.machine.in_flight:
            if work.event is event and not work.reported:
                manager.issued(work.work, event)
        event.over = True
        manager.poll()
    assert manager.metrics.blocks_waiting == 0
    manager.append({late.request: tokens(4 * size, 2)})
    assert slots & set(late.request.blocks)
    manager.check()


@pytest.mark.parametrize("name", case_names(deferred=True))
def test_a_block_that_is_still_copied_to_the_host_is_not_written(name):
    """Two requests share a block, and one is offloaded. The other one then holds the block alone,
    and writes to a copy until the host has it."""
    driver = cache(name)
    size = driver.layout.block_tokens
    first = served(driver, tokens(2 * size + 1))
    (_, twin) = driver.fork(0)
    while driver.machine.in_flight:
        driver.over(0)
    driver.offload(0)
    shared = twin.request.blocks[-1]
    assert driver.manager.blocks.holders(shared) == 1
    appended(driver, twin, [1])
    assert twin.request.blocks[-1] != shared
    while driver.machine.in_flight:
        driver.over(0)
    driver.fetch(0)
    appended(driver, first, [2])
    alone = first.request.blocks[-1]
    appended(driver, first, [3])
    assert first.request.blocks[-1] == alone
    driver.finish()


@pytest.mark.parametrize("name", case_names(deferred=True, state=False))
def test_a_block_found_before_its_last_work_is_over_is_not_written(name):
    """The block was freed with a copy to the host in flight, and found again. (With a state, hits
    are never rolled back.)"""
    driver = cache(name)
    size = driver.layout.block_tokens
    served(driver, tokens(2 * size))
    while driver.machine.in_flight:
        driver.over(0)
    driver.offload(0)
    found = admitted(driver, tokens(2 * size + 1))
    blocks = list(found.request.blocks)
    driver.take_back(found, 1)
    appended(driver, found, [1])
    assert found.request.blocks[0] == blocks[0]
    assert found.request.blocks[1] != blocks[1]
    driver.finish()


def test_a_work_is_reported_once_and_by_its_own_manager():
    manager = Manager(SPARSE, Sizes(8, 2), deferred=True)
    work = manager.admit("one", tokens(9))
    event = Event()
    manager.issued(work, event)
    assert manager.metrics.works_in_flight == 1
    event.over = True
    manager.poll()
    assert manager.metrics.works_in_flight == 0
    with pytest.raises(ValueError, match=f"ticket {work.ticket}"):
        manager.issued(work, event)


@pytest.mark.parametrize("name", case_names())
def test_an_abandoned_step_leaves_nothing_to_find(name):
    driver = cache(name, policy=Policy(every=1))
    size = driver.layout.block_tokens
    prompt = tokens(3 * size + 1)
    served(driver, prompt[: size + 1])
    cut, other = admitted(driver, prompt), served(driver, tokens(size, 1))
    assert cut.request.length == size
    driver.abandon_tokens({cut: prompt[size : 2 * size], other: [5] * size})
    driver.verify()
    assert cut.request.freed
    assert other.request.freed
    assert admitted(driver, prompt).request.length == size
    assert admitted(driver, [*tokens(size, 1), *[5] * (size + 1)]).request.length in (0, size)


@pytest.mark.parametrize(
    ("sizes", "layout"), [(Sizes(0), PLAIN), (Sizes(4), SPARSE), (Sizes(-1, 2), SPARSE)]
)
def test_a_manager_without_room_for_one_request_is_refused(sizes, layout):
    with pytest.raises(ValueError, match="needs at least 1"):
        Manager(layout, sizes)


def test_policies_and_arguments_without_sense():
    with pytest.raises(ValueError, match="every 0 blocks"):
        Policy(every=0)
    manager = Manager(PLAIN, Sizes(4))
    for prompt, error in (([], ValueError), ([[1]], ValueError), ([0.5], TypeError)):
        with pytest.raises(error, match="prompt"):
            manager.admit("one", prompt)
    with pytest.raises(ValueError, match="keep_events"):
        manager.events()
    request = manager.admit("one", np.arange(5, dtype=np.uint16)).request
    for new, error in (([], ValueError), (["a"], TypeError), (np.ones((2, 2)), ValueError)):
        with pytest.raises(error, match="one"):
            manager.append({request: new})
    manager.check()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda manager, request: manager.blocks._holders.__setitem__(request.blocks[0], 2),
        lambda manager, request: manager.blocks._free.append(request.blocks[0]),
        lambda manager, request: manager.states._free.pop(),
        lambda manager, request: request.blocks.pop(),
        lambda manager, request: request.digests.pop(),
        lambda manager, request: setattr(request, "state", -1),
        lambda manager, request: setattr(request, "floor", request.length + 1),
        lambda manager, request: request.tokens.__setitem__(0, 77),
        lambda manager, request: manager.blocks._key_of.pop(request.blocks[0]),
        lambda manager, request: manager.prefix.blocks.unregister(request.blocks[0]),
    ],
)
def test_check_notices(spoil):
    """Each case corrupts one internal table."""
    manager = Manager(SPARSE, Sizes(8, 3, 2), policy=Policy(every=1))
    request = manager.admit("one", tokens(9)).request
    manager.append({request: tokens(8)})
    manager.check()
    spoil(manager, request)
    with pytest.raises(InvariantBroken):
        manager.check()
