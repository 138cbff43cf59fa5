"""What the DSL accepts and means differently: the rules of kernelkit/README.md, of this version."""

import cutlass.cute as cute
import pytest
import torch
from cutlass import BFloat16, Float16, Float32, Float64, Int32, Int64, Uint32
from cutlass.cute.runtime import from_dlpack

from lab.house.source import ROOT
from ptxemu.host.emulator import Emulator
from ptxemu.host.gpu_machine import machine_with_gpu

SEEN: dict[str, object] = {}  # types while tracing


@pytest.fixture(autouse=True)
def emulated():
    with machine_with_gpu(Emulator()):
        yield


@cute.kernel
def arithmetic(y: cute.Tensor, a: Int32, b: Int32, x: Float32, n: Int64):
    y[0] = a // b
    y[1] = a % b
    p = a < 0
    y[2] = Int32(p + p + p)
    half, brain = x.to(Float16), x.to(BFloat16)
    SEEN["mixed"] = [(half + brain).dtype, (brain + half).dtype, (n * x).dtype]


@cute.jit
def named_unsigned(a: Uint32):
    SEEN["inner"] = type(a)


@cute.jit
def of_numbers(y: cute.Tensor, a: Int32, b: Int32, x: Float32, n: Int64, u: Uint32):
    SEEN["outer"] = type(u)
    named_unsigned(5)
    arithmetic(y, a, b, x, n).launch(grid=(1, 1, 1), block=(1, 1, 1))


def test_numbers():
    y = torch.zeros(3, dtype=torch.int32, device="cuda")
    of_numbers(from_dlpack(y), -7, 2, 1.5, 3, 5)
    assert y.tolist() == [-4, -1, 1]
    wanted = {"mixed": [Float16, Float16, Float64], "outer": Int32, "inner": int}
    assert wanted == SEEN


@cute.kernel
def first_of_second_row(x: cute.Tensor, y: cute.Tensor):
    y[0] = x[1, 2]


@cute.jit
def of_a_matrix(x: cute.Tensor, y: cute.Tensor):
    first_of_second_row(x, y).launch(grid=(1, 1, 1), block=(1, 1, 1))


def dynamic(x: torch.Tensor) -> cute.Tensor:
    return from_dlpack(x).mark_layout_dynamic()


ROWS = torch.arange(12, dtype=torch.float32).view(3, 4)  # [1, 2] is 6
COLUMNS = torch.arange(12, dtype=torch.float32).view(4, 3).t()  # [1, 2] is 7
BROADCAST = torch.arange(3, dtype=torch.float32)[:, None].expand(3, 4)


@pytest.mark.parametrize(("example", "given", "found"), [
    (ROWS, COLUMNS, 5.0),  # 1 x 3 + 2 x 1: the last stride stayed 1
    (BROADCAST, ROWS, 1.0),  # 1 x 1 + 2 x 0: both stayed
    (ROWS, ROWS.int() * 0 + 1, torch.ones(1, dtype=torch.int32).view(torch.float32).item()),
])  # fmt: skip
def test_a_compiled_function_takes_other_tensors(example, given, found):
    y = torch.zeros(1, device="cuda")
    compiled = cute.compile(of_a_matrix, dynamic(example), from_dlpack(y))
    compiled(dynamic(given), from_dlpack(y))
    assert y.item() == found


@cute.kernel
def printing(a: Int32):
    cute.printf("{} {:5d} {{}} %3d\n", a, a, a)


@cute.jit
def of_printing(a: Int32):
    printing(a).launch(grid=(1, 1, 1), block=(1, 1, 1))


def test_printf_knows_no_formats_of_python(capfd):
    of_printing(42)
    assert "42 {:5d} {42}  42" in capfd.readouterr().out


def test_the_page_has_them():
    page = (ROOT / "kernelkit" / "README.md").read_text(encoding="utf-8")
    for words in ("-7 // 2 is -4, -7 % 2 is -1", "True + True + True is 1", "prints `{:5d}`"):
        assert words in page
