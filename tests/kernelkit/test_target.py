"""Where a kernel runs is decided by device, wish and what it is written for; never silently."""

from __future__ import annotations

import pytest
import torch

from kernelkit import launch
from kernelkit.launch import Target, choose_target
from kernelkit.tensors import with_plain_strides

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch):
    def pretend(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, minor))

    return pretend


def test_cpu_tensors_are_emulated():
    for backend in ("auto", "emulate"):
        assert choose_target(CPU, backend, None, ("sm_100a",)) == Target("emulate", "sm_100a")


def test_the_emulator_runs_hopper_kernels_on_wish_or_where_there_is_no_other():
    both = ("sm_90a", "sm_100a")
    assert choose_target(CPU, "auto", None, both) == Target("emulate", "sm_100a")
    assert choose_target(CPU, "auto", "sm_90a", both) == Target("emulate", "sm_90a")
    assert choose_target(CPU, "emulate", None, ("sm_90a",)) == Target("emulate", "sm_90a")
    with pytest.raises(NotImplementedError, match="the emulator runs"):
        choose_target(CPU, "auto", None, ("sm_120a",))


def test_blackwell_and_hopper_run_natively(capability):
    both = ("sm_100a", "sm_90a")
    capability(10)
    assert choose_target(GPU, "auto", None, both) == Target("cuda", "sm_100a")
    capability(10, 3)
    assert choose_target(GPU, "auto", None, both) == Target("cuda", "sm_103a")
    capability(9)
    assert choose_target(GPU, "cuda", "sm_90a", both) == Target("cuda", "sm_90a")


REFUSED = [  # device, its compute capability, (backend, arch), error, words
    (GPU, 10, ("emulate", None), ValueError, "cuda:0"),
    (GPU, 9, ("auto", None), NotImplementedError, "9.0"),
    (GPU, 8, ("auto", None), NotImplementedError, "8.0"),
    (GPU, 11, ("auto", None), NotImplementedError, "11.0"),
    (GPU, 12, ("auto", None), NotImplementedError, "12.0"),
]


@pytest.mark.parametrize(("device", "major", "wish", "error", "words"), REFUSED)
def test_what_cannot_run_says_why(capability, device, major, wish, error, words):
    capability(major)
    with pytest.raises(error) as raised:
        choose_target(device, *wish, ("sm_100a",))
    assert words in str(raised.value)


def test_an_arch_of_another_gpu_is_refused(capability):
    capability(9)
    with pytest.raises(ValueError, match="does not run on cuda:0"):
        choose_target(GPU, "auto", "sm_100a", ("sm_100a", "sm_90a"))


def test_emulations_nest():
    with launch.emulation("outer") as outer:
        with launch.emulation("inner") as inner:
            assert launch._emulation.get() is inner
        assert launch._emulation.get() is outer
    assert launch._emulation.get() is None


def test_strides_of_single_elements_become_harmless():
    odd = torch.zeros(100).as_strided((1, 3, 1, 8), (7, 16, 3, 1))
    plain = with_plain_strides(odd)
    assert plain.stride() == (8, 16, 8, 1)
    assert plain.data_ptr() == odd.data_ptr()
