"""Launch of a compiled kernel: natively on the GPU of its tensors, or in the emulator.

`choose_target` decides by the tensors' device and its compute capability; `launch` runs there. A
kernel that cannot run raises an error with the reason. Nothing falls back to another
implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from kernelkit.call.tensors import require_type
from kernelkit.compile import cuda
from kernelkit.compile.arch import ARCH_OF_CAPABILITY, ARCHITECTURES, BACKENDS, written_for
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.compile.plan_names import naming
from kernelkit.compile.signature import Packed, addressed, leaves
from kernelkit.plan import hw

# What torch.cuda's functions of these names come to, in less than half of their time, once CUDA is
# initialised: the device, and the handle of the stream of one. A torch without CUDA has neither.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
# Without a wish the first that a kernel is written for.
EMULATED = tuple(dict.fromkeys(("sm_100a", "sm_90a", *ARCHITECTURES)))


@dataclass(frozen=True)
class Target:
    """Backend and architecture of a launch.

    backend: 'cuda', 'emulate', or 'none' for tensors without memory
    arch: architecture to compile for
    """

    backend: str
    arch: str


class NoTarget(NotImplementedError):
    """Tensors on the device meta do not say which architecture to choose."""


@dataclass
class Emulation:
    """Options for emulated launches of this context, and the reports they leave, in order. arch:
    what calls that name none compile for; None: the first that the kernel is written for."""

    options: Any = None
    arch: str | None = None
    reports: list[Any] = field(default_factory=list)


_emulation: ContextVar[Emulation | None] = ContextVar("emulation", default=None)


@contextmanager
def emulation(options: Any = None, *, arch: str | None = None) -> Iterator[Emulation]:
    """Within the block emulated launches use `options` (ptxemu.Options), compile for `arch` where
    a call names none, and append their report."""
    active = Emulation(options, arch)
    token = _emulation.set(active)
    try:
        yield active
    finally:
        _emulation.reset(token)


Watcher = Callable[["PreparedLaunch | None", list[tuple[torch.Tensor, int]]], None]
_watched: ContextVar[tuple[Watcher, bool] | None] = ContextVar("watched", default=None)


@contextmanager
def watching(watcher: Watcher, *, launching: bool = True) -> Iterator[None]:
    """Within the block every launch is shown to `watcher`: a launch that can be made again, and
    the tensors whose addresses its words hold, with the bytes between each and the word's address.
    It is shown None for one that has no kernel, see `launch`.

    launching: whether the launches are made.
    """
    token = _watched.set((watcher, launching))
    try:
        yield
    finally:
        _watched.reset(token)


def choose_target(
    device: torch.device, backend: str, arch: str | None, archs: Sequence[str], instead: str = ""
) -> Target:
    """Return the target of a kernel whose tensors are on `device`.

    Args:
        device: a CUDA GPU, the CPU for the emulator, or 'meta', which has a target only if `arch`
            names one.
        backend: 'auto' to follow the device; 'cuda' or 'emulate' to insist.
        arch: architecture to compile for, such as 'sm_90a'; None for the device's, or the first of
            EMULATED for the emulator.
        archs: architectures that the kernel is written for.
        instead: what to do on others; ends the error for an architecture.

    Raises:
        ValueError: backend or arch contradicts the device.
        NotImplementedError: no kernel is written for the device.
    """
    if type(backend) is not str or not isinstance(arch, str | None):
        require_type("backend", backend, str)
        require_type("arch", arch, str, optional=True)
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r}: one of {BACKENDS}")
    if arch is not None and not _serves(archs, arch):
        accepted = ", ".join(_emulated_of(tuple(archs)))
        raise NotImplementedError(f"arch {arch!r}: this kernel accepts {accepted}{instead}")
    if device.type == "cpu":
        return _cpu_target(backend, arch, archs, instead)
    if device.type == "meta" and arch is not None:
        return Target("none", arch)  # what has no memory is only asked for its kernels
    if device.type == "meta":
        raise NoTarget("device meta: give arch, since these tensors have no memory")
    if device.type != "cuda":
        raise NotImplementedError(f"device {device}: tensors have to be on the CPU or a CUDA GPU")
    if backend == "emulate":
        raise ValueError(f"backend 'emulate' runs on CPU memory, the tensors are on {device}")
    capability = _capability(device)
    native = ARCH_OF_CAPABILITY.get(capability)
    if native is None or not _serves(archs, native):
        raise NotImplementedError(
            f"{device} has compute capability {capability[0]}.{capability[1]}; "
            f"this kernel is written for {tuple(archs)}{instead}"
        )
    if arch not in (None, native):
        raise ValueError(f"arch {arch!r} does not run on {device}, which needs {native!r}")
    return Target("cuda", native)


def _serves(archs: Sequence[str], arch: str) -> bool:
    """Whether what is written for `archs` runs on `arch`."""
    return arch in archs or written_for(arch) in archs


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the capability of a CUDA device; NotImplementedError if it does not exist."""
    try:
        return torch.cuda.get_device_capability(device)
    except (AssertionError, RuntimeError) as error:  # of a torch or a machine without CUDA
        raise NotImplementedError(f"device {device}: no such GPU here; {error}") from error


