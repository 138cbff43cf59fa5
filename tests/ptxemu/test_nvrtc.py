"""CUDA C++ by NVRTC: names of C++, where the library is looked for, and what it compiles."""

from __future__ import annotations

import linecache
from pathlib import Path

import numpy as np
import pytest
import torch

import ptxemu
from ptxemu import nvrtc
from ptxemu.mangled import chosen, demangled
from ptxemu.module import Module
from tests.ptxemu.kernels import kernel

NEEDS_NVRTC = pytest.mark.skipif(
    nvrtc.library_path() is None, reason="NVRTC is not installed (nvidia-cuda-nvrtc)"
)

FLOATS = "_ZN2ns5scaleIfEEvPT_i"  # void ns::scale<float>(float*, int)
DOUBLES = "_ZN2ns5scaleIdEEvPT_i"
ENTRIES = (FLOATS, DOUBLES, "_Z4copyfPfi", "_Z4copydPfi", "_ZN12_GLOBAL__N_14hideEv", "plain")
MEANT = {
    "ns::scale": [FLOATS, DOUBLES],
    "scale": [FLOATS, DOUBLES],
    "ns::scale<float>": [FLOATS],
    "scale<double>": [DOUBLES],
    "void ns::scale<double>(double*, int)": [DOUBLES],
    "scale(float *, int)": [FLOATS],
    "copy": ["_Z4copyfPfi", "_Z4copydPfi"],
    "copy(float,float*,int)": ["_Z4copyfPfi"],
    "hide": ["_ZN12_GLOBAL__N_14hideEv"],
    "(anonymous namespace)::hide": ["_ZN12_GLOBAL__N_14hideEv"],
    "plain": [],  # it is no name of C++, and found as it is
    "scal": [],
}


@pytest.mark.parametrize("name", MEANT)
def test_readable_names(name):
    assert chosen(ENTRIES, name) == MEANT[name]


def test_names_that_are_not_mangled():
    assert [demangled(name) for name in ("plain", "_Zx", "")] == ["", "", ""]


def test_an_entry_by_its_readable_name():
    first, second = kernel("").replace(" test(", f" {FLOATS}("), kernel("").split("\n", 3)[3]
    module = Module(first + second.replace(" test(", f" {DOUBLES}("))
    assert module.entry("scale<float>").name == FLOATS
    assert module.entry(DOUBLES).name == DOUBLES
    module.names["mine"] = DOUBLES
    assert module.entry("mine").name == DOUBLES
    with pytest.raises(ValueError, match=r"entry 'scale' may be any of \['void ns::scale<float>"):
        module.entry("scale")
    with pytest.raises(ValueError, match=r"no entry 'x'; the module has \['void ns::scale<float>"):
        module.entry("x")


@pytest.fixture
def nowhere(monkeypatch):
    """No folder has a library of NVIDIA's."""
    monkeypatch.setattr(nvrtc.sys, "path", [])
    monkeypatch.setattr(nvrtc, "_TOOLKIT", Path("/nowhere"))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)


def test_a_missing_nvrtc_is_named(nowhere, monkeypatch):
    def fails(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(nvrtc, "_loaded", fails)
    assert (nvrtc.library_path(), nvrtc.include_folders()) == (None, [])
    words = r"which is not installed \(libnvrtc.so: .*\): pip install nvidia-cuda-nvrtc"
    with pytest.raises(ModuleNotFoundError, match=words):
        ptxemu.nvrtc.compile("")


def test_where_it_is_looked_for(nowhere, monkeypatch, tmp_path):
    def there(*names: str) -> None:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()

    there("cuda/lib64/libnvrtc.so.12", "cuda/include/cuda_fp16.h")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert nvrtc.library_path() == tmp_path / "cuda/lib64/libnvrtc.so.12"
    there("b/nvidia/cuda_runtime/include/cuda_fp16.h", "b/nvidia/cuda_nvrtc/include/nvrtc.h")
    there("a/nvidia/cu13/lib/libnvrtc.so.13", "a/nvidia/cu13/include/cccl/nv/target")
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path / name) for name in "ba"])
    assert nvrtc.library_path() == tmp_path / "a/nvidia/cu13/lib/libnvrtc.so.13"
    found = [str(folder.relative_to(tmp_path)) for folder in nvrtc.include_folders()]
    assert found == [
        "a/nvidia/cu13/include/cccl", "b/nvidia/cuda_runtime/include", "cuda/include"
    ]  # fmt: skip


