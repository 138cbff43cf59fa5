"""A request that finds a prefix in the cache has the same bytes as one that found nothing."""

from __future__ import annotations

import pytest

from kvcache.books.checkpoints import Policy
from kvcache.books.metrics import BlockRemoved, BlockStored, CheckpointStored, Cleared
from kvcache.books.slot_pool import Sizes
from kvcache.books.work import Pool
from lab.soak.machine import CLEAN, Machine
from tests.kvcache.books.lone import (
    admitted,
    appended,
    cache,
    case_names,
    freed,
    image,
    served,
    tokens,
)

EVERY_BLOCK = Policy(every=1)
BLOCKS = 5


def _prompt(driver):
    """A prompt of five and a half blocks."""
    return tokens(BLOCKS * driver.layout.block_tokens + driver.layout.block_tokens // 2)


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("name", case_names())
def test_cold_is_hit_at_every_length(name, chunk):
    cold = cache(name, policy=EVERY_BLOCK)
    size, prompt = cold.layout.block_tokens, _prompt(cold)
    request = served(cold, prompt)
    appended(cold, request, tokens(size, 7), chunk=1)
    expected = image(cold, request)
    for blocks in range(1, BLOCKS + 1):
        warm = cache(name, policy=EVERY_BLOCK)
        # Another request shares the first blocks, and then differs.
        other = served(warm, prompt[: blocks * size] + tokens(size, 3), chunk)
        if blocks % 2:
            freed(warm, other)
        hit = admitted(warm, prompt)
        assert hit.request.length == blocks * size == hit.request.floor
        appended(warm, hit, prompt[blocks * size :], chunk)
        appended(warm, hit, tokens(size, 7), chunk)
        assert image(warm, hit) == expected
        warm.finish()


@pytest.mark.parametrize("name", case_names())
def test_a_repeated_prompt_computes_one_token_at_least(name):
    driver = cache(name, policy=EVERY_BLOCK)
    size = driver.layout.block_tokens
    for length in (1, size - 1, size, size + 1, 2 * size, 2 * size + 1):
        first = served(driver, tokens(length))
        again = admitted(driver, tokens(length))
        assert again.request.length == (length - 1) // size * size
        freed(driver, again)
        freed(driver, first)
        driver.clear()
        driver.verify()
    driver.finish()


@pytest.mark.parametrize("name", case_names(state=True))
def test_the_policy_says_where_hits_end(name):
    """Prompt end: its last boundary. Rolling: the last boundary that was reached. Every:
    multiples."""
    size = cache(name).layout.block_tokens
    prompt, more = tokens(3 * size + 1), tokens(3 * size, 5)
    for policy, at in (
        (Policy(), {3, 6}),
        (Policy(rolling=False), {3}),
        (Policy(prompt_end=False), {6}),
        (Policy(every=2, prompt_end=False, rolling=False), {2, 4, 6}),
        (Policy(prompt_end=False, rolling=False), set()),
    ):
        driver = cache(name, policy=policy)
        appended(driver, served(driver, prompt), more, chunk=1)
        for blocks in range(1, 7):
            hit = admitted(driver, [*prompt, *more][: blocks * size + 1])
            wanted = max([end for end in at if end <= blocks], default=0)
            assert hit.request.length == wanted * size, (policy, blocks)
            freed(driver, hit)


@pytest.mark.parametrize("computed", [False, True], ids=["found", "computed"])
@pytest.mark.parametrize("name", case_names(state=True))
def test_what_others_rely_on_stays_when_its_maker_goes_on(name, computed):
    """The newest checkpoint of one request is where the prompt of another ends."""
    driver = cache(name, policy=Policy())
    size = driver.layout.block_tokens
    maker = served(driver, tokens(size + 1))
    appended(driver, maker, tokens(size - 1, 5), chunk=1)
    prompt = [*maker.history.tokens, 7]
    assert driver.ledger.hit(prompt) == 2 * size
    (user,) = driver.admit_prompt(prompt, use_cache=not computed)
    appended(driver, user, prompt[user.request.length :])
    appended(driver, maker, tokens(size, 6), chunk=1)
    assert driver.ledger.hit([*maker.history.tokens, 7]) == 3 * size
    assert driver.ledger.hit(prompt) == 2 * size
    # No other request uses the maker's newest: its next checkpoint replaces it.
    appended(driver, maker, tokens(size, 8), chunk=1)
    assert driver.ledger.hit(maker.history.tokens) == 2 * size
    driver.finish()


def test_a_request_replaces_the_newest_checkpoint_of_its_own_alone():
    """The request's own checkpoint was evicted, and another request made the same one again."""
    driver = cache("window", policy=Policy(prompt_end=False), sizes=Sizes(40, 4, 2))
    size, prompt = driver.layout.block_tokens, tokens(5)
    first = served(driver, prompt)
    assert driver.ledger.hit(prompt) == size
    for variety in (1, 2):
        freed(driver, served(driver, tokens(size, variety)))
    assert driver.ledger.hit(prompt) == 0
    (again,) = driver.admit_prompt(prompt, use_cache=False)
    appended(driver, again, prompt)
    assert driver.ledger.hit(prompt) == size
    appended(driver, first, tokens(size, 3))
    assert driver.ledger.hit([*first.history.tokens, 7]) == 2 * size
    assert driver.ledger.hit(prompt) == size
    driver.finish()


def test_salts_and_tokens_are_told_apart():
    driver = cache("plain")
    size = driver.layout.block_tokens
    prompt = tokens(3 * size + 1)
    served(driver, prompt, salt=b"tenant")
    assert admitted(driver, prompt).request.length == 0
    assert admitted(driver, prompt, b"tenant").request.length == 3 * size
    # A block is found by all tokens up to its end, not only by those in it.
    assert admitted(driver, [*tokens(size, 9), *prompt[size:]], b"tenant").request.length == 0
    assert admitted(driver, [*prompt[:-2], 5, 5], b"tenant").request.length == 2 * size


@pytest.mark.parametrize("name", case_names())
def test_who_does_not_use_the_cache_computes_everything(name):
    """The request's blocks equal those of others, which remain the ones that are found."""
    driver = cache(name, policy=EVERY_BLOCK)
    size = driver.layout.block_tokens
    prompt = tokens(3 * size + 1)
    first = served(driver, prompt)
    (second,) = driver.admit_prompt(prompt, use_cache=False)
    assert second.request.length == 0
    appended(driver, second, prompt)
    assert not set(first.request.blocks) & set(second.request.blocks)
    freed(driver, first)
    again = admitted(driver, prompt)
    assert again.request.length == 3 * size
    assert not set(again.request.blocks) & set(second.request.blocks)
    driver.finish()


@pytest.mark.parametrize("name", case_names(state=True))
def test_a_recycled_state_is_a_clean_one(name):
    driver = cache(name, policy=EVERY_BLOCK)
    size = driver.layout.block_tokens
    for variety in range(driver.case.sizes.states + 2):
        live = served(driver, tokens(3 * size + 3, variety))
        slot = live.request.state
        assert (driver.machine.pools[Pool.STATES][slot] != CLEAN).any()
        freed(driver, live)
    fresh = admitted(driver, tokens(5, 50))
    assert (driver.machine.pools[Pool.STATES][fresh.request.state] == CLEAN).all()
    # After a hit, bytes outside the checkpoint are clean, too.
    hit = admitted(driver, tokens(3 * size + 3, variety))
    state = driver.machine.pools[Pool.STATES][hit.request.state].copy()
    for offset, _, count in driver.layout.segments(hit.request.length):
        state[offset : offset + count] = CLEAN
    assert hit.request.length == 3 * size
    assert (state == CLEAN).all()


@pytest.mark.parametrize("name", case_names())
def test_nothing_depends_on_what_slots_held_before(name):
    """Two pools with different poison, one of them used before, give the same states and
    entries."""
    found = []
    for poison in (1, 2):
        driver = cache(name)
        driver.machine = Machine(driver.layout, driver.case.sizes, seed=poison)
        driver.ledger.machine = driver.machine
        for variety in range(1, 4 * poison - 3):
            freed(driver, served(driver, tokens(20, variety)))
        live = served(driver, tokens(BLOCKS * driver.layout.block_tokens + 3), chunk=5)
        state = driver.machine.pools[Pool.STATES][live.request.state].copy()
        found.append((image(driver, live), state.tobytes() if live.request.state >= 0 else b""))
    assert found[0] == found[1]


def test_events_tell_what_is_found():
    driver = cache("window", policy=EVERY_BLOCK)
    manager, size = driver.manager, driver.layout.block_tokens
    live = manager.admit("one", tokens(9)).request
    manager.append({live: tokens(9)})
    stored = manager.events()
    assert [type(event) for event in stored] == [BlockStored, BlockStored, CheckpointStored]
    assert stored[1].parent == stored[0].digest == manager.blocks.key(live.blocks[0])
    assert stored[1].tokens == tuple(tokens(9)[size : 2 * size])
    manager.rollback(live, 2)  # into the second block, which is written immediately
    assert manager.events() == []
    manager.append({live: [7]})
    assert manager.events()[0] == BlockRemoved(stored[1].digest)
    manager.clear()
    assert manager.events()[-1] == Cleared()
    assert manager.blocks.registered() == []
    assert manager.events() == []


@pytest.mark.parametrize("name", case_names(state=True))
def test_blocks_that_no_hit_can_use_do_not_take_room(name):
    """After a request has gone, its blocks past the last checkpoint are useless."""
    driver = cache(name, policy=Policy(every=2, prompt_end=False, rolling=False))
    size, metrics = driver.layout.block_tokens, lambda: driver.manager.metrics
    freed(driver, served(driver, tokens(3 * size + 1)))
    assert metrics().blocks_kept == 2
    # But while another request holds them, their checkpoint may still come.
    parent = served(driver, tokens(size + 1, 4))
    (_, child) = driver.fork(0)
    freed(driver, parent)
    appended(driver, child, tokens(size, 5))
    assert driver.ledger.hit([*child.history.tokens, 7]) == 2 * size
    driver.finish()


@pytest.mark.parametrize("name", case_names(state=True))
def test_without_checkpoints_nothing_is_found(name):
    driver = cache(name, sizes=Sizes(20, 3))
    prompt = tokens(3 * driver.layout.block_tokens + 1)
    live = admitted(driver, prompt)
    assert driver.manager.room(live.request, len(prompt)) == len(prompt)
    appended(driver, live, prompt)
    again = admitted(driver, prompt)
    assert again.request.length == 0
    assert driver.told["lost_hit_tokens"] == len(prompt) - 1
    driver.finish()


def test_what_is_spoiled_is_not_found_and_its_readers_are_named():
    driver = cache("window", policy=EVERY_BLOCK)
    size, manager = driver.layout.block_tokens, driver.manager
    first, second = served(driver, tokens(2 * size)), served(driver, tokens(2 * size + 1))
    shared = second.request.blocks[0]
    both = [first.request.name, second.request.name]
    assert manager.readers(Pool.BLOCKS, [shared]) == both
    assert manager.readers(Pool.BLOCKS, list(first.request.blocks[1:])) == both
    assert manager.readers(Pool.STATES, [second.request.state]) == both[1:]
    assert manager.readers(Pool.CHECKPOINTS, [0]) == []
    manager.discard(Pool.BLOCKS, [shared])
    driver.verify()
    assert driver.ledger.hit(tokens(2 * size + 1)) == 0
    slot = manager.pools[Pool.CHECKPOINTS].find(second.request.digests[1])
    manager.discard(Pool.CHECKPOINTS, [slot])
    assert manager.pools[Pool.CHECKPOINTS].key(slot) is None
    driver.offload(0)
    assert manager.readers(Pool.HOST_BLOCKS, list(first.request.host_blocks)) == both[:1]
    assert manager.readers(Pool.HOST_STATES, [first.request.host_state]) == both[:1]
    driver.finish()


def test_least_recently_held_blocks_go_first():
    driver = cache("plain")
    size, blocks = driver.layout.block_tokens, driver.case.sizes.blocks
    for variety in range(3):
        freed(driver, served(driver, tokens(4 * size, variety)))
    freed(driver, admitted(driver, tokens(4 * size + 1, 0)))  # used again
    freed(driver, served(driver, tokens((blocks - 9) * size, 9)))
    found = [driver.ledger.hit(tokens(4 * size + 1, variety)) for variety in range(3)]
    # 28 slots were free: three of the oldest blocks are evicted, starting with the end of their
    # chain.
    assert found == [4 * size, size, 4 * size]
    driver.finish()


@pytest.mark.parametrize("name", case_names())
def test_tokens_that_are_told_later_are_found_then(name):
    """Once resolved, blocks and checkpoints of placeholders are as if their tokens had been
    known."""
    driver = cache(name, policy=EVERY_BLOCK)
    size, prompt = driver.layout.block_tokens, _prompt(driver)
    first = served(driver, prompt[: size + 1])
    (live,) = driver.append_tokens({first: prompt[size + 1 : 2 * size]}, known=False)
    driver.manager.resolve(live.request, prompt[size + 1 : 2 * size - 1])
    driver.verify([live])
    assert admitted(driver, prompt).request.length == size
    driver.manager.resolve(live.request, prompt[2 * size - 1 : 2 * size])
    driver.verify([live])
    assert admitted(driver, prompt).request.length == 2 * size
    driver.append_tokens({live: prompt[2 * size : 3 * size]}, known=False)
    freed(driver, live)  # the tokens are never resolved
    later = admitted(driver, prompt)
    assert later.request.length == 2 * size
    appended(driver, later, prompt[2 * size :])
    driver.finish()
