"""Backends, and architectures that kernels are compiled for, by compute capability."""

from __future__ import annotations

from typing import TypeVar

BACKENDS = ("auto", "cuda", "emulate")  # where a kernel runs; auto: where its tensors are

# Code for an `a` architecture runs on exactly one compute capability (NVIDIA Blackwell
# Compatibility Guide); what is written for sm_100a compiles for sm_103a as it is.
ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
ARCHITECTURES = tuple(ARCH_OF_CAPABILITY.values())
WRITTEN_FOR: dict[str | None, str] = {"sm_103a": "sm_100a"}

Arch = TypeVar("Arch", str, str | None)


def written_for(arch: Arch) -> Arch:
    """The architecture whose kernels serve `arch`, None for none."""
    return WRITTEN_FOR.get(arch, arch)
