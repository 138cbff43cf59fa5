"""Public tensor maps: what `ptxemu.tensor_map` encodes, refuses, and a kernel that copies by it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ptxemu
from ptxemu.errors import HardwareRefusal, OutOfBounds, UnsupportedPtx
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tensor_map import encode, encode_im2col
from tests.ptxemu.kernels import kernel

TENSOR_2D = (Path(__file__).parent / "ptx" / "tensor_2d.ptx").read_text(encoding="utf-8")


def aligned(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Zeros at a multiple of 64 bytes."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    space = torch.zeros(nbytes + 64, dtype=torch.uint8)
    start = -space.data_ptr() % 64
    return space[start : start + nbytes].view(dtype).view(shape)


def test_a_kernel_copies_tiles_by_maps():
    a = aligned((48, 80), torch.int16)
    a[:] = torch.arange(3840).view(48, 80)
    d, e = np.zeros(1024, np.uint16), aligned((48, 80), torch.int16)
    source, target = (ptxemu.tensor_map(x, (8, 64), swizzle="128B") for x in (a, e))
    launch = ptxemu.load(TENSOR_2D).launch
    launch(grid=1, block=32, smem_bytes=4096, args=[a, source, d, e, target])
    tile = np.zeros((8, 64), np.uint16)
    tile[:4, :40] = a[44:, 40:]
    assert (d.reshape(8, 2, 64) == tile[:, None]).all()
    assert e.any()
    other = aligned((48, 80), torch.int16)
    stray = ptxemu.tensor_map(other, (8, 64), swizzle="128B")
    launch(grid=1, block=32, smem_bytes=4096, args=[a, stray, d, e, target])
    with pytest.raises(OutOfBounds):  # bytes of a map name no memory
        launch(grid=1, block=32, smem_bytes=4096, args=[a, stray.raw, d, e, target])


def test_a_pointer_takes_the_address_of_a_map():
    x = aligned((16, 64))
    encoded = ptxemu.tensor_map(x, (1, 64))
    body = """ld.param.u64 %rd1, [out];
    ld.param.u64 %rd2, [map];
    ld.global.u64 %rd3, [%rd2];
    st.global.u64 [%rd1], %rd3;"""
    out = np.zeros(1, np.uint64)
    params = ".param .u64 out, .param .u64 map"
    ptxemu.load(kernel(body, params)).launch(grid=1, block=1, args=[out, encoded])
    assert out[0] == x.data_ptr()
    assert encoded.block.ctypes.data % 64 == 0


TYPES = [
    (torch.float32, "f32", 1),
    (torch.bfloat16, "bf16", 1),
    (torch.float64, "f64", 1),
    (torch.float8_e4m3fn, "u8", 1),
    (torch.float8_e5m2, "u8", 1),
    (torch.int32, "u32", 1),
    (torch.int64, "u64", 1),
    (torch.bool, "u8", 1),
    (torch.float4_e2m1fn_x2, "16u4_align8b", 2),
]


@pytest.mark.parametrize(("dtype", "name", "times"), TYPES, ids=str)
def test_types(dtype, name, times):
    x = aligned((3, 4, 64), torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    found = ptxemu.tensor_map(x, (2, 4, 32))
    size = dtype.itemsize
    expected = encode(
        x.data_ptr(), (64 * times, 4, 3), (64 * size, 256 * size), (32, 4, 2), name, "none"
    )
    assert bytes(found) == found.raw == expected
    assert found.decoded.dims == (64 * times, 4, 3)


def test_types_by_name():
    x = aligned((4, 64), torch.float32)
    assert ptxemu.tensor_map(x, (4, 32), dtype="TF32", fill="nan").decoded.nan_fill
    packed = aligned((8, 256), torch.uint8)
    assert ptxemu.tensor_map(packed, (1, 128), dtype="16U4_ALIGN16B").decoded.dims == (512, 8)
    packed = aligned((8, 192), torch.uint8)
    assert ptxemu.tensor_map(packed, (1, 128), dtype="16u6_align16b").decoded.dims == (256, 8)
    for array, dtype, words in (
        (x, "f16", "'f16' has 2 bytes; elements of float32 have 4"),
        (x, "16u4_align8b", "needs packed bytes; the array has float32"),
        (x, "e4m3", "must be one of u8, u16"),
        (aligned((4, 2), torch.complex64), None, "complex64 has no type of tensor map"),
    ):
        with pytest.raises(ValueError, match=words):
            ptxemu.tensor_map(array, (1, 32), dtype=dtype)


def test_types_of_ml_dtypes():
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    x = aligned((4, 64), torch.int16).numpy().view(types.bfloat16)
    assert ptxemu.tensor_map(x, (1, 64)).decoded.dtype == "bf16"
    with pytest.raises(ValueError, match="one element in each byte"):
        ptxemu.tensor_map(np.zeros((4, 64), types.float4_e2m1fn), (1, 64))


def test_strides_follow_the_array():
    x = aligned((6, 4, 64))
    found = ptxemu.tensor_map(x[::2, 1:, 8:40], (3, 2, 32), swizzle="64b").decoded
    assert (found.dims, found.strides) == ((32, 3, 3), (128, 1024))
    assert (found.box, found.swizzle.name) == ((32, 2, 3), "64B")
    assert found.address == x.data_ptr() + 128 + 16


def test_im2col():
    x = aligned((2, 9, 10, 32))
    found = ptxemu.tensor_map(
        x, (16, 32), im2col=((-1, -2), (1, 2)), swizzle="64B", element_strides=(1, 2, 3, 1)
    )
    pixels = PixelBox((-2, -1), (2, 1), (3, 2))
    strides = (64, 640, 5760)
    expected = encode_im2col(x.data_ptr(), (32, 10, 9, 2), strides, (32, 16), pixels, "f16", "64B")
    assert found.raw == expected
    with pytest.raises(ValueError, match=r"with im2col it is \(pixels, channels\)"):
        ptxemu.tensor_map(x, (1, 1, 1, 32), im2col=((0, 0), (0, 0)))
    with pytest.raises(UnsupportedPtx, match="element stride 2 of N"):
        ptxemu.tensor_map(x, (16, 32), im2col=((0, 0), (0, 0)), element_strides=(2, 1, 1, 1))


REFUSED = [
    ({"box": (257, 64)}, HardwareRefusal, "limit is 256"),
    ({"box": (0, 64)}, HardwareRefusal, "limit is 256"),
    ({"box": (64,)}, HardwareRefusal, "1 box sides"),
    ({"box": (8, 4)}, HardwareRefusal, "multiple of 16 bytes"),
    ({"box": (8, 64), "swizzle": "64B"}, HardwareRefusal, "limit of swizzle 64B is 64"),
    ({"box": (8, 64), "swizzle": "96B"}, ValueError, "must be one of none, 32B"),
    ({"box": (8, 64), "fill": "one"}, ValueError, "must be 'zero' or 'nan'"),
    ({"box": (8, 64), "interleave": "16B"}, UnsupportedPtx, "interleave"),
    ({"box": (8, 64), "element_strides": (2, 1)}, UnsupportedPtx, r"element strides \(2, 1\)"),
    ({"box": (8, 64), "element_strides": (9, 1)}, HardwareRefusal, "must be 1 to 8"),
    ({"box": (8, 64), "element_strides": (1,)}, ValueError, "2 dimensions"),
]


@pytest.mark.parametrize(("how", "error", "words"), REFUSED, ids=str)
def test_what_is_refused(how, error, words):
    with pytest.raises(error, match=words):
        ptxemu.tensor_map(aligned((16, 64)), **how)


def test_what_the_memory_of_an_array_does_not_allow():
    x = aligned((16, 72))
    refused = [
        (x[:, 1:65], "not 16-byte aligned"),
        (x.t(), r"last dimension of float16 \(72, 16\) has a stride of 144 bytes"),
        (aligned((16, 36), torch.int8), "stride of dimension 1 is 36 bytes"),
        (x[:0], "every dimension must be >= 1"),
        (aligned((1, 1, 1, 1, 1, 64)), "6 dims"),
        (x.numpy()[::-1], "must be >= 0 bytes"),
    ]
    for array, words in refused:
        side = (1,) * (len(array.shape) - 1)
        with pytest.raises(HardwareRefusal, match=words):
            ptxemu.tensor_map(array, (*side, 16))
    with pytest.raises(TypeError, match="array is a list"):
        ptxemu.tensor_map([[1]], (1, 1))
