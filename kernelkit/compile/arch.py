"""Backends, and architectures that kernels are compiled for, by compute capability."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

BACKENDS = ("auto", "cuda", "emulate")  # where a kernel runs; auto: where its tensors are

# Code for an `a` architecture runs on exactly one compute capability (NVIDIA Blackwell
# Compatibility Guide). Kernels for sm_100a compile for sm_103a unchanged, and kernels for sm_80,
# which use mma.sync, ldmatrix and cp.async, for every later GPU.
ARCH_OF_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_87",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
    (12, 1): "sm_121a",
}
ARCHITECTURES = tuple(ARCH_OF_CAPABILITY.values())
PORTABLE = "sm_80"  # the name of kernels that are written for all of them
WRITTEN_FOR: dict[str, str] = {
    "sm_103a": "sm_100a",
    **dict.fromkeys(("sm_86", "sm_87", "sm_89", "sm_120a", "sm_121a"), PORTABLE),
}
WITHOUT_E4M3 = ("sm_80", "sm_86", "sm_87")  # PTX ISA, cvt: e4m3x2 needs sm_89

Arch = TypeVar("Arch", str, str | None)


def require_pdl(arch: str) -> None:
    """NotImplementedError for an architecture without programmatic dependent launch."""
    if arch.startswith("sm_8"):
        raise NotImplementedError(
            f"pdl=True on {arch}: programmatic dependent launch (griddepcontrol) needs compute "
            "capability 9.0 or later"
        )


@cache
def written_for(arch: Arch) -> Arch:
    """The architecture whose kernels serve `arch` where it has none of its own, None for none."""
    return arch if arch is None else WRITTEN_FOR.get(arch, arch)
