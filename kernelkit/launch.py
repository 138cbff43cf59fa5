"""Where a compiled kernel runs: natively on the GPU of its tensors, or in the emulator.

`choose_target` decides by the tensors' device and its compute capability; `launch` runs there. What
cannot run raises and says why: nothing falls back to another implementation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

BACKENDS = ("auto", "cuda", "emulate")
# Code for an `a` architecture runs on exactly one compute capability (NVIDIA Blackwell
# Compatibility Guide); what is written for sm_100a compiles for sm_103a as it is.
ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
WRITTEN_FOR = {"sm_103a": "sm_100a"}
EMULATED = ("sm_100a", "sm_90a")  # without a wish the first that a kernel is written for


@dataclass(frozen=True)
class Target:
    """backend: 'cuda' or 'emulate'; arch: what to compile for."""

    backend: str
    arch: str


@dataclass
class Emulation:
    """Options for emulated launches of this context, and the reports they leave, in order."""

    options: Any = None
    reports: list[Any] = field(default_factory=list)


_emulation: ContextVar[Emulation | None] = ContextVar("emulation", default=None)


@contextmanager
def emulation(options: Any = None) -> Iterator[Emulation]:
    """Within the block emulated launches use `options` (ptxemu.Options) and append their report."""
    active = Emulation(options)
    token = _emulation.set(active)
    try:
        yield active
    finally:
        _emulation.reset(token)


def choose_target(
    device: torch.device, backend: str, arch: str | None, archs: Sequence[str]
) -> Target:
    """Target for tensors on `device`.

    archs: architectures that the kernel is written for. ValueError for a wish that contradicts the
    device, NotImplementedError for a device that no kernel is written for.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: one of {BACKENDS}")
    if arch is not None and arch not in archs:
        raise NotImplementedError(f"arch {arch!r}: this kernel is written for {tuple(archs)}")
    if device.type == "cpu":
        return _cpu_target(backend, arch, archs)
    if device.type != "cuda":
        raise NotImplementedError(f"device {device}: tensors live on the CPU or on a CUDA GPU")
    if backend == "emulate":
        raise ValueError(f"backend 'emulate' runs on CPU memory, the tensors are on {device}")
    capability = torch.cuda.get_device_capability(device)
    native = ARCH_OF_CAPABILITY.get(capability)
    if WRITTEN_FOR.get(native, native) not in archs:
        raise NotImplementedError(
            f"{device} has compute capability {capability[0]}.{capability[1]}; "
            f"this kernel is written for {tuple(archs)}"
        )
    if arch not in (None, native):
        raise ValueError(f"arch {arch!r} does not run on {device}, which needs {native!r}")
    return Target("cuda", native)


def _cpu_target(backend: str, arch: str | None, archs: Sequence[str]) -> Target:
    if backend == "cuda":
        raise ValueError("backend 'cuda' needs CUDA tensors, these are on the CPU")
    possible = [name for name in EMULATED if name in archs and arch in (None, name)]
    if not possible:
        raise NotImplementedError(f"the emulator runs {EMULATED}, not {arch or tuple(archs)}")
    return Target("emulate", possible[0])


@cache
def clusters_at_once(device: torch.device, ctas: int) -> int:
    """Clusters of `ctas` CTAs, one CTA to an SM, that a CUDA device runs at the same time."""
    from cutlass.utils import HardwareInfo

    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        return HardwareInfo(index).get_max_active_clusters(ctas)


def launch(compiled: Any, arguments: Sequence[Any], target: Target, device: torch.device) -> None:
    """Call `compiled` with `arguments`, and a stream as the last one.

    arguments: tensors (last dimension contiguous), numbers, None, and tuples of them. Natively the
    launch goes to torch's current stream of `device` and does not wait for it.
    """
    from cuda.bindings.driver import CUstream

    converted = [_argument(item) for item in arguments]
    if target.backend == "cuda":
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            compiled(*converted, CUstream(stream))
        return
    _emulate(compiled, converted)


class PreparedLaunch:
    """A launch with its arguments converted beforehand; a call only says where tensors lie now.

    The DSL describes a tensor by its address and, behind it, sizes and strides. A call overwrites
    the addresses and launches: a few microseconds of host work instead of a hundred. One thread at
    a time.
    """

    def __init__(
        self, compiled: Any, arguments: Sequence[Any], target: Target, device: torch.device
    ) -> None:
        from cuda.bindings.driver import CUstream

        self._compiled, self._target, self._device = compiled, target, device
        self._converted = [_argument(item) for item in arguments]
        pairs = zip(_leaves(arguments), _leaves(self._converted), strict=True)
        self._addresses = [
            _address_of(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor)
        ]
        if target.backend == "cuda":
            with torch.cuda.device(device):
                self._index = torch.cuda.current_device()
                self._executor = compiled.to(None)
                self._stream = CUstream(0)
                pointers, self._adapted = self._executor.generate_execution_args(
                    *self._converted, self._stream
                )
            self._pointers = [as_pointer(pointer) for pointer in pointers]
            self._stream_word = ctypes.c_uint64.from_address(self._stream.getPtr())

    def __call__(self, addresses: Sequence[int]) -> None:
        """addresses: of all tensors among the arguments, in their order."""
        for word, address in zip(self._addresses, addresses, strict=True):
            word.value = address
        if self._target.backend != "cuda":
            _emulate(self._compiled, self._converted)
        elif torch.cuda.current_device() == self._index:
            self._enqueue()
        else:
            with torch.cuda.device(self._index):
                self._enqueue()

    def _enqueue(self) -> None:
        self._stream_word.value = torch.cuda.current_stream(self._index).cuda_stream
        self._executor.run_compiled_program(self._pointers)


def as_pointer(pointer: int | ctypes.c_void_p) -> ctypes.c_void_p:
    """The DSL gives either; the former it would convert at every call."""
    return pointer if isinstance(pointer, ctypes.c_void_p) else ctypes.c_void_p(pointer)


def _emulate(compiled: Any, converted: Sequence[Any]) -> None:
    from cuda.bindings.driver import CUstream

    import ptxemu

    active = _emulation.get() or Emulation()
    report = ptxemu.run(compiled, *converted, CUstream(0), options=active.options)
    active.reports.append(report)


def _leaves(value: Any) -> Iterator[Any]:
    """What nested tuples and lists hold, in order."""
    if not isinstance(value, tuple | list):
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _address_of(tensor: torch.Tensor, converted: Any) -> ctypes.c_uint64:
    """The word of a converted tensor that holds its address."""
    (pointer,) = converted.__c_pointers__()
    word = ctypes.c_uint64.from_address(pointer)
    if word.value != tensor.data_ptr():
        raise RuntimeError("the DSL's description of a tensor does not begin with its address")
    return word


def _argument(value: Any) -> Any:
    """A tensor as the DSL takes it, all shapes and strides dynamic but the last stride."""
    if isinstance(value, tuple):
        return tuple(_argument(item) for item in value)
    if not isinstance(value, torch.Tensor):
        return value
    from cutlass.cute.runtime import from_dlpack

    if value.numel() > 1 and 0 in value.stride():
        # The DSL would take it for a constant, and every argument behind it for its neighbour.
        raise ValueError(f"strides {value.stride()}: a broadcast tensor cannot be an argument")
    return from_dlpack(value.detach()).mark_layout_dynamic(leading_dim=value.ndim - 1)
