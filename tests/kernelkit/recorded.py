"""Native launches without a GPU: the arguments of a host function, read from its pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from kernelkit.compile.kernel import CompiledKernel


class Recorded:
    """A compiled kernel whose host function only records its arguments.

    kinds: ctypes type that each argument points to, including the stream.
    calls: the recorded values.
    code: result code of the simulated CUDA runtime.
    """

    def __init__(self, compiled: CompiledKernel, kinds: Sequence[type]) -> None:
        self.signature, self._kinds = compiled.signature, kinds
        self.calls, self.code = [], 0

    def entry(self, device: int) -> Callable[[ctypes.Array], None]:
        return self._note

    def _note(self, packed: ctypes.Array) -> None:
        *pointers, result = packed
        pairs = zip(self._kinds, pointers, strict=True)
        self.calls.append([_value(kind.from_address(pointer)) for kind, pointer in pairs])
        ctypes.c_int32.from_address(result).value = self.code


def _value(word: Any) -> Any:
    return list(word) if isinstance(word, ctypes.Array) else word.value


class Gpu:
    """A simulated GPU in torch: the current device and its stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.index, self.stream, self.entered = 0, 0, []
        patch.setattr(torch.cuda, "device", self._enter)
        patch.setattr(torch.cuda, "current_device", lambda: self.index)
        for name in ("launch", "tape"):
            patch.setattr(f"kernelkit.{name}.current_device", lambda: self.index)
        patch.setattr("kernelkit.call.launch.current_stream", lambda index: self.stream)

    def _enter(self, device: torch.device | int) -> nullcontext:
        self.index = device if isinstance(device, int) else device.index or 0
        self.entered.append(self.index)
        return nullcontext()
