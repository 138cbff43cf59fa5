"""Native launches without a GPU: what a host function would be handed, read from its pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class Recorded:
    """A compiled function of the DSL whose executor calls a host function that only takes notes.

    kinds: ctypes type of what each argument points to, the stream included. calls: their values.
    code: what the CUDA runtime would answer.
    """

    def __init__(self, compiled: Any, kinds: Sequence[type]) -> None:
        self._execution_args, self._kinds = compiled.execution_args, kinds
        self.calls, self.code = [], 0
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(self._note)

    def to(self, device: Any) -> Any:
        from cutlass.base_dsl.jit_executor import JitExecutor

        module = SimpleNamespace(capi_func=self._entry, execution_args=self._execution_args)
        return JitExecutor(module, None, False)

    def _note(self, packed: int) -> int:
        *pointers, result = (ctypes.c_void_p * (len(self._kinds) + 1)).from_address(packed)
        pairs = zip(self._kinds, pointers, strict=True)
        self.calls.append([_value(kind.from_address(pointer)) for kind, pointer in pairs])
        ctypes.c_int32.from_address(result).value = self.code
        return 0


def _value(word: Any) -> Any:
    return list(word) if isinstance(word, ctypes.Array) else word.value


class Gpu:
    """What torch says of one: the current device and its stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.index, self.stream, self.entered = 0, 0, []
        patch.setattr(torch.cuda, "device", self._enter)
        patch.setattr(torch.cuda, "current_device", lambda: self.index)
        raw = "_cuda_getCurrentRawStream"
        patch.setattr(torch._C, raw, lambda index: self.stream, raising=False)

    def _enter(self, device: torch.device | int) -> nullcontext:
        self.index = device if isinstance(device, int) else device.index or 0
        self.entered.append(self.index)
        return nullcontext()
