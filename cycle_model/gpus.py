"""The GPUs that have parameters, by name."""

from __future__ import annotations

from cycle_model.parameters.blackwell import B200, GB200, GB300
from cycle_model.parameters.hopper import H100, H200
from cycle_model.parameters.parameter import Gpu

GPUS = {gpu.name: gpu for gpu in (B200, GB200, GB300, H100, H200)}


def named(name: str) -> Gpu:
    """Raises ValueError for a name that is none."""
    if name not in GPUS:
        raise ValueError(f"no parameters of {name!r}; there are {', '.join(GPUS)}")
    return GPUS[name]


def for_arch(arch: str) -> Gpu:
    """The first that runs kernels for an architecture; ValueError where none does."""
    found = next((gpu for gpu in GPUS.values() if gpu.arch == arch), None)
    if found is None:
        raise ValueError(f"no parameters of a GPU for {arch}; there are {', '.join(GPUS)}")
    return found
