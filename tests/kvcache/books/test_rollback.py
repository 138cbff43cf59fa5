"""Rejected drafts: a rollback restores exactly the state before them."""

from __future__ import annotations

import math

import pytest

from kvcache.books.errors import RollbackPastRing
from lab.soak.small_caches import History
from tests.kvcache.books.lone import admitted, appended, cache, case_names, image, served, tokens

# Layouts with drafts.
DRAFTING = ["sparse", "raw", "window", "plain", "drafts"]


def _reference(name, history):
    """Return the image of a request that appended these tokens and never rolled back."""
    driver = cache(name)
    return image(driver, served(driver, history))


@pytest.mark.parametrize("name", DRAFTING)
def test_rejected_drafts_leave_nothing_at_every_offset(name):
    """At every position in rings, windows, tails and blocks: drafts of every length, of which every
    number is rolled back; then other tokens, one by one, overwrite the rejected ones."""
    layout = cache(name).layout
    draft, size = layout.draft, layout.block_tokens
    ends = 2 * size + math.lcm(size, 2)
    for back in range(1, draft + 1):
        driver = cache(name)
        live = served(driver, tokens(1))
        accepted = tokens(1)
        for at in range(1, ends):
            appended(driver, live, tokens(draft, 10 + at))  # the draft, in one step
            driver.take_back(live, back)
            driver.verify([live])
            accepted += tokens(draft, 10 + at)[: draft - back]
            assert live.request.tokens.tolist() == accepted
            appended(driver, live, tokens(1, 100 + at))
            accepted += tokens(1, 100 + at)
            if len(accepted) > ends:
                break
        assert image(driver, live) == _reference(name, accepted)
        driver.finish()


@pytest.mark.parametrize("name", DRAFTING)
def test_tokens_come_back_one_at_a_time_and_again(name):
    """The limit counts from the furthest position, so it does not move with the request."""
    driver = cache(name)
    draft, state = driver.layout.draft, driver.layout.has_state
    for length in range(draft + 1, 4 * driver.layout.block_tokens):
        live = served(driver, tokens(length))
        for done in range(1, draft + 1):
            driver.take_back(live, 1)
            driver.verify([live])
            assert live.history.most_back(driver.layout) == (
                draft - done if state else length - done
            )
        if state:
            with pytest.raises(RollbackPastRing, match=rf"{live.request.name}.* 1 tokens.* 0"):
                driver.manager.rollback(live.request, 1)
        appended(driver, live, tokens(1, 7))
        with pytest.raises(RollbackPastRing):
            driver.manager.rollback(live.request, 2 if state else length - draft + 2)
        appended(driver, live, tokens(2 * draft, 7)[1:], chunk=1)
        expected = _reference(name, tokens(length - draft) + tokens(2 * draft, 7))
        assert image(driver, live) == expected
        driver.free(0)
        driver.clear()
        driver.verify()


@pytest.mark.parametrize("name", case_names(state=True))
def test_nothing_before_the_place_where_the_state_came_from_elsewhere(name):
    driver = cache(name)
    size, draft = driver.layout.block_tokens, driver.layout.draft
    prompt = tokens(2 * size + 1)
    parent = served(driver, prompt)
    (_, child) = driver.fork(0)
    hit = admitted(driver, prompt)
    driver.offload(0)
    driver.fetch(0)
    for live in (parent, child, hit):
        with pytest.raises(RollbackPastRing) as error:
            driver.manager.rollback(live.request, 1)
        assert (error.value.request, error.value.asked) == (live.request.name, 1)
        assert error.value.limit == 0
        appended(driver, live, tokens(draft + 1, 3), chunk=1)
        driver.take_back(live, draft)
        driver.verify()
    driver.finish()


def test_without_a_state_everything_comes_back():
    driver = cache("plain")
    live = served(driver, tokens(30))
    with pytest.raises(RollbackPastRing, match="cannot take back 31 tokens, at most 30"):
        driver.manager.rollback(live.request, 31)
    with pytest.raises(ValueError, match="cannot take back -1 tokens"):
        driver.manager.rollback(live.request, -1)
    driver.take_back(live, 30)
    driver.verify()
    assert len(live.request.blocks) == 0
    # Blocks that it had filled are still found by requests with the same tokens.
    assert admitted(driver, tokens(30)).request.length == 28


def test_a_block_that_others_hold_is_left_alone():
    """Roll back into a block that a fork, or the cache, still holds, and write other tokens."""
    driver = cache("plain")
    size = driver.layout.block_tokens
    first = served(driver, tokens(3 * size))
    (_, twin) = driver.fork(0)
    shared = list(first.request.blocks)
    driver.take_back(twin, size + 1)
    appended(driver, twin, tokens(2, 8))
    assert list(first.request.blocks) == shared
    assert twin.request.blocks[0] == shared[0]
    assert twin.request.blocks[1] != shared[1]
    assert driver.told["blocks_copied_on_write"] == 1
    # As the only holder a request writes in place, and the old content is not found any more.
    driver.free(driver.live.index(twin))
    driver.take_back(first, 1)
    appended(driver, first, tokens(1, 9))
    assert list(first.request.blocks) == shared
    assert driver.told["blocks_copied_on_write"] == 1
    assert driver.ledger.hit(tokens(3 * size + 1)) == 2 * size
    driver.finish()


def test_of_those_who_share_a_block_the_last_one_of_a_step_keeps_it():
    driver = cache("plain")
    size = driver.layout.block_tokens
    served(driver, tokens(size + 2))
    driver.fork(0)
    driver.fork(0)
    first, second, third = driver.live
    shared = first.request.blocks[1]
    # The third is not in the step, so both of the others have to copy.
    driver.append_tokens({first: [1], second: [2]})
    driver.verify()
    assert third.request.blocks[1] == shared
    assert driver.told["blocks_copied_on_write"] == 2
    driver.fork(driver.live.index(third))
    driver.append_tokens({third: [3], driver.live[-1]: [4]})
    driver.verify()
    assert driver.told["blocks_copied_on_write"] == 3
    assert driver.live[-1].request.blocks[1] == shared
    driver.finish()


def test_the_naive_model_counts_from_the_furthest_position():
    layout, history = cache("sparse").layout, History(tokens=range(10))
    history.cut(8)
    assert history.most_back(layout) == 1
    history.extend([1])
    assert history.most_back(layout) == 2
    history.restored()
    assert history.most_back(layout) == 0
