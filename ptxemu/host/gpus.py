"""The GPUs that a process may seem to have: a table, and which of them it is.

`--gpu NAME` chooses one, else the architecture in CUTE_DSL_ARCH does, else it is a B200. Everything
that a script can ask takes its answers from `current()`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

ARCH_VARIABLE = "CUTE_DSL_ARCH"
_ARCH = re.compile(r"sm_(\d+)(\d)([af]?)")


def _capability(arch: str) -> tuple[int, int]:
    found = _ARCH.fullmatch(arch)
    if found is None:
        raise ValueError(f"{arch!r} is no architecture such as sm_90a")
    return int(found[1]), int(found[2])


@dataclass(frozen=True)
class Gpu:
    """What a script can learn about a GPU.

    Attributes:
        name: As CUDA reports it.
        arch: The `.target` of code for it, such as 'sm_100a'.
        sms: Streaming multiprocessors.
        memory_bytes: Nominal size; drivers report somewhat less.
        l2_bytes: Size of the L2 cache.
    """

    name: str
    arch: str
    sms: int
    memory_bytes: int
    l2_bytes: int

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability (major, minor)."""
        return _capability(self.arch)

    def attribute(self, identifier: int, target: str = "") -> int | None:
        """Return the value of a cudaDeviceAttr, or None for one that is not known.

        CUdevice_attribute of the driver has the same numbers. target: a `.target` whose shared
        memory is asked for instead of this GPU's.
        """
        from ptxemu.machine.shape import limits_of  # with numpy: not for --help

        limits = limits_of(target or self.arch)
        answers = _ALIKE | {
            16: self.sms,  # multiprocessors
            38: self.l2_bytes,
            39: limits.warps_of_sm * 32,  # max threads per multiprocessor
            75: self.capability[0],
            76: self.capability[1],
            81: limits.smem_of_sm,  # max shared memory per multiprocessor
            97: limits.smem_of_cta,  # max shared memory per block, by an opt-in
            106: limits.ctas_of_sm,  # max blocks per multiprocessor
            108: self.l2_bytes * 3 // 4,  # most that may be set aside for persisting accesses
            120: int(limits.clusters),  # cluster launch
        }
        return answers.get(identifier)


# cudaDeviceAttr with the same answer on all GPUs here. Those of a kind that the emulator does not
# have (peers, pools, virtual memory) are 0.
_ALIKE = {
    1: 1024,  # max threads per block
    2: 1024, 3: 1024, 4: 64,  # max block dimensions
    5: 2**31 - 1, 6: 65_535, 7: 65_535,  # max grid dimensions
    8: 48 * 1024,  # max shared memory per block
    9: 64 * 1024,  # constant memory
    10: 32,  # warp size
    12: 64 * 1024,  # max registers per block
    13: 1_965_000,  # clock rate in kHz: nominal, nothing here depends on it
    14: 512,  # texture alignment
    17: 0,  # no limit on the run time of kernels
    18: 0,  # not integrated
    20: 0,  # default compute mode
    31: 1,  # concurrent kernels
    32: 0,  # ECC
    33: 0,  # PCI bus
    34: 0,  # PCI device
    36: 3_996_000,  # memory clock in kHz: nominal, too
    37: 8192,  # width of the memory bus in bits: nominal
    40: 1,  # copy engines
    41: 1,  # unified addressing
    50: 0,  # PCI domain
    78: 1,  # stream priorities
    82: 64 * 1024,  # max registers per multiprocessor
    84: 0,  # not on a board of several GPUs
    95: 1,  # cooperative launch
    111: 1024,  # shared memory per block that the system reserves
    115: 0,  # memory pools
}  # fmt: skip

_GIB, _MIB = 1 << 30, 1 << 20

