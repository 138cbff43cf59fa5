"""Triton's driver replaced: arguments, launches and autotuning with objects that stand in for it.

Tests of Triton itself run where it is installed; CI does not install it.
"""

from __future__ import annotations

import importlib.util
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ptxemu
import ptxemu.triton
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.host import gpus, triton_driver
from ptxemu.host.gpus import GPUS
from ptxemu.host.triton_arguments import Value, flat_values, packed
from ptxemu.host.triton_driver import Driver
from ptxemu.machine.im2col import PixelBox
from ptxemu.machine.tensor_map import decode
from tests.ptxemu.kernels import kernel

INSTALLED = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not INSTALLED, reason="Triton is not installed")


@pytest.mark.parametrize(
    ("kind", "given", "size", "raw"),
    [
        ("*fp32", None, 8, bytes(8)),
        ("*kfp16", 0x1234, 8, struct.pack("<Q", 0x1234)),
        ("i1", True, 1, b"\1"),
        ("i1", True, 4, b"\1\0\0\0"),
        ("i32", -2, 4, struct.pack("<i", -2)),
        ("u32", 2**32 - 1, 4, b"\xff" * 4),
        ("i64", -1, 8, b"\xff" * 8),
        ("fp32", 1.5, 4, struct.pack("<f", 1.5)),
        ("fp16", 1.5, 2, struct.pack("<e", 1.5)),
        ("bf16", 1.5, 2, struct.pack("<f", 1.5)[2:]),
        ("fp64", 0.1, 8, struct.pack("<d", 0.1)),
    ],
)
def test_bytes_of_arguments(kind, given, size, raw):
    assert packed(Value(kind, given), size) == raw


def test_arguments_that_do_not_fit_are_refused():
    with pytest.raises(OverflowError, match="4294967296"):
        packed(Value("i32", 1 << 32), 4)
    with pytest.raises(TypeError, match="has 8 bytes; the kernel takes 4"):
        packed(Value("*fp32", 0), 4)
    with pytest.raises(TypeError, match="str"):
        packed(Value("*fp32", "x"), 8)
    with pytest.raises(UnsupportedPtx, match="i4x"):
        packed(Value("i4x", 0), 8)


def descriptor(**more):
    base = torch.zeros(64, 32, dtype=torch.float16)
    return SimpleNamespace(base=base, shape=[64, 32], strides=[32, 1], padding="zero", **more)


def test_constants_and_nested_tuples():
    types = ["*fp32", "constexpr", ("i32", ("i64", "constexpr")), "fp32"]
    values = [*flat_values(types, [1, 2, (3, (4, 5)), 6.0], None)]
    assert values == [("*fp32", 1), ("i32", 3), ("i64", 4), ("fp32", 6.0)]


def test_a_descriptor_without_tma_is_its_parts():
    given = descriptor()
    kinds = [kind for kind, _ in flat_values(["tensordesc<fp16[16, 32]>"], [given], None)]
    assert kinds == ["*", "i64", "i64", "i64", "i64", "i1", "i1", "i32", "i32", "i64", "i64"]


def test_a_descriptor_with_tma_is_a_map():
    given = descriptor()
    layout = {"swizzle": 2, "elem_size": 2, "elem_type": 6, "block_size": [16, 32],
              "fp4_padded": False}  # fmt: skip
    first, *rest = flat_values(["tensordesc<fp16[16, 32]>"], [given], [layout])
    assert rest == [("i32", 64), ("i32", 32), ("i64", 32), ("i64", 1)]
    found = decode(packed(first, 128))
    assert (found.address, found.dims, found.box) == (given.base.data_ptr(), (32, 64), (32, 16))
    assert found.strides == (64,)


def test_a_descriptor_in_im2col_mode():
    """Sequences of Gluon are N, H, W, C; those of a map are in the other order."""
    base = torch.zeros(2, 16, 8, 32, dtype=torch.float16)
    given = SimpleNamespace(
        base=base, shape=[*base.shape], strides=[*base.stride()], padding="nan",
        element_strides=[1, 2, 1, 1], pixel_box_lower_corner=[-1, 0],
        pixel_box_upper_corner=[3, -2],
    )  # fmt: skip
    layout = {"swizzle": 2, "elem_size": 2, "elem_type": 6, "block_size": [64, 32],
              "fp4_padded": False, "is_im2col": True}  # fmt: skip
    found = decode(packed(next(flat_values(["tensordesc<x>"], [given], [layout])), 128))
    assert (found.dims, found.box, found.nan_fill) == ((32, 8, 16, 2), (32, 64), True)
    assert found.pixels == PixelBox((0, -1), (-2, 3), (1, 2))
    given.element_strides[0] = 2
    with pytest.raises(UnsupportedPtx, match="element stride 2"):
        next(flat_values(["tensordesc<x>"], [given], [layout]))


