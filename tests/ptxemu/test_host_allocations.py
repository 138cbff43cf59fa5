"""What is seen of torch's memory from one launch to the next."""

import gc

import numpy as np
import torch

from ptxemu.host.allocations import LiveTensors, unseen


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
    assert where not in live.take_freed()
    del part
    assert where not in _ranges(live.known())
    assert where in live.take_freed()


def test_an_address_used_again_is_both_freed_and_alive():
    live, shared = LiveTensors(), bytearray(4096)
    first = torch.frombuffer(shared, dtype=torch.uint8)
    where = _range(first)
    live.look()
    del first
    second = torch.frombuffer(shared, dtype=torch.uint8)
    assert _range(second) == where
    assert where in _ranges(live.look())
    assert where in live.take_freed()
    assert where not in live.take_freed(), "told once"


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


def test_arguments_whose_memory_is_not_seen():
    assert not any(map(unseen, (1, None, torch.zeros(1), np.zeros(1), (np.float32(1), 2.0))))
    assert all(map(unseen, (object(), [object()])))
