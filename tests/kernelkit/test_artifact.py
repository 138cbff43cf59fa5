"""A compiled kernel in memory and on disk: host object, signature, archive."""

from __future__ import annotations

import ctypes
import random
import struct

import pytest
import torch

from kernelkit.compile.artifact import FORMAT, Artifact, ArtifactError, cubin_in
from kernelkit.compile.cuda import runtime_symbol
from kernelkit.compile.host_object import HostObject, LoadedObject, ObjectError
from kernelkit.compile.signature import Argument, Signature, signature_of
from kernelkit.compile.trace import PTXAS_VARIABLE
from kernelkit.device.param_table import ParamTable
from tests.kernelkit.scale_kernel import compile_scale

MATRIX = Argument("tensor", ("ptr", "i32", "i32", "i64"), 32, (None, None), (None, 1))


@pytest.fixture
def kernel(whole_ptxas):
    return compile_scale("sm_100a")


# ---- the archive


def test_an_artifact_is_what_it_was(kernel):
    data = kernel.artifact.to_bytes()
    assert Artifact.from_bytes(data) == kernel.artifact
    assert Artifact.from_bytes(data).to_bytes() == data


def test_every_damage_is_noticed(kernel):
    """Changes are any single bit, and a missing end."""
    data, chance = kernel.artifact.to_bytes(), random.Random(1)
    for _ in range(300):
        place = chance.randrange(len(data))
        changed = data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :]
        for damaged in (changed, data[:place], data + b"\0"):
            with pytest.raises(ArtifactError, match="damaged"):
                Artifact.from_bytes(damaged)


def test_another_format_is_refused(kernel, monkeypatch):
    data = kernel.artifact.to_bytes()
    monkeypatch.setattr("kernelkit.compile.artifact.FORMAT", 99)
    with pytest.raises(ArtifactError, match=f"of format {FORMAT}, this version reads 99"):
        Artifact.from_bytes(data)


def test_the_cubin_is_an_elf_file_of_the_gpu(kernel):
    machine = struct.unpack_from("<H", kernel.cubin, 18)
    assert kernel.cubin[:4] == b"\x7fELF"
    assert machine == (190,)  # EM_CUDA
    assert cubin_in(kernel.cubin) == kernel.cubin
    assert ".target sm_100a" in kernel.ptx


def test_a_kernel_for_the_emulator_alone_is_not_taken_for_a_whole_one(kernel, monkeypatch):
    """Code by ptxas -O1 would run, but slowly: it yields no machine code and no key of a whole
    kernel."""
    monkeypatch.setenv(PTXAS_VARIABLE, "-O1")
    quick = compile_scale("sm_100a")
    assert quick.ptx == kernel.ptx
    for wanted in (lambda: quick.cubin, lambda: quick.entry(0)):
        with pytest.raises(RuntimeError, match="only for the emulator, by ptxas -O1"):
            wanted()
    monkeypatch.delenv(PTXAS_VARIABLE)
    assert compile_scale("sm_100a").cubin == kernel.cubin


# ---- the host object


def test_a_loaded_function_runs(kernel):
    loaded = LoadedObject(HostObject(kernel.artifact.host), lambda name: 1)
    count = ctypes.CFUNCTYPE(ctypes.c_int)(loaded.address("cuda_num_binaries"))
    assert count() == 1
    with pytest.raises(KeyError):
        loaded.address("cuda_launch_it_twice")


def test_what_is_needed_is_asked_for_by_name(kernel):
    asked = []
    LoadedObject(HostObject(kernel.artifact.host), lambda name: asked.append(name) or 1)
    assert "_cudaLaunchKernelEx" in asked
    assert asked == HostObject(kernel.artifact.host).undefined


def test_host_code_is_for_every_x86_processor(kernel):
    """Host code does not depend on the processor that compiled it: vectors and constants have 16
    bytes."""
    names = {section.name for section in HostObject(kernel.artifact.host).sections}
    assert not [name for name in names if name.endswith((".cst32", ".cst64"))]


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF\x02\x01" + b"\0" * 100])
def test_what_is_no_object_is_refused(data):
    with pytest.raises((ObjectError, struct.error)):
        HostObject(data)