ADD = kernel(
    "ld.param.u64 %rd1, [d];\nld.param.u32 %r1, [n];\nred.global.add.u32 [%rd1], %r1;",
    ".param .u64 d, .param .u32 n, .param .u64 global_scratch, .param .u64 profile_scratch",
)


def launched(driver, grid, args, hooks=(None, None), **changes):
    """Launch as `CompiledKernel.run` does."""
    none = dict.fromkeys("global_scratch_size profile_scratch_size launch_pdl".split(), 0)
    plain = {"num_warps": 2, "num_ctas": 1, "shared": 64, **none}
    source = SimpleNamespace(signature={"d": "*i32", "N": "constexpr", "n": "i32"})
    run = driver.launcher_cls(source, SimpleNamespace(**plain | changes))
    name = ptxemu.load(ADD).entries[0]
    _, function, registers, *_ = driver.utils.load_binary(name, ADD.encode(), 64, 0)
    assert registers == 64
    run(*grid, 0, function, (2, 1, 64), "data", *hooks, *args)


def test_launches_become_requests():
    requests, told = [], []
    driver = Driver(requests.append)
    hooks = (lambda data: told.append(("enter", data)), lambda data: told.append(("exit", data)))
    launched(driver, (3, 2, 1), (16, "constant", 5), hooks)
    launched(driver, (3, 2, 1), (16, "constant", 5), num_ctas=16, launch_pdl=True)
    launched(driver, (3, 0, 1), (16, "constant", 5))
    plain, clusters = requests
    assert (plain.grid, plain.block, plain.cluster) == ((3, 2, 1), (64, 1, 1), None)
    assert (plain.smem_bytes, plain.attributes.pdl, plain.non_portable) == (64, False, False)
    assert plain.params == (struct.pack("<Q", 16), struct.pack("<i", 5), bytes(8), bytes(8))
    assert (clusters.grid, clusters.cluster) == ((48, 2, 1), (16, 1, 1))
    assert clusters.attributes.pdl
    assert clusters.non_portable
    assert told == [("enter", "data"), ("exit", "data")]


def test_a_version_with_other_parameters_is_refused():
    source = SimpleNamespace(signature={"d": "*i32"})
    run = Driver(print).launcher_cls(source, SimpleNamespace(num_warps=1, shared=0))
    function = triton_driver.Function(ADD, ptxemu.load(ADD).entries[0])
    with pytest.raises(HardwareRefusal, match="3 arguments for"):
        run(1, 1, 1, 0, function, (1, 1, 0), None, None, None, 16)


def test_the_driver_describes_the_gpu():
    with gpus.seeming(GPUS["l40s"]):
        properties = Driver().utils.get_device_properties(0)
        assert (properties["multiprocessor_count"], properties["max_shared_mem"]) == (142, 101376)
        assert Driver().get_device_capability() == (8, 9)


def test_without_triton_the_door_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install triton"):
        ptxemu.triton.launch(None, (1,))


class Autotuned:
    """What `_choose` needs of an Autotuner: configurations of which the first is too large."""

    def __init__(self):
        self.configs = [SimpleNamespace(n=n, all_kwargs=dict, pre_hook=None) for n in "ab"]
        self.nargs, self.compiled = {}, []
        self.fn = SimpleNamespace(run=self.compile)

    def compile(self, **options):
        assert options == {"warmup": True}
        self.compiled.append(1)
        return SimpleNamespace(_init_handles=self.load)

    def load(self):
        if len(self.compiled) == 1:
            raise TooLarge


class TooLarge(Exception):
    pass


@pytest.fixture
def errors(monkeypatch):
    found = SimpleNamespace(OutOfResources=TooLarge, CompileTimeAssertionFailure=TooLarge)
    monkeypatch.setattr(triton_driver, "import_module", lambda name: found)