def _cpu_target(backend: str, arch: str | None, archs: Sequence[str], instead: str) -> Target:
    if backend == "cuda":
        raise ValueError("backend 'cuda' needs CUDA tensors, these are on the CPU")
    active = _emulation.get()
    arch = arch or (active.arch if active else None)
    possible = [name for name in _emulated_of(tuple(archs)) if arch in (None, name)]
    if not possible:
        named = arch or tuple(archs)
        raise NotImplementedError(f"the emulator runs {EMULATED}, not {named}{instead}")
    return Target("emulate", possible[0])


@cache
def _emulated_of(archs: tuple[str, ...]) -> tuple[str, ...]:
    """Architectures of the emulator that what is written for `archs` runs on."""
    return tuple(name for name in EMULATED if _serves(archs, name))


def sms_of(device: torch.device) -> int:
    """Return the number of SMs of a CUDA device; for an emulated launch, that of the emulated arch
    (by default a B200).
    """
    if device.type != "cuda":
        active = _emulation.get()
        return hw.SMS_OF[active.arch or "sm_100a"] if active else hw.SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def clusters_at_once(device: torch.device, ctas: int) -> int:
    """Clusters of `ctas` CTAs, one CTA to an SM, that a CUDA device runs at the same time; where a
    launch is emulated, those of `sms_of`."""
    return sms_of(device) // ctas if device.type != "cuda" else _clusters_of(device, ctas)


@cache
def _clusters_of(device: torch.device, ctas: int) -> int:
    if _is_pretended():
        return hw.SMS // ctas
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        return cuda.most_clusters(ctas)


def launch(
    compiled: CompiledKernel | None, arguments: Sequence[Any], target: Target, device: torch.device
) -> None:
    """Call a compiled kernel. Natively the launch goes to torch's current stream of `device` and
    does not wait for it.

    Args:
        compiled: what `compile_once` gave; None launches nothing.
        arguments: tensors (last dimension contiguous), numbers, `ParamTable`s, None, and tuples of
            them, as the host function takes them before its stream.
        target: what `choose_target` gave.
        device: of the tensors.

    Raises:
        ValueError: for arguments that the kernel was not compiled for.
        RuntimeError: for a launch that CUDA refuses, with the name of the error.
    """
    watcher, launching = _watched.get() or (None, True)
    prepared = None  # while `kernelkit.compile.compiler.collecting`
    if compiled is not None:
        prepared = PreparedLaunch(compiled, arguments, target, device)
    if watcher is not None:
        watcher(prepared, addressed(arguments) if prepared else [])
    if prepared is not None and launching:
        prepared.launch(arguments)


class PreparedLaunch:
    """A launch with its arguments laid out beforehand, a few microseconds of host work each time.

    words: hold the addresses of the tensors among the arguments, in the order of `addressed`; who
    changes them moves the launch to other tensors. launch(tensors): those are the launch's, which
    the emulator would know by nothing else. launch_here: the same where the launch's device is the
    current one. No tensor is kept. One thread at a time.
    """

    def __init__(
        self,
        compiled: CompiledKernel,
        arguments: Sequence[Any],
        target: Target,
        device: torch.device,
    ) -> None:
        emulated = _is_emulated(target)
        packed = compiled.signature.pack(arguments)
        self.words = packed.address_words
        self.launch: Callable[[Sequence[Any]], None]
        self.launch_here: Callable[[Sequence[Any]], None]
        if emulated:
            self.launch = self.launch_here = partial(_emulate, compiled, packed)
        else:
            with torch.cuda.device(device):
                native = _NativeCall(compiled, packed)
            self.launch, self.launch_here = native, native.here


class _NativeCall:
    """A compiled host function and what it takes, on the device that is current now."""

    def __init__(self, compiled: CompiledKernel, packed: Packed) -> None:
        self._index = torch.cuda.current_device()
        self._entry = compiled.entry(self._index)
        self._pointers = packed.pointers
        self._stream, self._result = packed.stream_word, packed.result_word
        self._kept = compiled, packed  # the code and what it reads

    def __call__(self, _tensors: Sequence[Any] = ()) -> None:
        if current_device() == self._index:
            return self.here()
        with torch.cuda.device(self._index):
            return self.here()

    def here(self, _tensors: Sequence[Any] = ()) -> None:
        """Launch on the planned device, which must be current."""
        self._stream.value = current_stream(self._index)
        self._entry(self._pointers)
        if self._result.value:
            cuda.check_result(self._result.value)


def _is_emulated(target: Target) -> bool:
    if target.backend == "none":
        raise NotImplementedError("device meta: there is no memory to launch on")
    return target.backend == "emulate" or _is_pretended()


def _is_pretended() -> bool:
    """Whether `python -m ptxemu` runs this process as if it had a GPU."""
    emulator = sys.modules.get("ptxemu")
    return emulator is not None and emulator.pretends()


def _emulate(compiled: CompiledKernel, packed: Packed, arguments: Sequence[Any]) -> None:
    """Run the launches of a host function here, under the options of this context."""
    import ptxemu
    from ptxemu.host.allocations import LIVE
    from ptxemu.watch import suggested

    active = _emulation.get() or Emulation()
    LIVE.note(leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor))
    pointers = [pointer or 0 for pointer in packed.pointers[:-1]]
    with suggested(**naming(compiled.key)):
        report = ptxemu.run_host(compiled, pointers, active.options)
    active.reports.append(report)