SOURCE = """
namespace ns {
template <class T> __global__ void scale(T* x, T factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= factor;
}
}
struct Pair { int n; float factor; };
__global__ void paired(float* x, Pair pair) {
    __shared__ float row[64];
    row[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = row[(threadIdx.x + pair.n) % 64] * pair.factor;
}
"""


@NEEDS_NVRTC
def test_a_template_and_a_structure():
    module = ptxemu.nvrtc.compile(SOURCE, "sm_90a", names=["ns::scale<float>", "ns::scale<double>"])
    assert module.tree.entries[module.names["ns::scale<float>"]].target == "sm_90a"
    x = np.ones(70)
    module.launch("ns::scale<double>", grid=2, block=64, args=[x, 3, 65])
    assert x.tolist() == [3] * 65 + [1] * 5
    y = np.arange(64, dtype=np.float32)
    pair = np.array((32, 2.0), [("n", np.int32), ("factor", np.float32)])
    checked = ptxemu.Options(check=True)
    report = module.launch("paired", grid=1, block=64, args=[y, pair], options=checked)
    races = [finding for finding in report.errors if finding.check == "race"]
    places = {access.source for race in races for access in race.accesses}
    assert {Path(place).name for place in places} == {"kernel.cu:11", "kernel.cu:12"}
    file = min(places).rpartition(":")[0]
    assert linecache.getline(file, 11).strip() == "row[threadIdx.x] = x[threadIdx.x];"


MAPPED = """
#include <cuda.h>
unsigned long long twice(unsigned long long x) { return 2 * x; }
__global__ void word(const __grid_constant__ CUtensorMap map, unsigned long long* out) {
    out[threadIdx.x] = twice(reinterpret_cast<const unsigned long long*>(&map)[threadIdx.x]);
}
"""


@NEEDS_NVRTC
@pytest.mark.skipif(
    not any((folder / "cuda.h").exists() for folder in nvrtc.include_folders()),
    reason="cuda.h is not installed (nvidia-cuda-runtime)",
)
def test_a_tensor_map_by_value_and_a_function_without_a_space():
    x, out = torch.zeros(64, 64, dtype=torch.uint8), np.zeros(16, np.uint64)
    encoded = ptxemu.tensor_map(x, (1, 64))
    ptxemu.nvrtc.compile(MAPPED, "sm_90a").launch(grid=1, block=16, args=[encoded, out])
    assert out.tolist() == (np.frombuffer(encoded.raw, np.uint64) * np.uint64(2)).tolist()


@NEEDS_NVRTC
def test_errors_have_the_log(tmp_path):
    path = tmp_path / "wrong.cu"
    path.write_text("__global__ void f() { x = SIDE; }\n")
    with pytest.raises(nvrtc.CompilationError, match=r'identifier "x" is undefined') as caught:
        ptxemu.nvrtc.compile(path, "sm_80", ["-DSIDE=3"])
    assert f"{path}(1)" in caught.value.log
    assert "SIDE" not in caught.value.log.replace("x = SIDE", "")
    with pytest.raises(nvrtc.CompilationError, match="headers of CUDA come with: pip install"):
        ptxemu.nvrtc.compile("#include <no_such_header.h>")
    with pytest.raises(nvrtc.CompilationError, match="INVALID_OPTION"):
        ptxemu.nvrtc.compile("", "sm_1")
