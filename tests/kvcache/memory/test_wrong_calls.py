"""Calls of a cache with invalid arguments: the error names the argument, and nothing has
changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kvcache.books.errors import StepOpen
from kvcache.books.slot_pool import Sizes
from kvcache.memory.cache import Cache
from lab.soak.wrong_types import NO_WORKS, Call, books_of, wrong_batches, wrong_calls
from tests.kvcache.memory.shadow import ids
from tests.kvcache.memory.test_cache import new


def memory_of(cache: Cache) -> list[object]:
    """Everything that a cache and its manager hold, including the bytes of its pools."""
    pools = [pool.numpy().tobytes() for pool in cache.storage.pools.values()]
    seals = {pool.name: sorted(slots) for pool, slots in cache.canary.sealed.items()}
    return [books_of(cache.manager), pools, seals, cache._open, list(cache._arrivals)]


def wrong_calls_of(cache: Cache, request: object) -> list[Call]:
    """List the wrong calls of a manager, and those of methods that only a cache has."""
    calls = [*wrong_calls(cache, request), *wrong_batches(cache.begin, request)]
    for value in NO_WORKS:
        calls += [(f"{name}({value!r})", partial(getattr(cache, name), value))
                  for name in ("finish", "abandon")]  # fmt: skip
    stream = cache.layout.streams[0].name
    for value in (None, 1, "nothing", b"x", ["x"]):
        calls += [(f"{name}({value!r}, 0)", partial(getattr(cache, name), value, 0))
                  for name in ("rows", "tail")]  # fmt: skip
    for value in (None, "0", 1.0, True, -1, 99, 1 << 70):
        calls.append((f"rows(copy={value!r})", partial(cache.rows, stream, value)))
        calls.append((f"pages({value!r})", partial(cache.pages, stream, 0, value, (8,))))
        calls.append((f"pages({value!r})", partial(cache.pages, stream, 0, torch.int8, (value,))))
    return calls


def test_a_call_with_a_wrong_type_leaves_books_seals_and_memory_as_they_were():
    shadow = new(sizes=Sizes(blocks=8, states=3, host_blocks=4, host_states=1))
    cache = shadow.cache
    request = shadow.enter("one", ids(17))
    away = shadow.enter("away", ids(9, 5))
    cache.offload(away)
    before = memory_of(cache)
    stranger = Cache(cache.layout, Sizes(4, 2)).admit("stranger", [1]).request
    calls = wrong_calls_of(cache, request)
    calls += [(f"{name}(of another)", partial(getattr(cache, name), stranger))
              for name in ("free", "preempt", "fetch", "offload")]  # fmt: skip
    assert len(calls) > 200
    for what, call in calls:
        with pytest.raises((TypeError, ValueError)):
            call()
        assert memory_of(cache) == before, what
    with cache.step({request: [1]}) as step:
        before = memory_of(cache)
        for value in (*NO_WORKS, replace(step)):
            for name in ("finish", "abandon"):
                with pytest.raises((TypeError, StepOpen)):
                    getattr(cache, name)(value)
                assert memory_of(cache) == before
        buffers = {"lengths": torch.zeros(1, dtype=torch.int32)}
        for wrong in ({"length": buffers["lengths"]}, {"owners": [1]}, {"starts": torch.zeros(1)},
                      {"positions": torch.zeros(1, dtype=torch.int32)}):  # fmt: skip
            with pytest.raises((TypeError, ValueError), match=r"array of a step|buffer"):
                step.fill(buffers | wrong)
            assert not buffers["lengths"].any()
        with pytest.raises(TypeError, match="buffers is None"):
            step.fill(None)
        with pytest.raises(ValueError, match="device 'gpu'"):
            step.tensors("gpu")


@pytest.mark.parametrize(("changes", "words"), [
    ({"layout": None}, "layout is None"),
    ({"sizes": 8}, "sizes is 8, expected Sizes"),
    ({"device": "gpu"}, "device 'gpu'"),
    ({"device": None}, "device is None"),
    ({"device": "meta"}, "device meta: a cache needs memory"),
    ({"policy": "rolling"}, "policy is 'rolling'"),
    ({"deferred": 1}, "deferred is 1, expected bool"),
    ({"canary": "yes"}, "canary is 'yes'"),
    ({"keep_events": None}, "keep_events is None"),
    ({"backend": "gpu"}, "backend 'gpu'"),
    ({"backend": "cuda"}, "backend 'cuda' needs CUDA"),
    ({"arch": "sm_80"}, "arch 'sm_80'"),
])  # fmt: skip
def test_a_cache_is_made_of_what_it_says(changes, words):
    given = {"layout": new().cache.layout, "sizes": Sizes(4, 2)} | changes
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        Cache(given.pop("layout"), given.pop("sizes"), **given)
