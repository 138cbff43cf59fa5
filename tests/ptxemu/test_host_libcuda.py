"""A libcuda.so.1 of Python functions: programs that load the driver find one GPU there."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from ptxemu.host import shared_library

SCRIPT = '''
import ctypes

import numpy as np
from cuda.bindings import driver
from cuda.core import Device

PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 count;
.visible .entry twice(.param .u64 x, .param .u32 n)
{
    .reg .b32 %r<5>; .reg .b64 %rd<4>; .reg .pred %p;
    ld.param.u64 %rd1, [x];
    ld.param.u32 %r4, [n];
    mov.u32 %r1, %tid.x;
    setp.ge.u32 %p, %r1, %r4;
    @%p ret;
    mad.wide.u32 %rd2, %r1, 4, %rd1;
    ld.global.u32 %r2, [%rd2];
    add.u32 %r2, %r2, %r2;
    st.global.u32 [%rd2], %r2;
    red.global.add.u32 [count], 1;
    ret;
}
"""


def given(result):
    assert result[0] == driver.CUresult.CUDA_SUCCESS, result
    return result[1] if len(result) == 2 else result[1:]


given(driver.cuInit(0))
device = given(driver.cuDeviceGet(0))
given(driver.cuCtxSetCurrent(given(driver.cuDevicePrimaryCtxRetain(device))))
assert given(driver.cuDeviceComputeCapability(device)) == (9, 0)
module = given(driver.cuModuleLoadData(PTX))
kernel = given(driver.cuModuleGetFunction(module, b"twice"))
x = np.arange(64, dtype=np.uint32)
memory = given(driver.cuMemAlloc(x.nbytes))
given(driver.cuMemcpyHtoD(memory, x.ctypes.data, x.nbytes))
given(driver.cuMemsetD32(int(memory) + 4, 7, 1))
parameters = ((memory, 50), (None, ctypes.c_uint32))
given(driver.cuLaunchKernel(kernel, 1, 1, 1, 64, 1, 1, 0, 0, parameters, 0))
given(driver.cuMemcpyDtoH(x.ctypes.data, memory, x.nbytes))
assert x.tolist() == [0, 14, *range(4, 100, 2), *range(50, 64)]
address, nbytes = given(driver.cuModuleGetGlobal(module, b"count"))
assert (ctypes.c_uint32.from_address(int(address)).value, nbytes) == (50, 4)
assert driver.cuModuleGetFunction(module, b"none")[0] == driver.CUresult.CUDA_ERROR_NOT_FOUND
table = driver.cuGetExportTable(driver.CUuuid())[0]
assert table == driver.CUresult.CUDA_ERROR_NOT_FOUND  # NVRTC asks for one
found = driver.cuModuleLoadData(b"\\x7fELF" + bytes(60))[0]
assert found == driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU
too_many = driver.cuLaunchKernel(kernel, 1, 1, 1, 2048, 1, 1, 0, 0, parameters, 0)[0]
assert too_many == driver.CUresult.CUDA_ERROR_LAUNCH_FAILED
other = Device(0)
other.set_current()
assert other.compute_capability == (9, 0)
stream = other.create_stream()
stream.sync()
print("done")
'''


def test_programs_find_a_driver(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "ptxemu", "--gpu", "h100", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert "cuModuleLoadData: a module of machine code: ptxemu executes PTX only" in done.stderr
    assert "HardwareRefusal: block=(2048, 1, 1) has 2048 threads" in done.stderr
    assert "Segfault" not in done.stderr


def test_a_library_is_written_without_a_compiler(tmp_path):
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_size_t, ctypes.c_size_t)
    functions = [kind(lambda a, b: a + b), kind(lambda a, b: a * b)]
    path = tmp_path / "libof_python.so.1"
    shared_library.written(path, "libof_python.so.1", ["add", "multiply"], 100)
    library = shared_library.Library(path, ["add", "multiply"], harmless={"add"})
    assert (library.library.add(3, 4), library.library.multiply(3, 4)) == (0, 100)
    library.call(functions)
    by_name = ctypes.CDLL("libof_python.so.1")  # as others find it
    assert (by_name.add(3, 4), by_name.multiply(3, 4)) == (7, 12)
    assert library.addresses.keys() == {"add", "multiply"}
    library.rest()
    assert by_name.multiply(3, 4) == 100
    with pytest.raises(AttributeError):
        _ = by_name.divide
