"""Visibility of torch's memory between launches."""

import gc

import numpy as np
import pytest
import torch

from ptxemu.errors import OutOfBounds
from ptxemu.host.allocations import LiveTensors, unseen
from tests.ptxemu.kernels import kernel, launch


def _range(tensor):
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes(), True


def _ranges(blocks):
    return [(block.start, block.end, True) for block in blocks]


def test_views_keep_their_storage_alive():
    live, whole = LiveTensors(), torch.zeros(1000)
    where, part = _range(whole), whole[10:20]
    assert where in _ranges(live.look())
    del whole
    assert where in _ranges(live.look())
    assert where not in live.freed_since(0)[0]
    del part
    assert where not in _ranges(live.known())
    assert where in live.freed_since(0)[0]


def test_an_address_used_again_is_both_freed_and_alive():
    live, shared = LiveTensors(), bytearray(4096)
    first = torch.frombuffer(shared, dtype=torch.uint8)
    where = _range(first)
    live.look()
    del first
    second = torch.frombuffer(shared, dtype=torch.uint8)
    assert _range(second) == where
    assert where in _ranges(live.look())
    freed, mark = live.freed_since(0)
    assert where in freed
    assert where not in live.freed_since(mark)[0], "told once"


def test_what_is_noted_is_known_without_a_look(monkeypatch):
    monkeypatch.setattr(gc, "get_objects", lambda: 1 / 0)
    live, tensor, array = LiveTensors(), torch.zeros(10), np.zeros((4, 8))
    live.note([tensor, (array[1:], 3), None])
    start = array.ctypes.data
    assert _ranges(live.known()) == [_range(tensor), (start, start + array.nbytes, True)]
    del array
    assert _ranges(live.known()) == [_range(tensor)]


def test_a_storage_that_moves_is_where_it_is():
    live, tensor = LiveTensors(), torch.zeros(10)
    live.note([tensor])
    before = _range(tensor)
    tensor.resize_(100_000)
    live.note([tensor])
    assert _range(tensor) != before
    assert _ranges(live.known()) == [_range(tensor)]


def test_memory_that_only_another_library_keeps_is_known():
    live, tensor = LiveTensors(), torch.zeros(10)
    live.note([tensor])
    where, capsule = _range(tensor), tensor.__dlpack__()
    del tensor
    assert _ranges(live.look()).count(where) == 1
    del capsule
    assert where not in _ranges(live.look())


@pytest.fixture
def unfrozen():
    """Unfreeze objects for the test, and freeze them again after it."""
    count = gc.get_freeze_count()
    gc.unfreeze()
    yield
    gc.unfreeze()
    if count:
        gc.freeze()


KERNEL = kernel("ld.param.u64 %rd1, [d]; st.global.b32 [%rd1], 7;", ".param .u64 d")


@pytest.mark.usefixtures("unfrozen")
@pytest.mark.parametrize(
    ("what", "check"), [("tensor", True), ("storage", False), ("subclass", False)]
)
def test_frozen_memory_is_found_by_its_address_alone(what, check):
    """`gc.freeze` hides objects from `gc.get_objects`; kernels may still get their address."""
    tensor = torch.zeros(16, dtype=torch.int32)
    kept = tensor
    if what == "storage":
        kept = tensor.untyped_storage()
    elif what == "subclass":
        kept = torch.nn.Parameter(tensor, requires_grad=False)
    address = tensor.data_ptr()
    del tensor
    gc.freeze()
    live = LiveTensors()
    params = [address.to_bytes(8, "little")]
    report = launch(KERNEL, params=params, allocated=live, check=check)
    assert not report.findings
    assert gc.get_freeze_count(), "it is frozen again"
    whole = torch.tensor([], dtype=torch.int32).set_(
        kept if what == "storage" else kept.untyped_storage()
    )
    assert whole[0] == 7
    del kept, whole
    with pytest.raises(OutOfBounds):
        launch(KERNEL, params=params, allocated=live)


@pytest.mark.usefixtures("unfrozen")
def test_the_collector_is_disturbed_once_for_each_freeze(monkeypatch):
    live, calls, unfreeze = LiveTensors(), [], gc.unfreeze
    monkeypatch.setattr(gc, "unfreeze", lambda: (calls.append(1), unfreeze()))
    live.look()
    live.look_at_frozen()
    assert not calls, "nothing is frozen"
    for times in (1, 2):
        tensor = torch.zeros(10)
        gc.freeze()
        for _ in range(2):
            live.look()
            assert _range(tensor) in _ranges(live.look_at_frozen())
        assert len(calls) == times


def test_arguments_whose_memory_is_not_seen():
    assert not any(map(unseen, (1, None, torch.zeros(1), np.zeros(1), (np.float32(1), 2.0))))
    assert all(map(unseen, (object(), [object()])))
