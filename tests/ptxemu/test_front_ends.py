"""TileLang and Numba: what needs neither of them. The examples of the pages need them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ptxemu
from ptxemu.errors import UnsupportedPtx
from ptxemu.host import python_launcher
from ptxemu.host.numba_lowering import Argument
from ptxemu.host.python_launcher import Driver
from ptxemu.host.tilelang_lowering import Lowered
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tensor_map import encode_im2col
from ptxemu.mangled import short
from tests.ptxemu.kernels import kernel

TENSOR_2D = (Path(__file__).parent / "ptx" / "tensor_2d.ptx").read_text(encoding="utf-8")
# Host code like TileLang's: two maps, and a launch of tensor_2d of this folder.
HOST = """
from cuda.bindings.driver import (
    CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUresult, CUtensorMapDataType,
    cuLaunchKernelEx, cuTensorMapEncodeTiled, cuuint64_t,
)
import ctypes

def encoded(tensor, rows):
    res, found = cuTensorMapEncodeTiled(
        CUtensorMapDataType(1), 2, tensor.data_ptr(), [cuuint64_t(80), cuuint64_t(rows)], [160],
        [64, 8], [1, 1], 0, 3, 2, 0,
    )
    assert res == CUresult.CUDA_SUCCESS
    return found

def call(kernels, a, d, e, rows, stream=0):
    config = CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.sharedMemBytes = 4096
    config.attrs = [CUlaunchAttribute()]
    config.attrs[0].id = CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    config.numAttrs = 1
    values = a.data_ptr(), encoded(a, rows), d.data_ptr(), e.data_ptr(), encoded(e, rows)
    types = ctypes.c_void_p, None, ctypes.c_void_p, ctypes.c_void_p, None
    res = cuLaunchKernelEx(config, kernels["tensor_2d"], (values, types), a.device.index)[0]
    assert res == CUresult.CUDA_SUCCESS
