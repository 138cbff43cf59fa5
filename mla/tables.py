"""Checks of the kinds, dtypes and shapes of the tensors of a step, by name, before they are
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernelkit.call.tensors import require_memory, require_table, require_tensors, require_types

LONG, INT = torch.int64, torch.int32
Shapes = Mapping[str, tuple[torch.dtype, tuple[int | str | None, ...]]]


def require_kind(name: str, value: object, *kinds: type) -> None:
    """Raise TypeError for a value of none of these kinds."""
    if not isinstance(value, kinds):
        words = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} is {type(value).__name__}, expected {words}")


def require_tables(given: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise TypeError or ValueError unless all tensors exist on one device with these dtypes and
    shapes.

    A size is a number, None for any, or a letter; the same letter always stands for the same size.
    'B+1' is one more than 'B', which must come before it.
    """
    sizes: dict[Any, int] = {}
    found: dict[str, torch.Tensor] = {}
    for name, (dtype, dims) in shapes.items():
        if name not in given:
            raise ValueError(f"no table {name!r}: there are {', '.join(map(str, given))}")
        table = found[name] = given[name]
        require_types(**{name: table})
        if table.device.type == "cpu":
            require_memory(**{name: table})
        wanted = tuple(sizes.get(dim) if isinstance(dim, str) else dim for dim in dims)
        require_table(name, table, dtype, wanted)
        sizes |= dict(zip(dims, table.shape, strict=True))
        if "B" in sizes:
            sizes["B+1"] = sizes["B"] + 1
    require_tensors(**found)
