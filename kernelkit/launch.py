"""Where a compiled kernel runs: natively on the GPU of its tensors, or in the emulator.

`choose_target` decides by the tensors' device and its compute capability; `launch` runs there. What
cannot run raises and says why: nothing falls back to another implementation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

BACKENDS = ("auto", "cuda", "emulate")
# Code for an `a` architecture runs on exactly one compute capability (NVIDIA Blackwell
# Compatibility Guide); what is written for sm_100a compiles for sm_103a as it is.
ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
WRITTEN_FOR = {"sm_103a": "sm_100a"}


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
    if arch not in (None, "sm_100a") or "sm_100a" not in archs:
        raise NotImplementedError(f"the emulator runs sm_100a, not {arch or tuple(archs)}")
    return Target("emulate", "sm_100a")


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
    import ptxemu

    active = _emulation.get() or Emulation()
    report = ptxemu.run(compiled, *converted, CUstream(0), options=active.options)
    active.reports.append(report)


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
