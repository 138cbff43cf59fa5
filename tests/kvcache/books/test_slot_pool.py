"""The pool of slots alone: which slots are handed out and returned, in which order, and when."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.books.errors import DoubleFree, HostTierFull, InvariantBroken, PoolExhausted
from kvcache.books.slot_pool import SlotPool


def pool(slots=6, **options):
    return SlotPool("blocks", slots, **options)


def test_slots_below_the_first_are_never_handed_out():
    slots = pool(5, first=1)
    assert sorted(slots.take(5)) == [1, 2, 3, 4, 5]
    with pytest.raises(DoubleFree, match="slot 0 of blocks"):
        slots.release([0])
    with pytest.raises(ValueError, match="-1 blocks"):
        pool(-1)


@pytest.mark.parametrize(
    ("on_host", "error"), [(False, PoolExhausted), (True, HostTierFull)], ids=["device", "host"]
)
def test_all_or_nothing(on_host, error):
    slots = pool(on_host=on_host)
    slots.take(4)
    with pytest.raises(error, match=r"request 'one' needs 3 of blocks, 2 are free$"):
        slots.take(3, "one")
    assert slots.available == 2
    assert slots.take(0) == []
    assert len(slots.take(2)) == 2


def test_a_release_of_more_than_is_held_releases_nothing():
    slots = pool()
    taken = slots.take(3)
    slots.share(taken[:1])
    for wrong in ([*taken, taken[1]], [taken[0]] * 3, [taken[2], 5 - taken[0]]):
        with pytest.raises(DoubleFree, match="nobody holds it"):
            slots.release(wrong)
        slots.check({taken[0]: 2, taken[1]: 1, taken[2]: 1})
    slots.release([*taken, taken[0]])
    slots.check({})


def test_what_nobody_holds_is_shared_by_its_key_alone():
    slots = pool()
    (slot,) = slots.take(1)
    assert slots.register(slot, "key")
    assert not slots.register(slot, "another")
    slots.release([slot])
    assert (slots.find("key"), slots.key(slot), slots.kept) == (slot, "key", 1)
    slots.share([slot])
    assert (slots.holders(slot), slots.kept) == (1, 0)
    assert slots.unregister(slot) == "key"
    slots.release([slot])
    with pytest.raises(DoubleFree, match=f"slot {slot} of blocks is shared"):
        slots.share([slot])
    slots.check({})


def test_the_first_with_a_key_stays():
    slots = pool()
    first, second = slots.take(2)
    assert slots.register(first, "key")
    assert not slots.register(second, "key")
    assert slots.find("key") == first
    slots.release([first, second])
    assert (slots.kept, slots.available) == (1, 6)


def test_kept_slots_go_last_and_the_least_recently_held_first():
    slots, gone = pool(), []
    slots.on_evict = lambda slot, key: gone.append((slot, key))
    taken = slots.take(6)
    for slot in taken[:4]:
        slots.register(slot, f"key {slot}")
    slots.release(taken)
    slots.share(taken[:1])
    slots.release(taken[:1])
    assert set(slots.take(2)) == set(taken[4:])
    assert gone == []
    slots.take(3)
    assert gone == [(slot, f"key {slot}") for slot in taken[1:4]]
    assert slots.registered() == [f"key {taken[0]}"]


def test_slots_wait_for_the_work_that_may_touch_them():
    slots = pool(3)
    first, second, third = slots.take(3)
    slots.release([first], ticket=1)
    slots.release([second, third], ticket=3)
    assert (slots.available, slots.waiting, slots.held) == (0, 3, 0)
    with pytest.raises(PoolExhausted, match="0 are free, 3 more wait for device work in flight"):
        slots.take(1)
    slots.over(2)
    assert slots.take(1) == [first]
    slots.over(3)
    assert sorted(slots.take(2)) == sorted([second, third])
    # Finished work delays nothing.
    slots.release([second], ticket=3)
    assert slots.available == 1


def test_a_slot_that_is_found_again_while_it_waits_is_busy():
    slots = pool(2)
    (slot,) = slots.take(1)
    slots.register(slot, "key")
    slots.release([slot], ticket=4)
    slots.share([slot])
    assert slots.busy(slot)
    slots.release([slot], ticket=6)  # waits again, for the later work
    slots.over(4)
    assert (slots.waiting, slots.kept) == (1, 0)
    slots.over(6)
    assert (slots.waiting, slots.kept) == (0, 1)
    slots.share([slot])
    assert not slots.busy(slot)


def test_a_slot_that_one_of_two_gave_back_is_busy_until_the_work_is_over():
    slots = pool(2)
    (slot,) = slots.take(1)
    slots.share([slot])
    slots.release([slot], ticket=2)
    assert slots.busy(slot)
    slots.over(1)
    assert slots.busy(slot)
    slots.over(2)
    assert not slots.busy(slot)


def test_check_names_what_is_wrong():
    slots = pool()
    taken = slots.take(2)
    slots.check(dict.fromkeys(taken, 1))
    with pytest.raises(InvariantBroken, match="blocks: holders"):
        slots.check({taken[0]: 1})
    slots.register(taken[0], "key")
    slots._slot_of["another"] = taken[1]
    with pytest.raises(InvariantBroken, match="blocks: keys and slots"):
        slots.check(dict.fromkeys(taken, 1))


@settings(max_examples=50, derandomize=True, database=None, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["take", "release", "share", "over"]), st.integers(0, 9)))
)
def test_no_slot_is_held_twice_or_lost(steps):
    slots, held, ticket = pool(8, first=1), {}, 0
    for step, number in steps:
        mine = sorted(held)
        if step == "take" and number <= slots.available:
            taken = slots.take(number)
            assert len(set(taken)) == number
            assert not set(taken) & set(held)
            held.update(dict.fromkeys(taken, 1))
            for slot in taken[::2]:
                slots.register(slot, (slot, number, len(held)))
        elif step == "release" and mine:
            ticket += 1
            slot = mine[number % len(mine)]
            slots.release([slot], ticket if number % 2 else 0)
            held[slot] -= 1
            held = {s: n for s, n in held.items() if n}
        elif step == "share" and mine:
            slot = mine[number % len(mine)]
            slots.share([slot])
            held[slot] += 1
        elif step == "over":
            slots.over(ticket - number)
        slots.check(held)
    slots.over(ticket)
    slots.release([slot for slot, count in held.items() for _ in range(count)])
    assert slots.available == slots.slots
