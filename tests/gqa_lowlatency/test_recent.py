"""Steps of recent calls: when one is used again, and that nothing of the earlier call is left."""

from __future__ import annotations

import gc
import threading
import weakref
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch

from gqa_lowlatency import decode, recent
from tests.gqa_lowlatency.test_direct import ARCH, BF16, E4M3, same, tensors

OPTIONS = {"window": 9, "arch": "sm_90a"}


class Counted:
    """In place of a step: how many were made, and launched."""

    made, launches = 0, 0

    def __init__(self, arguments, target, config):
        Counted.made += 1

    def results(self):
        return None, None

    def own(self):
        return []

    def launch(self, tensors):
        Counted.launches += 1


@pytest.fixture(autouse=True)
def forgotten():
    """No step of another test."""
    recent._recent.steps.clear()
    yield
    recent._recent.steps.clear()


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(Counted, "made", 0)
    monkeypatch.setattr(Counted, "launches", 0)
    monkeypatch.setattr(recent, "Step", Counted)
    monkeypatch.setattr(recent, "prepare", lambda arguments: (None, None))
    return Counted


def lens(*values):
    return torch.tensor(values, dtype=torch.int32)


def calls():
    """Calls of which each needs a step of its own."""
    q, k, v = tensors()
    table = torch.zeros(2)
    yield (q, k, v), OPTIONS
    yield (q, k, v), {**OPTIONS, "window": 8}
    yield (q, k, v), {**OPTIONS, "sink_tokens": 9}
    yield (q[:, 0], k, v), OPTIONS
    yield (q, k[:, :39], v[:, :39]), OPTIONS
    yield (q, k.repeat(1, 1, 1, 2)[..., :64], v), OPTIONS
    yield tuple(tensor.half() for tensor in (q, k, v)), OPTIONS
    yield (q, k, v.to("meta")), OPTIONS
    yield (q, k, v, lens(40, 7)), OPTIONS
    yield (q, k, v, None, None, table), OPTIONS
    yield (q, k, v, None, None, None, table), OPTIONS
    yield (q, k, v, None, None, None, None, table), OPTIONS


def test_a_step_serves_calls_of_its_layouts_and_options(counted):
    for number, call in enumerate(calls(), 1):
        recent.recall(*call)
        assert counted.made == number, call
    for call in calls():  # other tensors
        recent.recall(*call)
    assert counted.made == number
    assert counted.launches == 2 * number


def test_the_oldest_step_leaves(counted, monkeypatch):
    monkeypatch.setattr(recent, "STEPS", 2)
    first, second, third, *_ = calls()
    for call in (first, second, first, third, first):
        recent.recall(*call)
    assert counted.made == 3
    recent.recall(*second)
    assert counted.made == 4
    assert len(recent._recent.steps) == 2


def test_each_thread_has_its_own(counted):
    (call, *_) = calls()
    recent.recall(*call)
    thread = threading.Thread(target=recent.recall, args=call)
    thread.start()
    thread.join()
    assert counted.made == 2


def test_contents_are_checked_at_each_call_on_the_cpu():
    q, k, v = tensors()
    decode(q, k, v, seq_lens=lens(40, 7), **ARCH)
    assert not recent._recent.steps
    with pytest.raises(ValueError, match="seq_lens 41"):
        decode(q, k, v, seq_lens=lens(40, 41), **ARCH)


def recalled(*given, **options):
    """In the emulator, by a step."""
    return recent.recall(given, options | ARCH)


def test_nothing_of_an_earlier_call_is_left():
    """Of scales, sinks and lengths neither the address nor the contents."""
    q, k, v = tensors(E4M3)
    for number in (1.0, 3.0, 0.5):
        given = {
            "seq_lens": lens(40 - int(number), 9), "page_table": None,
            "sinks": torch.full((4,), number),
            "k_scale": torch.tensor([number]), "v_scale": torch.tensor([number, 2.0]),
        }  # fmt: skip
        seen = []
        for change in (0.0, 1.0):
            given["k_scale"].fill_(number + change)  # one number: the kernel reads a copy
            seen.append(recalled(q, k, v, *given.values()))
            assert same(seen[-1], decode(q, k, v, return_lse=True, **given, **ARCH)), number
        assert not same(*seen)
    assert len(recent._recent.steps) == 1


def test_a_missing_scale_is_one():
    q, k, v = tensors(E4M3)
    for scale in (torch.full((2,), 3.0), torch.full((2,), 0.5)):
        one = {"k_scale": torch.ones(2), "v_scale": scale}
        expected = decode(q, k, v, return_lse=True, **one, **ARCH)
        assert same(recalled(q, k, v, None, None, None, None, scale), expected)


def test_a_kept_step_checks_addresses():
    q, k, v = tensors()
    recalled(q, k, v)
    odd = torch.zeros(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        recalled(odd, k, v)
    assert len(recent._recent.steps) == 1


def test_what_is_refused_is_not_kept():
    q, k, v = tensors()
    for _ in range(2):
        with pytest.raises(ValueError, match="window -1"):
            recalled(q, k, v, window=-1)
    assert not recent._recent.steps


def test_no_keys_need_no_step():
    q, k, v = tensors()
    o, lse = recalled(q, k[:, :0], v[:, :0])
    assert not o.any()
    assert torch.isneginf(lse).all()
    assert not recent._recent.steps


def held_by(owner) -> list[torch.Tensor]:
    """Tensors that an object leads to, but for what belongs to modules and classes."""
    seen, todo = {id(owner)}, [owner]
    for value in todo:
        for other in gc.get_referents(value):
            if id(other) not in seen and not isinstance(other, (type, ModuleType, FunctionType)):
                seen.add(id(other))
                todo.append(other)
    return [value for value in todo if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("options", [{}, {"parts": 2}])
def test_a_kept_step_holds_no_tensor(options, launched):
    """What is allocated in a capture, or as torch.compile warms up for one, is the graph's."""
    results = recent.recall(tensors(E4M3), options)
    (step,) = recent._recent.steps.values()
    assert len(held_by([step, *results])) == 2
    assert [len(compiled.calls) for compiled in launched] == [1]


def test_a_kept_step_keeps_no_cache_alive(launched):
    q, *_ = tensors()
    arrays = [np.zeros((2, 40, 2, 64), np.uint16) for _ in "kv"]
    alive = [weakref.ref(array) for array in arrays]
    recent.recall((q, *(torch.from_numpy(array).view(BF16) for array in arrays)), {})
    del arrays
    gc.collect()
    assert len(recent._recent.steps) == 1
    assert [array() for array in alive] == [None, None]
