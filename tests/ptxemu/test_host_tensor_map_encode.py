"""cuTensorMapEncodeTiled and Im2col as host code calls them, read back with the emulator's own
decoder."""

from __future__ import annotations

import ctypes

import pytest

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.host.runtime_symbols import RuntimeSymbols
from ptxemu.host.tensor_map_encode import (
    Im2colArguments,
    TiledArguments,
    encode_pixels,
    encode_tiled,
)
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tensor_map import decode
from ptxemu.numerics import swizzle

FLOAT16, TFLOAT32, FLOAT32_FTZ = 6, 11, 10  # CUtensorMapDataType
SWIZZLE_NONE, SWIZZLE_128B = 0, 3  # CUtensorMapSwizzle
NAN_FILL = 1  # CUtensorMapFloatOOBfill


def encode(dtype=FLOAT16, swizzle=SWIZZLE_128B, fill=0, element_stride=1):
    tensor_map = ctypes.create_string_buffer(128)
    dims = (ctypes.c_uint64 * 2)(256, 96)
    strides = (ctypes.c_uint64 * 1)(512)
    box = (ctypes.c_uint32 * 2)(64, 32)
    steps = (ctypes.c_uint32 * 2)(element_stride, 1)
    arrays = map(ctypes.addressof, (dims, strides, box, steps))
    encode_tiled(
        ctypes.addressof(tensor_map), dtype, 2, 0x7F0000001000, *arrays, 0, swizzle, 2, fill
    )
    return decode(tensor_map.raw)


def test_all_fields():
    tensor_map = encode()
    assert tensor_map.address == 0x7F0000001000
    assert tensor_map.dtype == "f16"
    assert (tensor_map.dims, tensor_map.strides, tensor_map.box) == ((256, 96), (512,), (64, 32))
    assert tensor_map.swizzle == swizzle.SWIZZLE_128B


def test_the_driver_and_the_hardware_number_types_differently():
    assert encode(TFLOAT32, SWIZZLE_NONE).dtype == "tf32"


@pytest.mark.parametrize(
    "mode", [{"dtype": FLOAT32_FTZ}, {"swizzle": 5}, {"fill": 2}, {"element_stride": 2}]
)
def test_modes_that_are_not_known(mode):
    with pytest.raises(UnsupportedPtx, match="cuTensorMapEncodeTiled"):
        encode(**mode)


def test_what_is_out_of_bounds_can_be_nan():
    assert encode(fill=NAN_FILL).nan_fill
    assert not encode().nan_fill


def encode_images(rank=4, steps=(7, 2, 3, 1), interleave=0):
    tensor_map = ctypes.create_string_buffer(128)
    arrays = (
        (ctypes.c_uint64 * 4)(64, 9, 14, 3),
        (ctypes.c_uint64 * 3)(128, 1152, 16128),
        (ctypes.c_int32 * 2)(-1, -2),
        (ctypes.c_int32 * 2)(1, -3),
    )
    element_strides = (ctypes.c_uint32 * 4)(*steps)
    dims, strides, lower, upper = map(ctypes.addressof, arrays)
    encode_pixels(
        ctypes.addressof(tensor_map), FLOAT16, rank, 0x7F0000001000, dims, strides, lower, upper,
        32, 1000, ctypes.addressof(element_strides), interleave, 2, 2, NAN_FILL,
    )  # fmt: skip
    return decode(tensor_map.raw)


def test_images():
    found = encode_images()
    assert (found.dims, found.strides) == ((64, 9, 14, 3), (128, 1152, 16128))
    assert found.pixels == PixelBox((-1, -2), (1, -3), (2, 3))  # the stride of C is not used
    assert (found.box, found.swizzle, found.nan_fill) == ((32, 1000), swizzle.SWIZZLE_64B, True)


@pytest.mark.parametrize(("mode", "error"), [
    ({"rank": 2}, HardwareRefusal),
    ({"interleave": 1}, UnsupportedPtx),
    ({"steps": (1, 1, 1, 2)}, UnsupportedPtx),
])  # fmt: skip
def test_modes_of_images_that_are_not_known(mode, error):
    with pytest.raises(error, match="cuTensorMapEncodeIm2col"):
        encode_images(**mode)


def test_host_code_gives_as_many_arguments_as_there_are():
    for method, arguments in ((RuntimeSymbols._encode_tensor_map, TiledArguments),
                              (RuntimeSymbols._encode_pixel_map, Im2colArguments)):  # fmt: skip
        ((_, given),) = method.symbols
        assert len(given) == len(arguments._fields)
