"""What is seen of torch's memory from one launch to the next."""

import torch

from ptxemu.host.allocations import LiveTensors


def _range(tensor):
    start = tensor.untyped_storage().data_ptr()
    return start, start + tensor.untyped_storage().nbytes(), True


def test_views_keep_their_storage_alive():
    live, whole = LiveTensors(), torch.zeros(1000)
    where, part = _range(whole), whole[10:20]
    assert where in live.look()[0]
    del whole
    alive, freed = live.look()
    assert where in alive
    assert where not in freed
    del part
    assert where in live.look()[1]


def test_an_address_used_again_is_both_freed_and_alive():
    live, shared = LiveTensors(), bytearray(4096)
    first = torch.frombuffer(shared, dtype=torch.uint8)
    where = _range(first)
    live.look()
    del first
    second = torch.frombuffer(shared, dtype=torch.uint8)
    assert _range(second) == where
    alive, freed = live.look()
    assert where in alive
    assert where in freed
    assert where not in live.look()[1], "told once"