def test_an_unknown_relocation_is_refused(kernel, monkeypatch):
    parsed = HostObject(kernel.artifact.host)
    real = parsed.relocations()
    changed = [(section, [(o, 99, s, a) for o, _, s, a in found]) for section, found in real]
    monkeypatch.setattr(parsed, "relocations", lambda: changed)
    with pytest.raises(ObjectError, match="unknown kind 99"):
        LoadedObject(parsed, lambda name: 1)


def test_unknown_symbols_are_refused_by_name():
    assert runtime_symbol("memcpy")
    with pytest.raises(RuntimeError, match="_cudaGraphLaunch, which kernelkit does not provide"):
        runtime_symbol("_cudaGraphLaunch")
    with pytest.raises(RuntimeError, match="no_such_function"):
        runtime_symbol("no_such_function")


# ---- the signature


def test_arguments_lie_as_the_host_code_reads_them():
    table = Argument("table", ("array<3 x i64>",))
    numbers = [Argument(kind, (kind,)) for kind in ("i32", "i64", "f32")]
    nothing = Argument("nothing")
    signature = Signature([MATRIX, nothing, table, *numbers, Argument("stream", ("ptr",))])
    x = torch.zeros(5, 12)[:, :7]
    packed = signature.pack(((x, None), ParamTable([(1, 2, 0)], 1), 3, 4, 0.5), stream=77)
    layout = struct.Struct("@Qiiq")
    tensor = layout.unpack(ctypes.string_at(packed.pointers[0], layout.size))
    assert tensor == (x.data_ptr(), 5, 7, 12)
    three = struct.unpack("@3q", ctypes.string_at(packed.pointers[1], 24))
    assert three == (1, 2, 0)
    values = [
        struct.unpack(kind, ctypes.string_at(at, struct.calcsize(kind)))[0]
        for at, kind in zip(packed.pointers[2:6], "iqfQ", strict=True)
    ]
    assert values == [3, 4, 0.5, 77]
    assert [word.value for word in packed.address_words] == [x.data_ptr()]
    assert packed.stream_word.value == 77
    assert all(pointer % 8 == 0 for pointer in packed.pointers[:-1])


def test_a_signature_survives_json(kernel):
    assert Signature.from_json(kernel.signature.to_json()).arguments == kernel.signature.arguments


@pytest.mark.parametrize(("values", "words"), [
    ((torch.zeros(5, 7),), "1 arguments, expected 2"),
    ((torch.zeros(5, 7), 1, 2), "3 arguments, expected 2"),
    ((torch.zeros(5, 7).double(), 1), "compiled for 2 dimensions of 32 bits"),
    ((torch.zeros(5), 1), "compiled for 2 dimensions of 32 bits"),
    ((torch.zeros(7, 5).t(), 1), "argument 0 has strides"),
    (([5, 7], 1), "3 arguments, expected 2"),
    ((5.0, 1), "argument 0 is float, expected a tensor"),
    ((torch.zeros(5, 7), 1 << 40), "numbers"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(values, words):
    signature = Signature([MATRIX, Argument("i32", ("i32",))])
    with pytest.raises(ValueError, match=words):
        signature.pack(values)


def test_sizes_that_are_compiled_in_are_checked():
    column = Argument("tensor", ("ptr", "i32", "i64"), 32, (None, 64), (None, 1))
    Signature([column]).pack([torch.zeros(3, 64)])
    with pytest.raises(ValueError, match=r"shape \(3, 65\)"):
        Signature([column]).pack([torch.zeros(3, 65)])


def test_the_lowered_type_decides(kernel):
    """A layout that differs from the packed one is an error, not a guess."""
    with pytest.raises(RuntimeError, match="the DSL lowered"):
        signature_of([None, ParamTable([(1, 2, 0)], 1)], "!llvm.func<i32 (struct<(ptr<1>, i32)>)>")
    with pytest.raises(RuntimeError, match="takes more than 1"):
        signature_of([ParamTable([(1, 2, 0)], 1)], "!llvm.func<i32 (array<3 x i64>, ptr)>")
    with pytest.raises(TypeError, match="an argument of type str"):
        signature_of(["x"], "!llvm.func<i32 (ptr)>")
