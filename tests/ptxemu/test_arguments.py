"""Arguments of a launch: arrays of every library, numbers and structures, by the signature."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest
import torch

import ptxemu
from ptxemu.arguments.array import array_of, packed
from ptxemu.arguments.pack import pack
from ptxemu.errors import HardwareRefusal, OutOfBounds
from ptxemu.module import Module, launching
from tests.ptxemu.kernels import kernel, pointers


def entry_of(params: str):
    return Module(kernel("", params)).entry(None)


def raw(kind: str, value: object) -> bytes:
    (found,) = pack(entry_of(f".param .{kind} p"), [value]).params
    return found


def copies(words: int = 1) -> Module:
    """One thread: y[0] = x[0], for words of 32 bits."""
    body = "ld.param.u64 %rd1, [y];\nld.param.u64 %rd2, [x];\n"
    for word in range(words):
        body += f"ld.global.u32 %r1, [%rd2+{4 * word}];\nst.global.u32 [%rd1+{4 * word}], %r1;\n"
    return ptxemu.load(kernel(body, ".param .u64 y, .param .u64 x"))


class Dlpack:
    """An array that exports nothing but DLPack, by the protocol of an age."""

    def __init__(self, array, versioned: bool) -> None:
        self._array = array
        if versioned:
            self.__class__ = _Versioned

    def __dlpack__(self):
        return self._array.__dlpack__()


class _Versioned(Dlpack):
    def __dlpack__(self, max_version=None):
        return self._array.__dlpack__(max_version=max_version)


class Interface:
    def __init__(self, array: np.ndarray, name: str) -> None:
        self.array = array
        setattr(self, name, {**array.__array_interface__, "strides": array.strides})


ROW = np.arange(6, dtype=np.float32)
ARRAYS = {
    "numpy": ROW,
    "torch": torch.from_numpy(ROW),
    "dlpack": Dlpack(ROW, versioned=False),
    "dlpack 1": Dlpack(ROW, versioned=True),
    "interface": Interface(ROW, "__array_interface__"),
    "cuda": Interface(ROW, "__cuda_array_interface__"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_library(name):
    found = array_of(ARRAYS[name])
    assert (found.address, found.shape, found.strides) == (ROW.ctypes.data, (6,), (4,))
    assert (found.dtype, found.itemsize, found.writable) == ("float32", 4, True)
    y = np.zeros(1, np.float32)
    copies().launch(grid=1, block=1, args=[y, ARRAYS[name]])
    assert y[0] == ROW[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_dlpack_knows_types_that_numpy_does_not(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype).t()
    exported = array_of(Dlpack(tensor, versioned=True))
    direct = array_of(tensor)
    assert exported == direct
    assert str(direct) == f"{str(dtype).removeprefix('torch.')} (3, 2)"


def test_a_read_only_export_is_read_only():
    array = ROW.copy()
    array.flags.writeable = False
    assert not array_of(Dlpack(array, versioned=True)).writable
    assert not array_of(array).writable


def test_what_is_no_array():
    assert not [v for v in (1, None, "x", b"xy", np.float32(1), [1], np.float32) if array_of(v)]
    strange = Interface(ROW, "__cuda_array_interface__")
    strange.__cuda_array_interface__["data"] = (1 << 46, False)
    with pytest.raises(ValueError, match=r"argument 1 of test.*cannot read; copy it to the CPU"):
        copies().launch(grid=1, block=1, args=[ROW, strange])


def test_extents_follow_strides():
    x = np.zeros((8, 10), np.int16)
    assert array_of(x[2:4, 1:3]).extent == (x.ctypes.data + 42, x.ctypes.data + 42 + 24)
    assert array_of(x[::-1, ::-2]).extent == (x.ctypes.data + 2, x.ctypes.data + 160)
    assert array_of(x[:0]).extent == (0, 0)
    assert array_of(np.broadcast_to(x[0], (1000, 10))).extent[1] == x.ctypes.data + 20
    assert packed((2, 3, 4), 2) == (24, 8, 2)


VALUES = [
    *[("u32", v, struct.pack("<I", v)) for v in (0, 3, (1 << 32) - 1)],
    ("u32", -1, b"\xff" * 4),
    ("s32", -(1 << 31), struct.pack("<i", -(1 << 31))),
    ("u8", True, b"\1"),
    ("u8", np.bool_(True), b"\1"),
    ("s8", -1, b"\xff"),
    ("u32", np.int64(7), struct.pack("<i", 7)),
    ("u64", 1 << 63, struct.pack("<Q", 1 << 63)),
    ("s64", -2, struct.pack("<q", -2)),
    ("u64", None, bytes(8)),
    ("u64", ctypes.c_void_p(4096), struct.pack("<Q", 4096)),
    ("u64", ctypes.c_void_p(), bytes(8)),
    ("f32", 2, struct.pack("<f", 2)),
    ("f32", np.float64(0.1), struct.pack("<f", 0.1)),
    ("f32", float("inf"), struct.pack("<f", float("inf"))),
    ("f64", 0.1, struct.pack("<d", 0.1)),
    ("f64", torch.tensor(0.5), struct.pack("<d", 0.5)),
    ("f16", 0.5, struct.pack("<e", 0.5)),
    ("bf16", 1.0, b"\x80\x3f"),
    ("b16", np.float16(1), struct.pack("<e", 1)),
    ("b32", np.float32(1), struct.pack("<f", 1)),
    ("b32", 5, struct.pack("<I", 5)),
    ("f16x2", b"\1\2\3\4", b"\1\2\3\4"),
    ("u32", np.array(9), struct.pack("<I", 9)),
]


@pytest.mark.parametrize(("kind", "value", "expected"), VALUES, ids=str)
def test_numbers(kind, value, expected):
    assert raw(kind, value) == expected


REFUSED = [
    ("u32", 1.5, TypeError, "wants an integer; given float 1.5"),
    ("u32", np.float32(1), TypeError, "wants an integer"),
    ("b32", 1.5, TypeError, r"pass np.float32\(...\) for its bits"),
    ("u32", 1 << 32, ValueError, "4294967296 is not in the range of .u32, -2147483648 to"),
    ("s32", (1 << 32) - 1, ValueError, "to 2147483647"),
    ("u8", 256, ValueError, "-128 to 255"),
    ("u32", ROW, TypeError, r"given an array \(ndarray\) of float32 \(6,\)"),
    ("f32", ROW, TypeError, "wants a number"),
    ("f32", "1", TypeError, "wants a number; given str '1'"),
    ("f32", None, TypeError, "wants a number"),
    ("f32", 1e39, ValueError, "not in the range of .f32"),
    ("f16", 1e6, ValueError, "not in the range of .f16"),
    ("u64", "x", TypeError, "wants an array, None or an integer"),
    ("u64", 0.5, TypeError, "wants an array, None or an integer"),
    ("f16x2", 1, TypeError, "wants 4 bytes"),
    ("u64", b"123", TypeError, "wants an array"),
    ("u64", ["a" * 100], TypeError, r"given list \['aaaa.*\.\.\.$"),
]


@pytest.mark.parametrize(("kind", "value", "error", "words"), REFUSED, ids=str)
def test_what_a_parameter_cannot_take(kind, value, error, words):
    with pytest.raises(error, match=rf"argument 0 of test \(p, .{kind}\).*{words}"):
        raw(kind, value)


PAIR = np.dtype([("n", np.int32), ("x", np.float32)])


class Pair(ctypes.Structure):
    _fields_ = (("n", ctypes.c_int32), ("x", ctypes.c_float))


def test_structures_by_value():
    expected = struct.pack("<if", 3, 0.5)
    row = np.array([(3, 0.5), (1, 1)], PAIR)
    structures = expected, bytearray(expected), row[0], np.array(row[0]), Pair(3, 0.5)
    entry = entry_of(".param .align 4 .b8 p[8]")
    assert [pack(entry, [value]).params for value in structures] == [[expected]] * 5
    with pytest.raises(TypeError, match=r"8 bytes by value .*, as array.tobytes\(\) is; given an"):
        pack(entry, [row])
    with pytest.raises(ValueError, match=r"\(p, \.b8\[8\]\): wants 8 bytes by value; bytes .* 2"):
        pack(entry, [b"xy"])


def test_a_wrong_count_shows_the_signature():
    entry = entry_of(".param .u64 x, .param .align 64 .b8 map[128], .param .u32 n")
    words = r"test takes 3 arguments, 1 given: x \.u64, map \.b8\[128\], n \.u32"
    with pytest.raises(ValueError, match=words):
        pack(entry, [1])
    with pytest.raises(ValueError, match="takes 0 arguments, 1 given: no parameters"):
        pack(entry_of(""), [1])
    with pytest.raises(ValueError, match="args and params are both given"):
        copies().launch(grid=1, block=1, args=[ROW, ROW], params=[bytes(8)] * 2)


def test_a_kernel_may_access_its_arrays_alone():
    x, y = np.arange(8, dtype=np.uint32), np.zeros(8, np.uint32)
    launch = copies(words=2).launch
    launch(grid=1, block=1, args=[y, x[6:]])
    assert y[:2].tolist() == [6, 7]
    with pytest.raises(OutOfBounds):
        launch(grid=1, block=1, args=[y, x[7:]])
    with pytest.raises(OutOfBounds):  # an address alone names no memory
        launch(grid=1, block=1, args=[y, x.ctypes.data])
    launch(grid=1, block=1, args=[y, x.ctypes.data], memory=[x])
    assert y[:2].tolist() == [0, 1]


def test_a_read_only_array_may_be_read():
    x, y = np.arange(2, dtype=np.uint32), np.zeros(2, np.uint32)
    fixed = x.view()
    fixed.flags.writeable = False
    launch = copies(words=2).launch
    launch(grid=1, block=1, args=[y, fixed])
    with pytest.raises(OutOfBounds, match="cannot be written"):
        launch(grid=1, block=1, args=[fixed, y])
    launch(grid=1, block=1, args=[y, fixed], memory=[x[:1]])
    launch(grid=1, block=1, args=[fixed, y], memory=[x[:1]])
    checked = ptxemu.Options(check=True)
    report = launch(grid=1, block=1, args=[fixed, y], options=checked)
    assert {finding.check for finding in report.errors} == {"out-of-bounds"}


def test_views_with_different_rights_of_one_array():
    x = np.zeros(100, np.uint8)
    fixed = x.view()
    fixed.flags.writeable = False
    entry = entry_of(".param .u64 p, .param .u64 q, .param .u64 r")

    def ranges(*args):
        found = pack(entry, args).memory
        return [(m.ctypes.data - x.ctypes.data, m.nbytes, m.flags.writeable) for m in found]

    assert ranges(x, x[10:20], fixed[50:60]) == [(0, 100, True)]
    assert ranges(x[:10], fixed[10:20], fixed[15:25]) == [
        (0, 10, True), (10, 10, False), (15, 10, False)
    ]  # fmt: skip
    assert ranges(x[:0], None, 3) == []


def test_the_block_is_that_of_the_kernel():
    text = kernel("mov.u32 %r1, %ntid.x;").replace(".entry test()", ".entry test()\n.reqntid 48")
    report = ptxemu.load(text).launch(grid=(2, 3), args=[])
    assert (report.grid, report.block) == ((2, 3, 1), (48, 1, 1))
    with pytest.raises(HardwareRefusal, match=r"no block is given, and kernel test has no .reqnt"):
        ptxemu.load(kernel("")).launch(grid=1, args=[])
    clustered = text.replace(".reqntid 48", ".reqntid 48\n.reqnctapercluster 2")
    report = ptxemu.load(clustered).launch(grid=4, args=[])
    assert (report.grid, report.cluster) == ((4, 1, 1), (2, 1, 1))
    with pytest.raises(TypeError):
        ptxemu.load(text).launch(grid=1.5, args=[])


def test_parameters_reach_the_kernel():
    body = """ld.param.u64 %rd1, [out];
    ld.param.f32 %f1, [x];
    ld.param.s32 %r1, [n];
    ld.param.f64 %fd1, [pair+8];
    st.global.f32 [%rd1], %f1;
    st.global.s32 [%rd1+4], %r1;
    st.global.f64 [%rd1+8], %fd1;"""
    params = ".param .u64 out, .param .f32 x, .param .s32 n, .param .align 8 .b8 pair[16]"
    out = np.zeros(1, np.dtype([("x", np.float32), ("n", np.int32), ("y", np.float64)]))
    pair = struct.pack("<dd", 1, 2.25)
    ptxemu.load(kernel(body, params)).launch(grid=1, block=1, args=[out, 0.5, -7, pair])
    assert out[0].item() == (0.5, -7, 2.25)


def test_whoever_stands_between_sees_parameters_and_dimensions():
    """Commands that look at launches, or change them, need not know of arguments."""
    seen = []

    def through(launch, module):
        def run(entry, **given):
            seen.append((entry, given))
            return launch(module, entry, **given)

        return run

    x, y = np.arange(2, dtype=np.uint32), np.zeros(2, np.uint32)
    module = copies()
    with launching(through):
        module.launch(grid=2, block=1, args=[y, x], cluster=(2,))
        module.launch(grid=(1,), block=[1], params=pointers(y, x), memory=[x, y])
    assert y[0] == x[0]
    (entry, given), (_, plain) = seen
    assert (entry, given["params"]) == ("test", pointers(y, x)) == ("test", plain["params"])
    assert "args" not in given
    dims = [given[name] for name in ("grid", "block", "cluster")]
    assert dims == [(2, 1, 1), (1, 1, 1), (2, 1, 1)]
    assert plain.keys() == {"grid", "block", "params", "memory"}
