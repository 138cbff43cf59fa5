"""DeepGEMM's grouped product of e4m3 and e2m1 on Hopper: why no package has it.

The package's function `m_grouped_fp8_fp4_gemm_nt_contiguous` multiplies e4m3 by e2m1 on Blackwell
alone; on Hopper its weights have to be in e4m3. A kernel for Hopper (`sm90_fp8_fp4_gemm_1d2d.cuh`)
is in commits that no release contains. `available` looks for its file, so that a package that has
it is noticed.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("deep-gemm", "sgl-deep-gemm", "tokenspeed-deepgemm")
KERNELS = "include/deep_gemm/impls"
WANTED = "sm90_fp8_fp4_gemm*.cuh"


def kernels() -> list[str]:
    """Return the names of the kernel's files in the package that is installed."""
    spec = importlib.util.find_spec("deep_gemm")
    places = (spec.submodule_search_locations or ()) if spec else ()
    return [path.name for place in places for path in (Path(place) / KERNELS).glob(WANTED)]


def available() -> str:
    """Return why it cannot run here; a package with the kernel has no adapter yet."""
    if importlib.util.find_spec("deep_gemm") is None:
        return "not installed: deep_gemm"
    if not kernels():
        return "this version multiplies e4m3 by e2m1 on Blackwell alone"
    return f"this version has {', '.join(kernels())}, for which there is no adapter yet"


def prepare(model: Any) -> Any:
    """Raise NotImplementedError with the reason."""
    raise NotImplementedError(available())
