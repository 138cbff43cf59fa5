"""Which memory a program has allocated, as far as it can be seen from outside: torch's tensors."""

from __future__ import annotations

import gc
import sys

from ptxemu.machine.memory import Range


def live_tensors() -> list[Range] | None:
    """The storage of every CPU tensor that is alive; None without torch."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    ranges, kinds = set(), _with_subclasses(torch.Tensor)
    for item in [each for each in gc.get_objects() if type(each) in kinds]:
        if item.device.type == "cpu" and _stored(item):
            storage = item.untyped_storage()
            ranges.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), True))
    return sorted(ranges)


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _stored(tensor: object) -> bool:
    """Whether it has bytes of its own: a fake or sparse tensor has none."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        return False
