"""NVTX ranges for Nsight: of every operator, and of what a caller names, such as a layer.

They are there where BLACKWELL_KERNELS_NVTX is set when our packages are imported. Without it,
functions are what they are, and a range of a caller is one comparison.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

VARIABLE = "BLACKWELL_KERNELS_NVTX"
ON = os.environ.get(VARIABLE, "0") not in ("", "0")
_NOTHING: AbstractContextManager[None] = nullcontext()
_Function = TypeVar("_Function", bound=Callable)


def nvtx_range(name: str) -> AbstractContextManager[Any]:
    """A range round a block, where ranges are on and torch has a GPU."""
    if not ON:
        return _NOTHING
    import torch

    return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else _NOTHING


def ranged(call: _Function, name: str | None = None) -> _Function:
    """The function, in a range of this name or of its own; itself where ranges are off. name: of a
    method None, whose object has a `name`."""
    if not ON:
        return call

    @functools.wraps(call)
    def inside(*args: Any, **options: Any) -> Any:
        with nvtx_range(args[0].name if name is None else name):
            return call(*args, **options)

    return inside
