"""Launch structures decoded from hand-made bytes, and parameter sizes from PTX declarations."""

from __future__ import annotations

import ctypes
import struct

import pytest

from ptxemu.host.launch_config import (
    LaunchAttributes,
    parameter_sizes,
    read_config,
    read_params,
)

STALE = 0xDEADBEEF  # what the host code leaves in the unused part of an attribute's union


def attribute(identifier: int, *words: int) -> bytes:
    value = struct.pack(f"<{len(words)}I", *words)
    return struct.pack("<I4x", identifier) + value + struct.pack("<I", STALE) * (16 - len(words))


def config_at(*attributes: bytes) -> tuple[int, list]:
    """The address of a configuration with these attributes, and what must stay alive meanwhile."""
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
