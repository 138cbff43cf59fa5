"""Numba's CUDA compiler up to PTX, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ptxemu.host.patching import patched


@dataclass(frozen=True)
class Argument:
    """An argument of a function.

    text: its type as Numba writes it.
    ndim: dimensions of an array, None for a value.
    dtype: element type of an array.
    layout: "C", "F" or "A" (any strides) of an array.
    """

    text: str
    ndim: int | None = None
    dtype: str = ""
    layout: str = ""


def lowered(
    function: Any, signature: Any, capability: tuple[int, int], options: dict[str, Any]
) -> tuple[str, list[Argument]]:
    """Compile a kernel; return its PTX and its arguments.

    Raises ModuleNotFoundError if Numba is not installed, and TypeError for an argument that is
    neither an array nor a number.
    """
    from numba import cuda
    from numba.core import sigutils
    from numba.cuda import dispatcher

    source = getattr(function, "py_func", function)  # of a `cuda.jit` function
    types, returned = sigutils.normalize_signature(signature)
    # A device function, such as a shuffle of Numba's own, is compiled for the GPU that is there.
    gpu = SimpleNamespace(compute_capability=capability)
    with patched(dispatcher, {"get_current_device": lambda: gpu}):
        ptx, _ = cuda.compile_ptx(source, signature, device=False, cc=capability, **options)
    if returned is not None and str(returned) != "none":
        raise TypeError(f"a kernel returns nothing; the signature has {returned}")
    return ptx, _arguments(types)


def _arguments(types: Sequence[Any]) -> list[Argument]:
    from numba import types as known

    found = []
    for number, each in enumerate(types):
        if isinstance(each, known.Array):
            found.append(Argument(str(each), each.ndim, str(each.dtype), each.layout))
        elif isinstance(each, known.Integer | known.Float | known.Boolean | known.CPointer):
            found.append(Argument(str(each)))
        else:
            raise TypeError(f"argument {number} is {each}; supported are arrays and numbers")
    return found
