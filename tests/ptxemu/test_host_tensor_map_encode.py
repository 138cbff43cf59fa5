"""cuTensorMapEncodeTiled as host code calls it, read back with the emulator's own decoder."""

from __future__ import annotations

import ctypes

import pytest

from ptxemu.errors import UnsupportedPtx
from ptxemu.host.tensor_map_encode import encode_tiled
from ptxemu.machine import swizzle
from ptxemu.machine.tensor_map import decode

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
    "mode", [{"dtype": FLOAT32_FTZ}, {"swizzle": 5}, {"fill": NAN_FILL}, {"element_stride": 2}]
)
def test_modes_that_are_not_known(mode):
    with pytest.raises(UnsupportedPtx, match="cuTensorMapEncodeTiled"):
        encode(**mode)
