"""Whether the process may write to memory of the host, asked before a kernel is emulated there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from kernelkit.call.tensors import reach

MAPS = "/proc/self/maps"


def require_writable(**tensors: torch.Tensor) -> None:
    """ValueError for a tensor in memory that is mapped read-only, such as np.memmap's of mode 'r'.

    A store to it would end the process. Memory that torch has allocated can be written and is not
    looked at. Where there is no list of mappings, nothing is refused.
    """
    asked = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.device.type == "cpu"
        and tensor.numel()
        and not tensor.untyped_storage().resizable()
    }
    if not asked:
        return
    protected = [*_protected()]
    for name, tensor in asked.items():
        begin = tensor.data_ptr()
        end = begin + reach(tensor)
        if any(begin < last and first < end for first, last in protected):
            raise ValueError(
                f"{name} is in memory that is mapped read-only, and it is written. Give a copy, or "
                "map the file for writing: np.memmap(..., mode='r+'), or 'c' for a private copy"
            )


def _protected() -> Iterator[tuple[int, int]]:
    """Yield (first, behind the last) address of each mapping that cannot be written."""
    with contextlib.suppress(FileNotFoundError, PermissionError), open(MAPS) as lines:
        for line in lines:
            span, access, _ = line.split(" ", 2)
            if access[1] != "w":
                first, last = span.split("-")
                yield int(first, 16), int(last, 16)
