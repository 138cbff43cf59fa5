"""Launch structures and tensor maps of host code, as the CUDA runtime reads them."""

from __future__ import annotations

import ctypes
import struct

import pytest

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.host.launch_config import (
    LaunchAttributes,
    LaunchConfig,
    cluster_wished,
    may_be_large,
    parameter_sizes,
    read_config,
    read_params,
    require_allowed,
    require_settable,
)
from ptxemu.host.runtime_symbols import Run, RuntimeSymbols
from ptxemu.host.tensor_map_encode import (
    Im2colArguments,
    TiledArguments,
    encode_pixels,
    encode_tiled,
)
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.shape import ctas_of_sm
from ptxemu.machine.tensor_map import decode
from ptxemu.numerics import swizzle
from tests.ptxemu.kernels import DYNAMIC, kernel, launch

STALE = 0xDEADBEEF  # left by the host code in the unused part of an attribute's union


def attribute(identifier: int, *words: int) -> bytes:
    value = struct.pack(f"<{len(words)}I", *words)
    return struct.pack("<I4x", identifier) + value + struct.pack("<I", STALE) * (16 - len(words))


def config_at(*attributes: bytes) -> tuple[int, list]:
    """Return the address of a configuration with these attributes, and the objects to keep
    alive."""
    raw = ctypes.create_string_buffer(b"".join(attributes), 72 * len(attributes) + 1)
    words = struct.pack(
        "<3I3IQQQI", 7, 8, 9, 128, 2, 1, 232448, 0x77, ctypes.addressof(raw), len(attributes)
    )
    config = ctypes.create_string_buffer(words, len(words))
    return ctypes.addressof(config), [raw, config]


def test_sizes_and_stream():
    address, _alive = config_at()
    config = read_config(address)
    assert config.grid == (7, 8, 9)
    assert config.block == (128, 2, 1)
    assert config.smem_bytes == 232448
    assert config.stream == 0x77
    assert config.attributes == LaunchAttributes()


def test_attributes():
    address, _alive = config_at(
        attribute(2, 1), attribute(4, 2, 4, 1), attribute(6, 1), attribute(11, 4, 4, 1)
    )
    assert read_config(address).attributes == LaunchAttributes(
        cooperative=True, pdl=True, cluster=(2, 4, 1), preferred_cluster=(4, 4, 1)
    )


def test_attributes_present_but_off():
    address, _alive = config_at(attribute(6, 0), attribute(2, 0))
    assert read_config(address).attributes == LaunchAttributes()


def test_whose_wish_for_a_cluster_counts():
    address, _alive = config_at(attribute(17, 2))
    assert may_be_large(read_config(address), {})
    assert cluster_wished(launched(), {}) is None
    assert cluster_wished(launched(), {11: 2, 12: 1, 13: 1}) == (2, 1, 1)
    assert cluster_wished(launched(cluster=(1, 1, 1)), {}) == (1, 1, 1)


def test_unknown_attributes_are_kept():
    address, _alive = config_at(attribute(8, 3))
    (value,) = read_config(address).attributes.other.values()
    assert value[:4] == struct.pack("<I", 3)
    assert len(value) == 64


PTX = """
.version 8.8
.visible .entry copy(
\t.param .align 64 .b8 copy_param_0[128],
\t.param .u64 .ptr .global .align 16 copy_param_1,
\t.param .f32 copy_param_2,
\t.param .align 4 .b8 copy_param_3[12]
)
.reqntid 128, 1, 1
{ ret; }
.entry nothing() { ret; }
"""


def test_parameter_sizes():
    assert parameter_sizes(PTX) == {"copy": (128, 8, 4, 12), "nothing": ()}


def test_parameter_that_is_not_understood():
    with pytest.raises(ValueError, match="not a kernel parameter"):
        parameter_sizes(".entry f(.param .texref t) { ret; }")


def test_read_params():
    values = [ctypes.create_string_buffer(b"abcdefgh", 8), ctypes.create_string_buffer(b"xyz!", 4)]
    pointers = (ctypes.c_uint64 * 2)(*map(ctypes.addressof, values))
    assert read_params(ctypes.addressof(pointers), (8, 4)) == (b"abcdefgh", b"xyz!")
    assert read_params(0, ()) == ()


def launched(
    smem_bytes: int = 0, cluster: tuple[int, int, int] | None = None, portable_mode: int = 0
) -> LaunchConfig:
    attributes = LaunchAttributes(cluster=cluster, portable_mode=portable_mode)
    return LaunchConfig((16, 1, 1), (128, 1, 1), smem_bytes, 0, attributes)


SMEM, CLUSTER = 8, 14  # cudaFuncAttribute


@pytest.mark.parametrize(
    ("config", "attributes"),
    [
        (launched(48 * 1024), {}),
        (launched(200_000), {SMEM: 200_000}),
        (launched(cluster=(8, 1, 1)), {}),
        (launched(cluster=(4, 4, 1)), {CLUSTER: 1}),
        (launched(cluster=(4, 4, 1), portable_mode=2), {}),
        (launched(cluster=(4, 1, 1)), {11: 4, 12: 1, 13: 1}),
    ],
)
def test_a_launch_that_the_host_has_allowed(config, attributes):
    require_allowed(config, attributes)


