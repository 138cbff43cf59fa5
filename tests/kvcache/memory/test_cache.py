"""The cache as a whole, kernels in the emulator: every byte of every request, after any operation.

`test_host_tier_hw.py` runs the tests with a `device` argument on a GPU, too.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvcache.books.checkpoints import Policy
from kvcache.books.errors import (
    CorruptedBlock,
    DoubleFree,
    HostTierFull,
    NotResident,
    PoolExhausted,
    RollbackPastRing,
    StepOpen,
)
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Copy, Pool
from kvcache.layouts.layout import GUARD_BYTES, Layout, Ring, Stream, Tail
from kvcache.layouts.models import gqa
from kvcache.layouts.records import Record
from kvcache.memory.cache import Cache
from kvcache.memory.storage import grouped
from tests.kvcache.memory.shadow import Shadow, ids

WIDE, NARROW = Record("wide", 48), Record("narrow", 16)
SPARSE = Layout(  # like DeepSeek-V4, with small numbers
    "sparse",
    8,
    (Stream("main", WIDE, 2, 2), Stream("packed", NARROW, 8, 3, packed=True)),
    (Ring("window", WIDE, 5, 2),),
    (Tail("raw", 2, 2, 1, overlap=2), Tail("online", 8, 4, 1, online=True)),
    draft=3,
)
PLAIN = gqa(2, 1, 8, block_tokens=4, draft=2)
SIZES = Sizes(blocks=24, states=6, checkpoints=4, host_blocks=12, host_states=2)
each_layout = pytest.mark.parametrize("layout", [SPARSE, PLAIN], ids=lambda x: x.name)


@pytest.fixture
def device():
    return "cpu"


def new(layout=SPARSE, sizes=SIZES, **options):
    return Shadow(Cache(layout, sizes, canary=True, **options))


def idle(shadow):
    """Check that nothing is held, and that the next request works."""
    for request in list(shadow.histories):
        shadow.free(request)
    manager = shadow.cache.manager
    manager.check()
    assert all(pool.held == 0 for pool in manager.pools.values())
    last = shadow.admit("last", ids(17, 99))
    shadow.check()
    shadow.cache.verify()
    shadow.free(last)


# -- the life of a request ------------------------------------------------------------------------


@each_layout
def test_a_life(layout, device):
    """Hits, forks, drafts, the host tier: after each, the contents are right and sealed."""
    shadow, prompt = new(layout, device=device), ids(29)
    size, cache = layout.block_tokens, shadow.cache
    first = shadow.admit("first", prompt, chunk=5)
    again = shadow.enter("again", [*prompt, 7])
    assert again.length == 29 // size * size
    shadow.append({again: [1, 2], first: [3]})
    child = shadow.fork(first, "child")
    shadow.append({child: [4, 5], first: [6, 7], again: [8]})
    shadow.rollback(child, 2)
    shadow.append({child: [9]})
    shadow.check()
    blocks = child.length // size + (child.length % size > 0)
    cache.offload(child)
    assert cache.manager.pools[Pool.HOST_BLOCKS].held == blocks
    shadow.free(first)
    shadow.append({again: [1] * 3})
    shadow.fetch(child)
    shadow.append({child: ids(2 * size)})
    shadow.check()
    cache.verify()
    prompt = cache.preempt(again)
    del shadow.histories[again]
    back = shadow.admit("back", prompt)
    assert cache.manager.counters.hit_tokens > 0
    shadow.append({back: [5]})
    shadow.check()
    idle(shadow)


def every_hit(layout, shares, **options):
    """Check that the rows of a whole prompt do not depend on the cached prefix."""
    prompt, size = ids(4 * layout.block_tokens + 3), layout.block_tokens
    for shared in shares:
        shadow = new(layout, policy=Policy(every=1), **options)
        shadow.admit("first", [*prompt[:shared], *ids(5, 7)], chunk=layout.draft + 2)
        request = shadow.admit("second", prompt)
        shadow.check()
        found = shadow.cache.manager.counters.hit_tokens
        assert found == min(shared, len(prompt) - 1) // size * size
        shadow.append({request: [1]})
        shadow.check()


def test_a_hit_is_as_if_it_were_cold():
    every_hit(SPARSE, (7, 17))


@each_layout
def test_every_hit_is_as_if_it_were_cold(layout):
    every_hit(layout, range(4 * layout.block_tokens + 3))


@each_layout
@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("seed", range(2))
def test_random_lives(layout, deferred, seed, device):
    """Any operation follows any other. Deferred mode is included; on the CPU all work is complete
    when it is reported."""
    shadow = new(layout, deferred=deferred, device=device)
    pick = random.Random(seed)
    cache, past = shadow.cache, [ids(40, n) for n in range(3)]

    def a_request(resident=True):
        found = [r for r in shadow.histories if r.resident == resident]
        return pick.choice(found) if found else None

    for number in range(60):
        kind, request = pick.randrange(8), a_request()
        try:
            if request is None or kind == 0:
                prompt = pick.choice(past)[: pick.randrange(1, 40)]
                shadow.admit(f"r{number}", prompt, chunk=pick.choice((0, 3, 8)))
            elif kind == 1:
                shadow.fork(request, f"f{number}")
            elif kind == 2:
                shadow.rollback(request, pick.randrange(layout.draft + 2))
            elif kind == 3:
                cache.offload(request)
            elif kind == 4 and a_request(resident=False):
                shadow.fetch(a_request(resident=False))
            elif kind == 5:
                shadow.free(request)
            else:
                batch = [r for r in shadow.histories if r.resident and pick.random() < 0.7]
                shadow.append({r: ids(pick.randrange(1, 4), number) for r in batch or [request]})
        except (PoolExhausted, RollbackPastRing):
            for other in [r for r in shadow.histories if pick.random() < 0.5]:
                shadow.free(other)
        shadow.check()
    cache.verify()
    idle(shadow)


# -- corruption -----------------------------------------------------------------------------------


def damage(shadow, pool, slot, offset=3):
    shadow.cache.storage.pools[pool][slot, offset] ^= 1


def test_a_whole_cache_has_nothing_to_complain_of():
    shadow = new()
    shadow.admit("a", ids(20))
    shadow.cache.verify()
    with pytest.raises(ValueError, match="nothing was sealed"):
        Cache(PLAIN, Sizes(2)).verify()


@pytest.mark.parametrize("pool", Pool)
def test_every_guard_is_looked_at(pool, device):
    """The damage is in the byte after the first or last slot."""
    shadow = new(device=device)
    slots = len(shadow.cache.storage.pools[pool])
    for slot in {0, slots - 1}:
        damage(shadow, pool, slot, -GUARD_BYTES)
        with pytest.raises(CorruptedBlock, match="the guard of") as caught:
            shadow.cache.verify()
        assert (caught.value.pool, caught.value.slots) == (pool.value, [slot])
        damage(shadow, pool, slot, -GUARD_BYTES)
        shadow.cache.verify()


def test_a_corrupted_block_is_not_hit(device):
    shadow, prompt = new(device=device), ids(30)
    first = shadow.admit("first", prompt)
    damage(shadow, Pool.BLOCKS, first.blocks[1])
    with pytest.raises(CorruptedBlock, match="the content of blocks") as caught:
        shadow.cache.admit("second", prompt)
    assert caught.value.slots == [first.blocks[1]]
    assert {"first"} <= set(caught.value.requests) <= {"first", "second"}
    assert list(shadow.cache.manager.requests) == [first]
    # Blocks before it are still good, those after it are not found any more.
    shadow.free(first)
    third = shadow.admit("third", prompt)
    shadow.check()
    shadow.free(third)
    idle(shadow)


def test_a_corrupted_checkpoint_is_not_restored(device):
    shadow, prompt = new(device=device), ids(30)
    first = shadow.admit("first", prompt)
    (slot,) = shadow.cache.canary.sealed[Pool.CHECKPOINTS]
    damage(shadow, Pool.CHECKPOINTS, slot)
    with pytest.raises(CorruptedBlock, match="the content of checkpoints") as caught:
        shadow.cache.admit("second", prompt)
    assert (caught.value.pool, caught.value.slots) == ("checkpoints", [slot])
    shadow.admit("third", prompt)
    shadow.check()
    assert next(iter(shadow.cache.manager.requests)) is first
    idle(shadow)


@pytest.mark.parametrize("pool", [Pool.HOST_BLOCKS, Pool.HOST_STATES])
def test_what_was_corrupted_on_the_host_does_not_come_back(pool, device):
    shadow = new(device=device)
    first = shadow.admit("first", ids(30))
    shadow.cache.offload(first)
    if shadow.cache.device.type == "cuda":
        torch.cuda.synchronize()
    slot = first.host_blocks[2] if pool is Pool.HOST_BLOCKS else first.host_state
    place = 3
    if pool is Pool.HOST_STATES:  # a copied row
        place = shadow.layout.live(first.length)[0][0]
    damage(shadow, pool, slot, place)
    for _ in range(2):  # a second call does not repair it
        with pytest.raises(CorruptedBlock) as caught:
            shadow.cache.fetch(first)
        error = caught.value
        assert (error.pool, error.slots, error.requests) == (pool.value, [slot], ["first"])
        assert not first.resident
    with pytest.raises(CorruptedBlock):
        shadow.cache.verify()
    shadow.free(first)
    idle(shadow)


def test_verify_names_pool_slot_and_readers():
    shadow = new()
    first = shadow.admit("first", ids(30))
    second = shadow.fork(first, "second")
    damage(shadow, Pool.BLOCKS, first.blocks[0])
    with pytest.raises(CorruptedBlock, match=r"read by \['first', 'second'\]"):
        shadow.cache.verify()
    shadow.free(second)
    shadow.free(first)
    shadow.cache.verify()  # no request can read it any more
    idle(shadow)


def test_copies_that_depend_on_each_other_are_apart():
    """A launch has no order: what it writes, it neither reads nor writes again."""

    def of(*pairs, position=None):
        return [Copy(Pool.BLOCKS, Pool.BLOCKS, *pair, position) for pair in pairs]

    def sizes(copies):
        return [len(group) for group in grouped(copies)]

    assert sizes(of((1, 2), (1, 3), (4, 5))) == [3]
    assert sizes(of((1, 2), (2, 3))) == [1, 1]
    assert sizes(of((1, 2), (3, 1))) == [1, 1]
    assert sizes(of((1, 2), (3, 2), (3, 4))) == [1, 2]
    assert sizes([*of((1, 2)), *of((3, 4), position=8), *of((5, 6), position=8)]) == [1, 2]
    assert sizes([Copy(Pool.BLOCKS, Pool.HOST_BLOCKS, 1, 2), *of((2, 3))]) == [1, 1]
    assert sizes([]) == []


# -- order ----------------------------------------------------------------------------------------


def test_nothing_else_while_a_step_is_open():
    shadow = new()
    first, cache = shadow.admit("first", ids(9)), shadow.cache
    step = cache.begin({first: [1]})
    calls = [
        lambda: cache.admit("x", [1]), lambda: cache.fork(first, "x"), lambda: cache.free(first),
        lambda: cache.preempt(first), lambda: cache.rollback(first, 1),
        lambda: cache.begin({first: [1]}), lambda: cache.offload(first),
        lambda: cache.fetch(first),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StepOpen, match=r"a step of .'first'. is open"):
            call()
    shadow.write(step)
    cache.finish(step)
    for call in (cache.finish, cache.abandon):
        with pytest.raises(StepOpen, match="not open"):
            call(step)
    shadow.check()
    idle(shadow)


@each_layout
def test_a_step_that_fails_has_never_been(layout):
    """An exception in a step ends its requests, and none of its unwritten blocks can be found."""
    shadow, prompt = new(layout), ids(40)
    other = shadow.admit("other", prompt[:11])
    request = shadow.enter("first", prompt)
    with pytest.raises(ZeroDivisionError), shadow.cache.step({request: prompt[request.length :]}):
        raise ZeroDivisionError
    assert request.freed
    with pytest.raises(DoubleFree, match="'first' has been freed"):
        shadow.cache.free(request)
    del shadow.histories[request]
    shadow.admit("second", prompt)
    shadow.append({other: [3]})
    shadow.check()
    idle(shadow)


class Broken(Exception):
    """Failure of a copy."""


def move(copies):
    if list(copies):
        raise Broken


def test_what_a_failed_fetch_did_not_bring_back_is_not_found(monkeypatch):
    shadow, prompt = new(PLAIN, Sizes(12, host_blocks=6)), ids(13)
    away, cache = shadow.admit("away", prompt), shadow.cache
    cache.offload(away)
    shadow.free(shadow.admit("greedy", ids(48, 1)))  # nothing of the other request is left
    monkeypatch.setattr(cache._mover, "move", move)
    with pytest.raises(Broken):
        cache.fetch(away)
    monkeypatch.undo()
    cache.manager.check()
    with pytest.raises(DoubleFree, match="away"):
        cache.fetch(away)
    assert cache.manager.metrics.host_blocks_used == 0
    assert cache.admit("next", prompt).hit == 0


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("call", ["admit", "fork", "begin", "finish", "offload", "fetch"])
def test_copies_that_fail_lose_one_request(monkeypatch, call, deferred):
    """Whichever call fails, other requests go on, and no slot waits for work that never ran."""
    shadow = new(deferred=deferred)
    cache = shadow.cache
    first, other = shadow.admit("first", ids(21)), shadow.admit("other", ids(9, 1))
    child = shadow.fork(first, "child")
    calls = {
        "admit": lambda: cache.admit("x", ids(21)),
        "fork": lambda: cache.fork(other, "x"),
        "begin": lambda: cache.begin({child: [1]}),
        "finish": lambda: shadow.append({child: [1, 2, 3]}),
        "offload": lambda: cache.offload(child),
        "fetch": lambda: cache.fetch(child),
    }
    if call == "fetch":
        cache.offload(child)

    monkeypatch.setattr(cache._mover, "move", move)
    if call == "finish":  # before which there is nothing to copy
        monkeypatch.setattr(
            cache._mover, "move", lambda copies, left=[0, 1]: left.pop() or move([1])
        )
    with pytest.raises(Broken):
        calls[call]()
    monkeypatch.undo()
    if call not in ("admit", "fork"):
        assert child.freed
        del shadow.histories[child]
    assert list(cache.manager.requests) == list(shadow.histories)
    shadow.append({other: [1], first: [2]})
    shadow.check()
    idle(shadow)


def test_a_refused_step_leaves_everything_as_it_was():
    shadow = new(sizes=Sizes(blocks=4, states=2, host_blocks=2, host_states=1))
    first = shadow.admit("first", ids(17))
    second = shadow.enter("second", ids(30, 5))
    with pytest.raises(PoolExhausted, match="request 'second' needs 2 of blocks, 1 are free"):
        shadow.cache.begin({second: ids(16)})
    with pytest.raises(PoolExhausted, match="request 'third' needs 1 of states, 0 are free"):
        shadow.cache.admit("third", [1])
    with pytest.raises(PoolExhausted, match="of states"):
        shadow.cache.fork(first, "third")
    with pytest.raises(HostTierFull, match="request 'first' needs 3 of host blocks, 2 are free"):
        shadow.cache.offload(first)
    with pytest.raises(RollbackPastRing, match="at most 3"):
        shadow.cache.rollback(first, 4)
    shadow.append({second: [1]})
    shadow.check()
    shadow.cache.offload(second)
    with pytest.raises(NotResident, match="'second' is in the host tier"):
        shadow.cache.begin({second: [1]})
    with pytest.raises(NotResident):
        shadow.cache.fork(second, "x")
    idle(shadow)
