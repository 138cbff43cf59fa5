"""A step that marks leaves the same checkpoint as a step that ends at the boundary."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvcache import Cache, Sizes, gqa, preset
from kvcache.books.checkpoints import Policy
from kvcache.books.work import Pool
from kvcache.memory import storage
from kvcache.movement import reference

SIZE, WINDOW, DIM = 8, 4, 8
LAYOUT = partial(gqa, 3, 1, DIM, block_tokens=SIZE, window=WINDOW, windowed=(True, False, True))


@pytest.fixture(autouse=True)
def by_definition(monkeypatch):
    copy = lambda *given, backend, arch: reference.copy_slots(*given)  # noqa: E731
    monkeypatch.setattr(storage, "copy_slots", copy)


def cache_of(policy: Policy | None = None, checkpoints: int = 8) -> Cache:
    return Cache(LAYOUT(), Sizes(24, 3, checkpoints), policy=policy)


def numbers(name: str, copy: int, first: int, count: int) -> torch.Tensor:
    """bf16 [count, DIM] that differ for every position."""
    start = 100 * copy + 1000 * (name[0] == "v")
    places = torch.arange(first, first + count)
    return ((places[:, None] * 7 + torch.arange(DIM) + start) % 251).bfloat16()


def appended(cache: Cache, request, tokens, marks: bool):
    """Append tokens as their layers do; return the step."""
    with cache.step({request: tokens}, marks=marks) as step:
        first, count = int(step.starts[0]), len(tokens)
        for ring in cache.layout.rings:
            places = {cache.rows: step.rows_of(ring.name)}
            if marks:
                places[cache.marks] = step.marks_of(ring.name)
            for copy in range(ring.copies):
                x = numbers(ring.name, copy, first, count)
                for rows, mapping in places.items():
                    pair = rows(ring.name, copy), x
                    reference.append_rows([pair], torch.from_numpy(mapping))
    return step


def served(cache: Cache, length: int, marks: bool, pieces: int = 1 << 10) -> list[int]:
    """Serve a prompt; return the lengths of its steps."""
    request, counts = cache.admit("a", [*range(length)]).request, []
    while request.length < length:
        wanted = min(pieces, length - request.length)
        room = cache.manager.room(request, wanted, marks=marks)
        appended(cache, request, range(request.length, request.length + room), marks)
        counts.append(room)
        cache.manager.check()
    return counts


def checkpoints(cache: Cache) -> dict[bytes, torch.Tensor]:
    """Bytes of every checkpoint that can be found, by the digest of its prefix."""
    size = LAYOUT().checkpoint_bytes - 64
    pool, memory = cache.manager.prefix.checkpoints, cache.storage.pools[Pool.CHECKPOINTS]
    return {digest: memory[pool.find(digest), :size].clone() for digest in pool.registered()}


@pytest.mark.parametrize("pieces", [1 << 10, 14])
@pytest.mark.parametrize("length", [9, 16, 17, 23, 24])
def test_one_step_leaves_the_same_bytes(length, pieces):
    plain, marked = cache_of(), cache_of()
    boundary = (length - 1) // SIZE * SIZE
    served(plain, length, False, pieces)
    counts = served(marked, length, True, pieces)
    if pieces > length:
        assert counts == [length]
    hits = [cache.manager.admit("b", [*range(length)]).hit for cache in (plain, marked)]
    assert hits == [boundary, boundary]
    expected, found = checkpoints(plain), checkpoints(marked)
    wanted = hit_digest(plain, length)
    assert torch.equal(found[wanted], expected[wanted])


def hit_digest(cache: Cache, length: int) -> bytes:
    """Digest of the prefix that a repeated prompt can use."""
    request = next(iter(cache.manager.requests))
    return request.digests[(length - 1) // SIZE - 1]


def test_a_step_marks_one_boundary_at_most():
    """A boundary close behind the tokens before the step needs some that are in the ring alone."""
    cache = cache_of(Policy(every=1, rolling=False))
    request = cache.admit("a", range(40)).request
    room = partial(cache.manager.room, request, marks=True)
    assert (room(20), room(16), room(8), room(7)) == (16, 16, 8, 7)
    step = appended(cache, request, range(5), True)
    assert not step.marks
    assert (room(20), room(3)) == (11, 3)  # 3 tokens of 8 are all that the window - 1 needs
    appended(cache, request, range(5, 6), True)
    assert room(20) == 2
    step = appended(cache, request, range(6, 20), True)  # too long: the first is missed
    assert (step.marks, cache.manager.counters.checkpoints_missed) == ((), 1)


def test_a_step_that_fails_leaves_nothing():
    cache = cache_of()
    request = cache.admit("a", range(12)).request
    step = cache.begin({request: range(12)}, marks=True)
    assert [mark[:2] for mark in step.marks] == [(0, SIZE)]
    cache.abandon(step)
    assert not checkpoints(cache)
    assert cache.admit("b", range(12)).hit == 0


def test_placeholders_are_named_later():
    from kvcache import Placeholders

    cache = cache_of(Policy(every=1))
    request = cache.admit("a", Placeholders(12)).request
    with cache.step({request: Placeholders(12)}, marks=True) as step:
        assert [mark[:2] for mark in step.marks] == [(0, SIZE)]
    assert not checkpoints(cache)
    cache.resolve(request, range(12))
    assert cache.admit("b", range(12)).hit == SIZE


def test_places_are_those_of_segments():
    for layout in (LAYOUT(), LAYOUT(draft=1), gqa(2, 3, 16, window=128, windowed=(True, False))):
        assert layout.can_mark
        for position in (layout.block_tokens, 3 * layout.block_tokens):
            segments = {first: (place, size) for first, place, size in layout.segments(position)}
            for ring in layout.rings:
                for copy in range(ring.copies):
                    place = layout.mark(ring.name, copy)
                    start = layout.offset(ring.name, copy) + ring.record.data_bytes
                    size = place.rows * ring.record.data_bytes
                    assert segments[start] == (place.data_offset, size)


def test_what_cannot_be_marked():
    for layout in (LAYOUT(draft=3), gqa(2, 1, DIM, block_tokens=SIZE), preset("deepseek-v4-pro")):
        cache = Cache(layout, Sizes(4, 1, 1))
        assert not layout.can_mark
        request = cache.admit("a", range(4)).request
        for call in (cache.manager.append, partial(cache.begin)):
            with pytest.raises(ValueError, match=f"marks with the layout {layout.name}: only"):
                call({request: range(4)}, marks=True)
        with pytest.raises(ValueError, match="marks with the layout"):
            cache.manager.room(request, 4, marks=True)
    with pytest.raises(ValueError, match="'k' of gqa: only rings"):
        LAYOUT().mark("k", 0)
    with pytest.raises(ValueError, match="it has 2"):
        LAYOUT().mark("k_window", 2)
    step = cache_of().manager.append({})
    with pytest.raises(TypeError, match="'k' is not a ring"):
        step.marks_of("k")