@pytest.mark.parametrize(
    ("config", "attributes", "missing"),
    [
        (launched(48 * 1024 + 1), {}, "MaxDynamicSharedMemorySize"),
        (launched(200_000), {SMEM: 199_999}, "may have 199999"),
        (launched(1), {SMEM: 0}, "may have 0"),
        (launched(cluster=(9, 1, 1)), {}, "NonPortableClusterSizeAllowed"),
        (launched(cluster=(4, 4, 1)), {CLUSTER: 0, SMEM: 4096}, "16 CTAs"),
        (launched(cluster=(4, 4, 1), portable_mode=1), {CLUSTER: 1}, "8 are portable"),
        (launched(cluster=(2, 1, 1)), {11: 4, 12: 1, 13: 1}, r"RequiredCluster.*\(4, 1, 1\)"),
        (launched(), {11: 16, 12: 1, 13: 1}, "16 CTAs"),
    ],
)
def test_a_launch_that_a_gpu_would_refuse(config, attributes, missing):
    with pytest.raises(HardwareRefusal, match=missing):
        require_allowed(config, attributes)


def test_shared_memory_that_no_cta_has():
    require_settable(SMEM, 227 * 1024)
    require_settable(CLUSTER, 1)
    with pytest.raises(HardwareRefusal, match="at most 232448"):
        require_settable(SMEM, 227 * 1024 + 1)


def test_what_the_host_sets_is_kept_for_the_kernel():
    """The setting is kept by name: host code may request the kernel twice. Other kernels get no
    permission."""
    names = [ctypes.create_string_buffer(name) for name in (b"copy", b"copy", b"nothing")]
    symbols, launches = RuntimeSymbols(PTX), []
    handles = []
    for name in names:
        slot = ctypes.c_uint64()
        symbols._get_kernel(ctypes.addressof(slot), 1, ctypes.addressof(name))
        handles.append(slot.value)
    symbols._set_kernel_attribute(handles[0], SMEM, 100_000, 0)
    values = [ctypes.create_string_buffer(128) for _ in range(4)]
    pointers = (ctypes.c_uint64 * 4)(*map(ctypes.addressof, values))
    with Run(launches.append):
        symbols._launch(launched(100_000), handles[1], ctypes.addressof(pointers))
    assert [each.smem_bytes for each in launches] == [100_000]
    with pytest.raises(HardwareRefusal, match="may have 49152"), Run(launches.append):
        symbols._launch(launched(100_000), handles[2], 0)


LIMITS = {
    "sm_80": (166_912, False), "sm_86": (101_376, False), "sm_87": (166_912, False),
    "sm_89": (101_376, False), "sm_90a": (232_448, True), "sm_100a": (232_448, True),
    "sm_103a": (232_448, True), "sm_120a": (101_376, True), "sm_121a": (101_376, True),
    "": (232_448, True),
}  # fmt: skip


@pytest.mark.parametrize("target", LIMITS)
def test_a_gpu_of_the_target_has_so_much(target):
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
    most, clusters = LIMITS[target]
    require_settable(SMEM, most, target)
    with pytest.raises(HardwareRefusal, match=f"at most {most}.*{target}"):
        require_settable(SMEM, most + 1, target)
    require_allowed(launched(), {}, target)
    if clusters:
        require_allowed(launched(cluster=(2, 1, 1)), {}, target)
    else:
        with pytest.raises(HardwareRefusal, match=f"clusters of 2 CTAs, .*{target}.* 9.0"):
            require_allowed(launched(cluster=(2, 1, 1)), {}, target)


@pytest.mark.parametrize("target", LIMITS)
def test_a_launch_without_host_code_has_the_same_limits(target):
    most, clusters = LIMITS[target]
    text = kernel("", before=DYNAMIC).replace(".target sm_100a", f".target {target}" * bool(target))
    launch(text, smem_bytes=most)
    with pytest.raises(HardwareRefusal, match=f"{most + 1} bytes of shared memory; at most {most}"):
        launch(text, smem_bytes=most + 1)
    if clusters:
        launch(text, grid=(2,), cluster=(2,))
    else:
        with pytest.raises(HardwareRefusal, match="clusters of 2 CTAs"):
            launch(text, grid=(2,), cluster=(2,))


def test_a_module_says_its_target():
    symbols = RuntimeSymbols(kernel("").replace("sm_100a", "sm_86"))
    slot, name = ctypes.c_uint64(), ctypes.create_string_buffer(b"test")
    symbols._get_kernel(ctypes.addressof(slot), 1, ctypes.addressof(name))
    symbols._set_kernel_attribute(slot.value, SMEM, 101_376, 0)
    found = ctypes.c_int32()
    for attribute, value in ((81, 100 << 10), (97, 99 << 10), (16, 148)):
        symbols._get_device_attribute(ctypes.addressof(found), attribute, 0)
        assert found.value == value
    with pytest.raises(HardwareRefusal, match=r"at most 101376 of \.target sm_86"):
        symbols._set_kernel_attribute(slot.value, SMEM, 101_377, 0)
    request = launched(cluster=(2, 1, 1))
    with pytest.raises(HardwareRefusal, match="of 2 CTAs"), Run([].append):
        symbols._launch(request, slot.value, 0)


def test_how_many_ctas_an_sm_has_room_for():
    """The kernels have clusters that take over the work of others."""
    assert [ctas_of_sm(49 << 10, 8, target) for target in ("sm_100a", "sm_120a")] == [4, 2]
    assert [ctas_of_sm(0, 16, target) for target in ("", "sm_120a")] == [4, 3]
    assert ctas_of_sm(0, 1, "sm_120a") == 24


# cuTensorMapEncodeTiled and Im2col as host code calls them, read back with the emulator's own
# decoder.

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