"""
BUFFERS = {
    0: ("a", ("rows", 80), "int16"),
    1: ("d", (1024,), "uint16"),
    2: ("e", ("rows", 80), "int16"),
}
TILES = ptxemu.tilelang.Kernel(
    ptxemu.load(TENSOR_2D), Lowered("// C++", HOST, ["tensor_2d"], BUFFERS, [])
)


def rows_of_tiles() -> torch.Tensor:
    return torch.arange(3840, dtype=torch.int16).view(48, 80)


def test_generated_host_code_encodes_maps_and_launches():
    a, d, e = rows_of_tiles(), np.zeros(1024, np.uint16), torch.zeros(48, 80, dtype=torch.int16)
    report = TILES.launch(a, d, e, options=ptxemu.Options(check=True))
    (launch,) = report.launches
    assert (launch.entry, launch.block, launch.errors) == ("tensor_2d", (32, 1, 1), [])
    tile = np.zeros((8, 64), np.uint16)
    tile[:4, :40] = a[44:, 40:]
    assert (d.reshape(8, 2, 64) == tile[:, None]).all()
    assert TILES.source == "// C++"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({1: np.zeros(1023, np.uint16)}, ValueError, r"\(d\) wants uint16 \(1024,\); given uint16"),
        ({0: rows_of_tiles().float()}, ValueError, r"\(a\) wants int16 \('rows', 80\); given flo"),
        ({0: rows_of_tiles()[0]}, ValueError, r"given int16 \(80,\)"),
        ({2: 5}, TypeError, r"argument 2 \(e\) wants an array; given a int"),
        ({3: 1, 4: 2}, TypeError, "5 arguments; the function takes a, d, e, rows"),
    ],
    ids=str,
)
def test_arguments_that_a_function_does_not_take(change, error, words):
    args = {0: rows_of_tiles(), 1: np.zeros(1024, np.uint16), 2: rows_of_tiles()}
    with pytest.raises(error, match=words):
        TILES.launch(*(args | change).values())
    with pytest.raises(TypeError, match=r"argument 2 \(e\) of int16 .* is missing; 2 arguments"):
        TILES.launch(args[0], args[1])


def test_what_host_code_may_ask_of_the_driver():
    box = PixelBox((-1, -2), (1, 2), (2, 1))
    dims, strides = (32, 10, 9, 2), (64, 640, 5760)
    common = (0, 2, 2, 1)  # interleave, swizzle, promotion, fill
    found = Driver.cuTensorMapEncodeIm2col(
        6, 4, 4096, [*dims], [*strides], [-1, -2], [1, 2], 32, 16, [1, 2, 1, 1], *common
    )
    assert found == (0, encode_im2col(4096, dims, strides, (32, 16), box, "f16", "64B", True))
    with pytest.raises(UnsupportedPtx, match="host code needs cuCtxSetLimit of the CUDA driver"):
        python_launcher.loaded("from cuda.bindings.driver import cuCtxSetLimit")
    tiled = (6, 2, 4096, [64, 8], [128], [64, 8])
    with pytest.raises(UnsupportedPtx, match=r"with element strides \[1, 2\]"):
        Driver.cuTensorMapEncodeTiled(*tiled, [1, 2], *common)
    with pytest.raises(UnsupportedPtx, match="of type 6 with interleave 1, swizzle 2"):
        Driver.cuTensorMapEncodeTiled(*tiled, [1, 1], 1, *common[1:])


# x[i] = n_items + shape, of an array as Numba passes it
NUMBA = kernel(
    """ld.param.u64 %rd1, [data];
    ld.param.u64 %rd2, [items];
    ld.param.u64 %rd3, [rows];
    ld.param.u64 %rd4, [step];
    st.global.u64 [%rd1], %rd2;
    st.global.u64 [%rd1+8], %rd3;
    st.global.u64 [%rd1+16], %rd4;""",
    ", ".join(
        f".param .u64 {name}"
        for name in "info parent items size data rows columns step next_step".split()
    )
    + ", .param .f32 factor",
)


def numba_kernel(layout: str) -> ptxemu.numba.Kernel:
    text = f"array(int64, 2d, {layout})"
    arguments = [Argument(text, 2, "int64", layout), Argument("float32")]
    return ptxemu.numba.Kernel(ptxemu.load(NUMBA), arguments)


def test_arrays_as_numba_passes_them():
    x = np.zeros((3, 4), np.int64)
    report = numba_kernel("C").launch(x, 0.5, grid=1, block=1)
    assert report.warp_instructions == 8
    assert x.ravel()[:3].tolist() == [12, 3, 32]
    y = np.zeros((4, 3), np.int64).T
    numba_kernel("F").launch(y, 1, grid=1, block=1)
    assert y.T.ravel()[:3].tolist() == [12, 3, 8]
    numba_kernel("A").launch(x[:, ::2], 1, grid=1, block=1)
    assert x.ravel()[:3].tolist() == [6, 3, 32]
    numba_kernel("C").launch(x[:1, :].T[:, :1].T, 1, grid=1, block=1)


@pytest.mark.parametrize(
    ("layout", "args", "error", "words"),
    [
        ("C", (np.zeros((4, 3), np.int64).T, 1), ValueError, r"array\(int64, 2d, C\); given int64"),
        ("F", (np.zeros((4, 3), np.int64), 1), ValueError, "strides \\(24, 8\\)"),
        ("A", (np.zeros(3, np.int64), 1), ValueError, r"given int64 \(3,\)"),
        ("A", (np.zeros((3, 3)), 1), ValueError, r"given float64 \(3, 3\)"),
        ("A", (1, 1), TypeError, "argument 0 wants array.*given a int"),
        ("A", (1,), TypeError, r"1 arguments given; the kernel takes \(array\(int64, 2d, A\), fl"),
        ("A", (np.zeros((3, 3), np.int64), "1"), TypeError, "factor, .f32"),
    ],
    ids=str,
)
def test_arguments_that_a_signature_does_not_allow(layout, args, error, words):
    with pytest.raises(error, match=words):
        numba_kernel(layout).launch(*args, grid=1, block=1)


def test_names_of_numba_and_targets():
    name = "_ZN6cudapy8__main__5saxpyB2v1B6cw51cXEf"
    module = ptxemu.load(NUMBA.replace("test(", f"{name}("))
    assert module.entry("saxpy").name == name
    assert short(name) == "cudapy::__main__::saxpy"
    with pytest.raises(ValueError, match="arch='volta'; must be like 'sm_90'"):
        ptxemu.numba.compile(None, (), "volta")
