"""Where a compiled kernel runs: natively on the GPU of its tensors, or in the emulator.

`choose_target` decides by the tensors' device and its compute capability; `launch` runs there. What
cannot run raises and says why: nothing falls back to another implementation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from kernelkit import hw

BACKENDS = ("auto", "cuda", "emulate")
# Code for an `a` architecture runs on exactly one compute capability (NVIDIA Blackwell
# Compatibility Guide); what is written for sm_100a compiles for sm_103a as it is.
ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
WRITTEN_FOR = {"sm_103a": "sm_100a"}
EMULATED = ("sm_100a", "sm_90a")  # without a wish the first that a kernel is written for


def written_for(arch: str | None) -> str | None:
    """The architecture whose kernels serve `arch`, None for none."""
    return WRITTEN_FOR.get(arch, arch)


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


@dataclass
class Recording:
    """Launches of a context, in order, to be repeated with what their tensors hold then.

    launches: each costs the host some microseconds. kept: their arguments, which they need. What
    torch computed between the launches is not repeated.
    """

    launches: list[PreparedLaunch] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)

    def repeat(self) -> None:
        """Natively on the current stream, without a wait."""
        for prepared in self.launches:
            prepared.launch()


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording() -> Iterator[Recording]:
    """Within the block launches are made as always, and recorded."""
    active = Recording()
    token = _recording.set(active)
    try:
        yield active
    finally:
        _recording.reset(token)


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
    if written_for(native) not in archs:
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


def sms_of(device: torch.device) -> int:
    """SMs of a CUDA device; of a B200 where a launch is emulated."""
    if device.type != "cuda":
        return hw.SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


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

    recorded = _recording.get()
    if recorded is not None:
        prepared = PreparedLaunch(compiled, arguments, target, device)
        prepared.launch()
        recorded.launches.append(prepared)
        recorded.kept.append(arguments)
        return
    converted = [_argument(item) for item in arguments]
    if target.backend == "cuda":
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream(device).cuda_stream
            compiled(*converted, CUstream(stream))
        return
    _emulate(compiled, converted)


def current_stream(index: int) -> int:
    """The handle of torch's current stream on CUDA device `index`.

    torch.cuda.current_stream() would make a Stream object around it, at every launch.
    """
    return torch._C._cuda_getCurrentRawStream(index)


class PreparedLaunch:
    """A launch with its arguments converted beforehand: `move` says where tensors lie now, `launch`
    launches.

    The DSL describes a tensor by its address and, behind it, sizes and strides. Only addresses are
    overwritten: a few microseconds of host work instead of hundreds. Natively the descriptions are
    kept, and no tensor. One thread at a time.

    last: tensors among the arguments whose addresses come behind those of the others.
    """

    def __init__(
        self,
        compiled: Any,
        arguments: Sequence[Any],
        target: Target,
        device: torch.device,
        *,
        last: Sequence[torch.Tensor] = (),
    ) -> None:
        converted = [_argument(item) for item in arguments]
        pairs = list(zip(_leaves(arguments), _leaves(converted), strict=True))
        tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
        behind = {id(tensor) for tensor in last}
        ordered = sorted(tensors, key=lambda pair: id(pair[0]) in behind)  # stable
        self._addresses = [_address_of(*pair) for pair in ordered]
        if target.backend == "cuda":
            with torch.cuda.device(device):
                self.launch = _NativeCall(compiled, converted)
            # They outlive the DSL's tensors, and with those the memory that they describe.
            self._descriptions = [description._memref_desc for _, description in tensors]
        else:
            self.launch = partial(_emulate, compiled, converted)

    def move(self, addresses: Iterable[int]) -> None:
        """addresses: of all tensors among the arguments, in their order."""
        for word, address in zip(self._addresses, addresses, strict=True):
            word.value = address


class _NativeCall:
    """A compiled host function and the array of pointers that it takes, on the current device.

    The DSL's executor fills such an array at every call; this one is filled once.
    """

    def __init__(self, compiled: Any, converted: Sequence[Any]) -> None:
        from cuda.bindings.driver import CUstream

        self._index = torch.cuda.current_device()
        executor, stream = compiled.to(None), CUstream(0)
        pointers, _ = executor.generate_execution_args(*converted, stream)
        self._packed = executor._get_invoke_packed_args(pointers)
        self._function, self._result = executor.capi_func, executor.cuda_result
        self._stream_word = ctypes.c_uint64.from_address(stream.getPtr())
        self._kept = executor, pointers, stream

    def __call__(self) -> None:
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self()
        self._stream_word.value = current_stream(self._index)
        self._function(self._packed)
        if self._result.value:
            raise RuntimeError(f"the launch failed: {_cuda_error(self._result.value)}")


def _cuda_error(code: int) -> str:
    from cuda.bindings import runtime

    return f"{runtime.cudaError_t(code)!r}"


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
