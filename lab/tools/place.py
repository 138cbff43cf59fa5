"""Place where a command runs its kernels: the GPU at hand, or the emulator."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kernelkit.call.launch import emulation
from kernelkit.compile.arch import ARCH_OF_CAPABILITY, PORTABLE, written_for
from lab.tools.groups import ARCHS
from ptxemu import LaunchReport
from ptxemu.host.command_line import wanted
from ptxemu.options import Options

CAPABILITIES = {"sm_90a": "9.0", "sm_100a": "10.x", PORTABLE: "8.x or 12.x"}


def native_arch() -> str | None:
    """Return the architecture of kernels for this machine's GPU; None without one."""
    if not torch.cuda.is_available():
        return None
    return ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability())


def is_of(native: str | None, arch: str | None) -> bool:
    """Whether kernels for `arch`, None for any, are those of a GPU: what is written for sm_100a is
    of every GPU that it serves, and those on mma.sync are each of one."""
    return arch in (None, native) or arch == written_for(native) != PORTABLE


def why_not_here(archs: Sequence[str] = ("sm_100a",)) -> str | None:
    """Why kernels written for `archs` cannot run on this machine; None where they can."""
    if written_for(native_arch()) in archs:
        return None
    needed = " or ".join(CAPABILITIES[arch] for arch in CAPABILITIES if arch in archs)
    return f"no GPU of compute capability {needed} here"


@dataclass(frozen=True)
class Place:
    """Place of kernels.

    backend: 'cuda' or 'emulate'.
    arch: architecture of the kernels.
    reason: why they run there, in words."""

    backend: str
    arch: str
    reason: str

    @property
    def device(self) -> str:
        """Device of tensors."""
        return "cuda" if self.backend == "cuda" else "cpu"

    @property
    def given(self) -> dict[str, str | None]:
        """Keyword arguments of operators."""
        return {"backend": self.backend, "arch": None if self.backend == "cuda" else self.arch}

    def __str__(self) -> str:
        return f"{self.backend} {self.arch}"


def choose_place(options: argparse.Namespace, archs: Sequence[str] = ARCHS) -> Place:
    """Place of kernels written for `archs`: as --backend and --arch ask; for 'auto' a GPU, unless
    its kernels are not those of --arch or a check is wanted. ValueError where they contradict."""
    native, reason, checked = native_arch(), why_not_here(archs), wanted(options)
    backend = options.backend
    if backend == "auto":
        elsewhere = checked or not is_of(native, options.arch)
        backend = "emulate" if elsewhere or reason else "cuda"
    if backend == "cuda":
        if reason:
            raise ValueError(f"backend 'cuda': {reason}")
        if checked:
            raise ValueError("backend 'cuda': the checker is the emulator's")
        return Place(
            "cuda", native, f"a GPU of compute capability {CAPABILITIES[written_for(native)]}"
        )
    if options.backend == "emulate":
        reason = "as asked"
    elif checked:
        reason = "for the checker"
    return Place(backend, options.arch or archs[0], reason or "for its arch")


@contextmanager
def emulated(options: argparse.Namespace, **more: Any) -> Iterator[list[LaunchReport]]:
    """Within the block launches are emulated as --policy, --seed and --arch say, without a limit of
    time; those that have ended are in the list behind it. more: fields of ptxemu.Options."""
    asked = Options(policy=options.policy, seed=options.seed, limit=None, **more)
    launches: list[LaunchReport] = []
    with emulation(asked, arch=getattr(options, "arch", None)) as active:
        try:
            yield launches
        finally:
            launches += [launch for report in active.reports for launch in report.launches]


def instructions(launches: Sequence[LaunchReport]) -> int:
    """Warp-instructions of all launches."""
    return sum(count.total() for launch in launches for count in launch.by_warp.values())


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """torch.empty returns NaN, so that what a kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