# SMs, memory and L2 of the largest configuration that is sold. Sources: NVIDIA's data sheets and
# architecture white papers (A100; RTX 3090 in "GA102"; Jetson AGX Orin; L40S and RTX 4090 in "Ada";
# H100 SXM in "Hopper"; H200; B200 and B300 as HGX; RTX 5090 and RTX PRO 6000 in "RTX Blackwell";
# Jetson AGX Thor; DGX Spark). L2 of H200, B200 and B300: what their drivers report.
GPUS: Mapping[str, Gpu] = {
    "a100": Gpu("NVIDIA A100-SXM4-80GB", "sm_80", 108, 80 * _GIB, 40 * _MIB),
    "rtx-3090": Gpu("NVIDIA GeForce RTX 3090", "sm_86", 82, 24 * _GIB, 6 * _MIB),
    "orin": Gpu("Orin", "sm_87", 16, 64 * _GIB, 4 * _MIB),
    "l4": Gpu("NVIDIA L4", "sm_89", 58, 24 * _GIB, 48 * _MIB),
    "l40s": Gpu("NVIDIA L40S", "sm_89", 142, 48 * _GIB, 96 * _MIB),
    "rtx-4090": Gpu("NVIDIA GeForce RTX 4090", "sm_89", 128, 24 * _GIB, 72 * _MIB),
    "h100": Gpu("NVIDIA H100 80GB HBM3", "sm_90a", 132, 80 * _GIB, 50 * _MIB),
    "h200": Gpu("NVIDIA H200", "sm_90a", 132, 141 * _GIB, 60 * _MIB),
    "b200": Gpu("NVIDIA B200", "sm_100a", 148, 180 * _GIB, 126 * _MIB),
    "b300": Gpu("NVIDIA B300 SXM6 AC", "sm_103a", 148, 268 * _GIB, 126 * _MIB),
    "thor": Gpu("NVIDIA Thor", "sm_110a", 20, 128 * _GIB, 32 * _MIB),
    "rtx-5090": Gpu("NVIDIA GeForce RTX 5090", "sm_120a", 170, 32 * _GIB, 96 * _MIB),
    "rtx-pro-6000": Gpu(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "sm_120a", 188, 96 * _GIB, 128 * _MIB
    ),
    "spark": Gpu("NVIDIA GB10", "sm_121a", 48, 128 * _GIB, 24 * _MIB),
}
_DEFAULT = GPUS["b200"]
# The one that an architecture alone stands for.
_OF_CAPABILITY = {gpu.capability: gpu for gpu in GPUS.values()} | {
    GPUS[name].capability: GPUS[name] for name in ("rtx-4090", "h100", "rtx-5090")
} | {(10, 1): replace(GPUS["thor"], arch="sm_101a")}  # fmt: skip

_current: ContextVar[Gpu] = ContextVar("gpu", default=_DEFAULT)


def current() -> Gpu:
    """Return the GPU that this process seems to have, in this context."""
    return _current.get()


@contextmanager
def seeming(gpu: Gpu) -> Iterator[None]:
    """Within the block, `gpu` is the current one."""
    token = _current.set(gpu)
    try:
        yield
    finally:
        _current.reset(token)


def named(name: str) -> Gpu:
    """Return the GPU called `name` in the table; ValueError with all names for another word."""
    found = GPUS.get(name.lower().replace("_", "-"))
    if found is None:
        raise ValueError(f"unknown GPU {name!r}: must be one of {', '.join(GPUS)}")
    return found


def chosen(gpu: Gpu | None, environ: Mapping[str, str]) -> Gpu:
    """Return the GPU that the flag --gpu and the environment agree on.

    Args:
        gpu: Of the flag; None where it was not given.
        environ: CUTE_DSL_ARCH in it is an architecture such as 'sm_90a'.

    Raises:
        ValueError: They contradict each other, or CUTE_DSL_ARCH is no architecture.
    """
    arch = environ.get(ARCH_VARIABLE, "")
    if not arch:
        return gpu or _DEFAULT
    if not _ARCH.fullmatch(arch):
        raise ValueError(f"{ARCH_VARIABLE}={arch}: must be an architecture such as sm_90a")
    if gpu is None:
        return of_arch(arch)
    if not _runs(arch, gpu.capability):
        major, minor = gpu.capability
        raise ValueError(
            f"--gpu contradicts {ARCH_VARIABLE}={arch}: {gpu.name} has compute capability "
            f"{major}.{minor} and needs {gpu.arch}. Unset {ARCH_VARIABLE}, or choose another GPU"
        )
    return gpu


def of_arch(arch: str) -> Gpu:
    """Return the GPU that an architecture such as 'sm_90a' stands for.

    One that is not in the table is a B200 with that compute capability.
    """
    capability = _capability(arch)
    gpu = _OF_CAPABILITY.get(capability)
    return gpu or replace(_DEFAULT, name=f"NVIDIA GPU of {arch}", arch=arch)


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether machine code for `arch` runs on a GPU: also on later ones of its family, with 'f'."""
    own = _capability(arch)
    of_family = arch.endswith("f") and own[0] == capability[0] and own[1] <= capability[1]
    return own == capability or of_family
