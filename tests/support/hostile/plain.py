"""Judge an accepted hostile call by its plain form: both have to give the same bits.

In the plain form every tensor is contiguous, aligned and has separate memory, and every number is a
Python number. So a stride, an alignment, common memory or a type of number that is accepted but
ignored shows as different bits. Other tests show that the plain call itself is right.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from lab.tools.place import poisoned_outputs
from tests.support.hostile.calls import REFUSALS
from tests.support.hostile.generator import Base, Call, Given, at


class Reached(Exception):
    """Raised when every check has passed and something would be compiled."""


def plain(value: Any) -> Any:
    """Return the value in its simplest form; an object with other state stays as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        items = [plain(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)  # with state besides its fields
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, plain(getattr(value, field.name)))
        return made
    return value


def unlike_plain(call: Call, twin: Call) -> str | None:
    """Return the difference of the plain form of a call: '' for none, None if nothing ran.

    Args:
        call: the call to judge, run as it is.
        twin: the same call, drawn again, which is run in its plain form.
    """
    if call.raised is not None or any(tensor.is_meta for _, tensor in tensors(call.given)):
        return None
    try:
        found = ending(call.base, call.base.function, call.given)
    except (*REFUSALS, Reached):
        return None
    except Exception as error:  # noqa: BLE001 - any other is a finding
        return f"accepted, then {type(error).__name__}: {error}"
    try:
        wanted = ending(twin.base, twin.base.function, plain(twin.given))
    except Reached:
        return None
    except Exception as error:  # noqa: BLE001 - the plain call means the same
        return f"its plain form raises {type(error).__name__}: {error}"
    return unlike(found, wanted)


def ending(base: Base, function: Callable, given: Given) -> dict[str, Any]:
    """Return results and written arguments of a call of the base's function, in either form."""
    with poisoned_outputs():
        assert base.computed is not None
        result = base.computed(function(**given), given)
    written = {path: at(given, path) for path in base.writes}
    return {"the result": result} | {f"{path}, which is written,": t for path, t in written.items()}


def unlike(found: dict[str, Any], wanted: dict[str, Any]) -> str | None:
    if not [*tensors(found)]:
        return None
    for name, value in found.items():
        here, there = [*tensors(value)], [*tensors(wanted[name])]
        if [path for path, _ in here] != [path for path, _ in there]:
            return f"{name} has other parts"
        for (path, one), (_, other) in zip(here, there, strict=True):
            if (one.shape, one.dtype) != (other.shape, other.dtype):
                return f"{name}{path} is {one.dtype} {tuple(one.shape)}, unlike the plain one"
            if not torch.equal(_bits(one), _bits(other)):
                return f"{name}{path} has other bits"
    return ""


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements, in order."""
    packed = tensor.detach().clone(memory_format=torch.contiguous_format)
    return packed.flatten().view(torch.uint8)


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and tensor for each tensor in arguments or results."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from tensors(item, f"{path}.{name}")
    elif isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from tensors(item, f"{path}.{place}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), f"{path}.{field.name}")