@pytest.mark.usefixtures("errors")
def test_the_first_configuration_that_fits_is_taken():
    tuner = Autotuned()
    times = [triton_driver._choose(tuner, config=config)[0] for config in tuner.configs * 2]
    assert times == [float("inf"), 1.0, 2.0, 2.0]
    assert len(tuner.compiled) == 2


@pytest.mark.usefixtures("errors")
def test_a_configuration_can_be_chosen(monkeypatch):
    tuner = Autotuned()
    monkeypatch.setenv(triton_driver.CONFIG_VARIABLE, "1")
    assert [triton_driver._choose(tuner, config=c)[0] for c in tuner.configs] == [2.0, 1.0]
    monkeypatch.setenv(triton_driver.CONFIG_VARIABLE, "2")
    with pytest.raises(ValueError, match="must be 0 to 1"):
        triton_driver._choose(tuner, config=tuner.configs[0])
    assert not tuner.compiled


def test_benchmarks_answer_in_the_shape_that_was_asked_for():
    assert triton_driver._benchmark(None) == 1.0
    assert triton_driver._benchmark(None, quantiles=[0.5, 0.2]) == [1.0, 1.0]
    assert triton_driver._benchmark(None, return_mode="all") == [1.0]


# -- with Triton ----------------------------------------------------------------------------------

SCRIPT = """
import sys, torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = triton.runtime.driver.active.get_active_torch_device()
triton.set_allocator(lambda size, align, _: torch.empty(size, dtype=torch.int8, device="cuda"))


@triton.autotune([triton.Config({"BLOCK": b}, num_warps=2) for b in (128, 256)], key=["n"])
@triton.jit
def add(x, y, z, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(z + at, tl.load(x + at, at < n) + tl.load(y + at, at < n), at < n)


@triton.jit
def copy(source, into, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(into + at, source.load([0, 0]))


@triton.jit
def copy_back(source, into, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    target = tl.make_tensor_descriptor(into, [ROWS, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    target.store([0, 0], source.load([0, 0]))


x, y = torch.rand(2, 1000, device=DEVICE)
z = torch.empty_like(x)
add[lambda meta: (triton.cdiv(1000, meta["BLOCK"]),)](x, y, z, 1000)
assert torch.equal(z, x + y)
a, b = torch.rand(2, 32, 64, device=DEVICE)
kernel = copy[(1,)](TensorDescriptor.from_tensor(a, [32, 64]), b, 32, 64)
assert torch.equal(a, b)
if "descriptors" in sys.argv:
    b.zero_()
    copy_back[(1,)](TensorDescriptor.from_tensor(a, [32, 64]), b, 32, 64)
    assert torch.equal(a, b)
assert ".target sm_" in kernel.asm["ptx"]
assert triton.testing.do_bench(lambda: 1 / 0) == 1
print(add.best_config.kwargs["BLOCK"])
"""


@needs_triton
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "rtx-5090"])
def test_a_script_runs_as_it_is(gpu, tmp_path, capsys, monkeypatch):
    from ptxemu.commands import run

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert run.main(["--gpu", gpu, str(path)]) == 0
    told = capsys.readouterr()
    assert told.out == "128\n"
    assert "ptxemu: 2 kernels launched" in told.err


@needs_triton
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_descriptors_made_on_the_device(gpu, tmp_path, monkeypatch):
    from ptxemu.commands import run

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert run.main(["--gpu", gpu, str(path), "descriptors"]) == 0


@needs_triton
def test_a_kernel_runs_on_arrays_of_numpy(tmp_path, monkeypatch):
    import triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "doubled.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
        "def doubled(x, N: tl.constexpr):\n"
        "    at = tl.arange(0, N)\n    tl.store(x + at, 2 * tl.load(x + at))\n"
    )
    spec = importlib.util.spec_from_file_location("doubled", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = np.arange(96, dtype=np.float32)
    before = triton.runtime.driver._active
    report = ptxemu.triton.launch(
        module.doubled, (1,), x[:64], N=64, num_warps=2, check=True, gpu="h100"
    )
    assert x.tolist() == [2 * i for i in range(64)] + [*range(64, 96)]
    assert not report.findings
    report = ptxemu.triton.launch(
        module.doubled, (1,), x[:64].copy(), N=128, num_warps=1, check=True
    )
    assert {finding.check for finding in report.errors} == {"out-of-bounds"}
    assert triton.runtime.driver._active is before
    with pytest.raises(ValueError, match="not contiguous"):
        ptxemu.triton.launch(module.doubled, (1,), x[::2], N=32)
