"""Build the Marlin kernels for experts in MXFP4 from the sources that the package sglang ships.

sglang compiles them on first use, for every weight format at once, which takes many minutes. Here
nvcc compiles the instantiations for MXFP4 alone, into a library for tvm-ffi:

    python -m lab.bench.peers.marlin_build FOLDER

Set MARLIN_LIBRARIES to the folder afterwards. This needs nvcc, sglang and apache-tvm-ffi, no GPU.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PLACE = "MARLIN_LIBRARIES"
HEADER = "csrc/gemm/marlin_moe/moe_wna16_marlin.cuh"
# Instantiations of other weight formats, one a line.
OTHER_FORMATS = re.compile(r"^\s*(?:COMMON|NVFP4|BIGGROUP|ACT|FZP)_GET_IF\(host::\w+\)\n", re.M)
INCLUDED = (
    *("container/tensor.h", "dtype.h", "error.h"),
    *("extra/c_env_api.h", "function.h"),
)
FUNCTION = "moe_wna16_marlin_gemm"
FLAGS = (
    *("-shared", "-Xcompiler", "-fPIC", "-std=c++20", "-O3", "--expt-relaxed-constexpr"),
    *("-DSGL_CUDA_ARCH=900", "-gencode=arch=compute_90a,code=sm_90a", "-Xfatbin=-compress-all"),
)


def sources() -> Path | None:
    """Return the folder of sglang's kernel sources, without importing sglang; None without it."""
    spec = importlib.util.find_spec("sglang")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "kernels" / "jit"
        if (folder / HEADER).is_file():
            return folder
    return None


def only_mxfp4(header: str) -> str:
    """Return the text of the header without the instantiations of other weight formats.

    Raises ValueError if it has none for MXFP4, as in a version with other names.
    """
    if "MXFP4_GET_IF(host::kFE2M1f)" not in header:
        raise ValueError(f"{HEADER}: no instantiations for MXFP4 as sglang 0.5.23 has them")
    return OTHER_FORMATS.sub("", header)


def wrapper(header: Path, bias: bool) -> str:
    """Return the source that exports the kernel for bf16, with or without a bias.

    Blocks are sorted by expert, and all experts are on this GPU.
    """
    lines = [f"#include <tvm/ffi/{name}>" for name in INCLUDED]
    switches = ("bf16_t", "false", str(bias).lower(), "true", "false", "false")
    call = f"({FUNCTION}<{', '.join(switches)}>)"
    exported = f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({FUNCTION}, {call});"
    return "\n".join([*lines, f'#include "{header}"', "namespace sglang {", exported, "}", ""])


def library(folder: Path, bias: bool) -> Path:
    """Return the path of a library in a folder."""
    return folder / f"marlin_mxfp4{'_bias' * bias}.so"


def folder() -> Path | None:
    """Return the folder of built libraries that MARLIN_LIBRARIES names, None if it is not set."""
    place = os.environ.get(PLACE)
    return Path(place) if place else None


def build(out: Path, nvcc: str = "nvcc") -> None:
    """Compile both libraries into a folder. Raises RuntimeError with nvcc's words."""
    import tvm_ffi

    kernels = sources()
    if kernels is None:
        raise RuntimeError(
            "sglang is not installed, or has no Marlin sources where 0.5.23 has them"
        )
    out.mkdir(parents=True, exist_ok=True)
    header = out / "moe_wna16_marlin_mxfp4.cuh"
    header.write_text(only_mxfp4((kernels / HEADER).read_text()))
    places = (
        kernels / "include",
        (kernels / HEADER).parent,
        Path(str(tvm_ffi.__file__)).parent / "include",
    )
    for bias in (True, False):
        source = out / f"marlin_{bias}.cu"
        source.write_text(wrapper(header, bias))
        target = str(library(out, bias))
        command = [nvcc, *FLAGS, *(f"-I{place}" for place in places), str(source), "-o", target]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    build(Path(sys.argv[1]), shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
