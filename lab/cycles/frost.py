"""FROST, the attention of cuDNN's Python, where it is installed: a call on a machine without GPU.

It asks tensors for their device, and its binder, which is no Python, looks at their memory by
itself: the ones say that they are on a GPU, the other is told facts instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ptxemu.host.emulator import Emulator
from ptxemu.host.gpu_machine import machine_with_gpu
from ptxemu.host.patching import patched

HOW_TO_GET = "FROST is not installed: `pip install nvidia-cudnn-frontend`"
_CUDA = torch.device("cuda", 0)
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class SaysCuda(TorchFunctionMode):
    """Tensors say that they are on the GPU, which some ask for by name."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function == _DEVICE:
            return _CUDA
        found = function(*args, **(kwargs or {}))
        return _CUDA if isinstance(found, torch.device) else found


@contextmanager
def frost() -> Iterator[Callable[..., Any]]:
    """Its forward pass for sm_100a. ImportError, with how to get it, where it is not installed."""
    with machine_with_gpu(Emulator()):
        try:
            api = importlib.import_module("cudnn.sdpa.fwd.api_dsl")
            prepared = importlib.import_module("cudnn.sdpa.fwd.prepared")
            binder = importlib.import_module("cudnn")._pybind_module
        except (ImportError, AttributeError) as missing:
            raise ImportError(f"{HOW_TO_GET} ({missing})") from missing

        def told(spec: Any, buffers: Any, stream: Any, scale: Any, workspace: int = 0) -> Any:
            given = (*buffers, *[None] * (len(prepared._NATIVE_DENSE_ROLES) - len(buffers)))
            packed, _ = binder._read_buffer_sequence(given)
            for number, each in enumerate(given):
                if each is not None:
                    prepared._set_native_fact(packed, number, prepared.facts_of_tensor(each))
            indices = prepared._NATIVE_DENSE_INDICES
            return spec.native.execute(packed, indices, stream, scale, workspace)

        with SaysCuda(), patched(prepared, {"execute_native_dense_tensors": told}):
            yield api.sdpa_fwd_wrapper_dsl_sm100
