"""kernelkit.call.launch: the same kernel in the emulator, and natively with `--hw` on a Hopper
GPU."""

import ctypes
import gc
import json
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from kernelkit.call.launch import (
    PreparedLaunch,
    Target,
    choose_target,
    emulation,
    launch,
    watching,
)
from kernelkit.call.tape import Taping
from kernelkit.compile import compiler as kernel_compile
from lab.house.source import ROOT
from ptxemu.host.allocations import LIVE
from ptxemu.options import Options
from tests.kernelkit.recorded import Gpu, Recorded
from tests.kernelkit.scale_kernel import ARCHS, compile_scale, scale

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.hw)]


def matrix(device: str, rows: int = 5, columns: int = 260) -> torch.Tensor:
    return torch.randn(rows, columns, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_scale(device, monkeypatch):
    x = matrix(device)
    torch.testing.assert_close(scale(x, 2.5), 2.5 * x, rtol=0, atol=0)
    monkeypatch.setattr(kernel_compile, "_make", lambda *_: pytest.fail("compiled again"))
    wide = matrix(device, 3, 1024)[:, :640]  # other lengths and strides, the same compiled kernel
    torch.testing.assert_close(scale(wide, -1.0), -wide, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_misaligned(device):
    shifted = torch.zeros(4 * 64 + 1, device=device)[1:].view(4, 64)
    with pytest.raises(ValueError, match="not a multiple of 16 bytes"):
        scale(shifted, 1.0)


def at(prepared: PreparedLaunch, addresses: list[int], tensors: tuple = ()) -> None:
    for word, address in zip(prepared.words, addresses, strict=True):
        word.value = address
    prepared.launch(tensors)


@pytest.mark.parametrize("device", DEVICES)
def test_prepared(device):
    """Other tensors of the same sizes are passed by address alone."""
    target = choose_target(torch.device(device), "auto", None, ARCHS)
    x, y = matrix(device), matrix(device)
    prepared = PreparedLaunch(compile_scale(target.arch), (x, y, 2.5), target, x.device)
    for source in (matrix(device), x):
        result = torch.empty_like(y)
        at(prepared, [source.data_ptr(), result.data_ptr()], (source, result))
        assert torch.equal(result, 2.5 * source)


@pytest.mark.parametrize("device", DEVICES)
def test_launches_are_watched_and_repeated(device):
    """Two launches, the second of which reads what the first wrote; contents change."""
    target = choose_target(torch.device(device), "auto", None, ARCHS)
    x, y, z = matrix(device), matrix(device), matrix(device)
    compiled = compile_scale(target.arch)
    seen = []
    with watching(lambda *launched: seen.append(launched)):
        launch(compiled, (x, y, 2.0), target, x.device)
        launch(compiled, (y, z, -3.0), target, x.device)
    launch(compiled, (z, y, 0.0), target, x.device)  # this one is not watched
    assert torch.equal(z, -6.0 * x)
    with watching(lambda *_: None, launching=False):
        launch(compiled, (x, z, 0.0), target, x.device)
    assert z.any()
    given = [[(id(tensor), offset) for tensor, offset in addressed] for _, addressed in seen]
    assert given == [[(id(x), 0), (id(y), 0)], [(id(y), 0), (id(z), 0)]]
    for factor in (5.0, -0.5):
        x.mul_(factor)
        gc.collect()
        for prepared, addressed in seen:
            prepared.launch([tensor for tensor, _ in addressed])
        assert torch.equal(z, -6.0 * x)


WORD = ctypes.c_uint64
DESCRIPTION = WORD * 3  # address, sizes as two int32, stride of the rows


def recorded(first: type = WORD) -> Recorded:
    """A recorded launch of `scale`: x, y, factor, stream."""
    return Recorded(compile_scale("sm_90a"), (first, WORD, ctypes.c_float, WORD))


def prepare(compiled: Recorded, *tensors: torch.Tensor) -> PreparedLaunch:
    target = Target("cuda", "sm_90a")
    return PreparedLaunch(compiled, (*tensors, 2.5), target, torch.device("cuda", 0))


def test_a_recorded_launch_knows_its_memory(monkeypatch):
    """The launch does not search all objects of the process, which takes longer than many a
    launch."""

    def look() -> None:
        raise AssertionError("all that it touched is known")

    monkeypatch.setattr(LIVE, "look", look)
    x = torch.ones(3, 8)
    with emulation(Options(record=True)) as run:
        y = scale(x, 2.0)
    ((recording,),) = ([each.recording for each in report.launches] for report in run.reports)
    for tensor in (x, y):
        start = tensor.data_ptr()
        assert any(begin <= start < end for begin, end in recording.memory)


def test_what_a_prepared_native_launch_hands_over(monkeypatch):
    """Each call passes its addresses and stream, and the factor of the first one."""
    gpu, compiled, x, y = Gpu(monkeypatch), recorded(), matrix("cpu"), matrix("cpu")
    prepared = prepare(compiled, x, y)
    gc.collect()
    junk = [ctypes.c_float(7.0) for _ in range(1000)]
    for gpu.stream, addresses in ((1234, [x.data_ptr(), y.data_ptr()]), (77, [4096, 8192])):
        at(prepared, addresses)
    assert compiled.calls == [[x.data_ptr(), y.data_ptr(), 2.5, 1234], [4096, 8192, 2.5, 77]]
    assert len(junk) == 1000


def test_a_prepared_launch_goes_to_its_device(monkeypatch):
    gpu, compiled, x, y = Gpu(monkeypatch), recorded(), matrix("cpu"), matrix("cpu")
    prepared = prepare(compiled, x, y)
    gpu.entered.clear()
    at(prepared, [0, 0])
    assert gpu.entered == []
    gpu.index = 1
    at(prepared, [0, 0])
    assert gpu.entered == [0]
    assert len(compiled.calls) == 2


def test_a_tape_makes_its_gpu_the_current_one(monkeypatch):
    """The device is set once, for all launches of a tape."""
    gpu, compiled, x = Gpu(monkeypatch), recorded(), matrix("cpu")

    def call() -> tuple[torch.Tensor, ...]:
        made = [torch.empty_like(x) for _ in range(2)]
        for y in made:
            launch(compiled, (x, y, 2.5), Target("cuda", "sm_90a"), torch.device("cuda", 1))
        return tuple(made)

    _, tape = Taping([x]).run(call)
    tape.gpu = 1
    for gpu.index, entered in ((1, []), (0, [1])):
        gpu.entered.clear()
        addresses = [y.data_ptr() for y in tape.repeat([x])]
        assert gpu.entered == entered
        assert gpu.index == 1
        assert [called[:2] for called in compiled.calls[-2:]] == [
            [x.data_ptr(), y] for y in addresses
        ]


def test_a_launch_that_fails_raises(monkeypatch):
    Gpu(monkeypatch)
    compiled, x, y = recorded(), matrix("cpu"), matrix("cpu")
    prepared = prepare(compiled, x, y)
    compiled.code = 701
    with pytest.raises(RuntimeError, match="cudaErrorLaunchOutOfResources"):
        at(prepared, [0, 0])


def test_a_prepared_native_launch_keeps_its_kernel(monkeypatch):
    """Without a reference its code would be unloaded when others release the kernel."""
    Gpu(monkeypatch)
    compiled = recorded()
    alive = weakref.ref(compiled)
    prepared = prepare(compiled, matrix("cpu"), matrix("cpu"))
    del compiled
    gc.collect()
    assert alive() is not None
    at(prepared, [0, 0])


def test_a_prepared_native_launch_keeps_no_memory(monkeypatch):
    """A cache may be tens of gigabytes: only its description is kept, and stays right."""
    Gpu(monkeypatch)
    compiled, memory = recorded(DESCRIPTION), np.zeros((5, 260), np.float32)
    alive, x = weakref.ref(memory), torch.from_numpy(memory)[:, :256]
    prepared = prepare(compiled, x, matrix("cpu"))
    del memory, x
    gc.collect()
    assert alive() is None
    junk = [prepare(recorded(), matrix("cpu", 3, 64), matrix("cpu")) for _ in range(20)]
    at(prepared, [4096, 8192])
    assert compiled.calls[0][0] == [4096, 256 << 32 | 5, 260]
    assert len(junk) == 20


@pytest.fixture(params=["at once", "prepared"])
def native(request):
    """Return (x, y, a function that launches y = 2 x on the current stream)."""
    target = choose_target(torch.device("cuda"), "auto", None, ARCHS)
    x, y = matrix("cuda", 4096, 1024), matrix("cuda", 4096, 1024)
    given = compile_scale(target.arch), (x, y, 2.0), target, x.device
    launch(*given)  # compiles, and loads the kernel
    torch.cuda.synchronize()
    if request.param == "at once":
        return x, y, lambda: launch(*given)
    prepared = PreparedLaunch(*given)
    return x, y, lambda: at(prepared, [x.data_ptr(), y.data_ptr()])


@pytest.mark.hw
def test_native_follows_the_current_stream(native):
    """The launch is ordered after what its stream did before, and leaves other streams alone."""
    (x, y, call), side = native, torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(500_000_000)  # longer than other tests keep this one from the CPU
        x.fill_(3.0)
        call()
        assert not side.query(), "the launch waited for its stream, or went to another"
    side.synchronize()
    assert torch.equal(y, torch.full_like(y, 6.0))


@pytest.mark.hw
def test_native_is_captured_in_a_graph(native):
    """The launch is captured on the capture's stream, and replayed with new contents."""
    x, y, call = native
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    x.fill_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.ones_like(y))


SCRIPT = """
import torch
from gqa_lowlatency import decode, merge
q, (k, v) = torch.randn(1, 2, 64, device="cuda"), torch.randn(2, 1, 33, 2, 64, device="cuda")
o, lse = decode(q.bfloat16(), k.bfloat16(), v.bfloat16(), return_lse=True)
again, _ = merge([(o.unsqueeze(1), lse.unsqueeze(-1))])
assert torch.equal(again[:, 0], o)
"""


def test_a_script_for_a_gpu_runs_in_the_emulator(tmp_path):
    """`python -m ptxemu` redirects native launches to the emulator."""
    script, report = tmp_path / "script.py", tmp_path / "report.json"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ptxemu", "--report", report, script]
    before = os.environ.get("PYTHONPATH")
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), before]))}
    done = subprocess.run(command, cwd=ROOT, env=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    entries = [launch["entry"] for launch in json.loads(report.read_text())["launches"]]
    assert [entry.partition("_sm")[0] for entry in entries] == ["gqa_decode", "fmha_merge"]
