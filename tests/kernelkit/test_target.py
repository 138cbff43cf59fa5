"""Device, request and the kernel's architectures decide where a kernel runs; never silently."""

from __future__ import annotations

import pytest
import torch

from kernelkit.call import launch
from kernelkit.call.launch import Target, choose_target
from kernelkit.call.tensors import has_whole_rows, with_plain_strides

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch):
    def pretend(major: int, minor: int = 0) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (major, minor))

    return pretend


BOTH = ("sm_90a", "sm_100a")
PORTABLE = (*BOTH, "sm_80")
CHOSEN = [  # device, its compute capability, (backend, arch), archs of the kernel, target
    (CPU, (0,), ("auto", None), ("sm_100a",), Target("emulate", "sm_100a")),
    (CPU, (0,), ("emulate", None), ("sm_100a",), Target("emulate", "sm_100a")),
    (CPU, (0,), ("auto", None), BOTH, Target("emulate", "sm_100a")),
    (CPU, (0,), ("auto", "sm_90a"), BOTH, Target("emulate", "sm_90a")),
    (CPU, (0,), ("emulate", None), ("sm_90a",), Target("emulate", "sm_90a")),
    (GPU, (10,), ("auto", None), BOTH, Target("cuda", "sm_100a")),
    (GPU, (10, 3), ("auto", None), BOTH, Target("cuda", "sm_103a")),
    (GPU, (9,), ("cuda", "sm_90a"), BOTH, Target("cuda", "sm_90a")),
    (GPU, (8, 9), ("auto", None), PORTABLE, Target("cuda", "sm_89")),
    (GPU, (12,), ("auto", None), PORTABLE, Target("cuda", "sm_120a")),
    (CPU, (0,), ("auto", "sm_121a"), PORTABLE, Target("emulate", "sm_121a")),
    (CPU, (0,), ("auto", None), PORTABLE[2:], Target("emulate", "sm_80")),
]


@pytest.mark.parametrize(("device", "version", "wish", "archs", "target"), CHOSEN)
def test_device_and_wish_choose(capability, device, version, wish, archs, target):
    """The emulator runs Hopper kernels on request, or if there is no other kernel."""
    capability(*version)
    assert choose_target(device, *wish, archs) == target


BLACKWELL = ("sm_100a",)
REFUSED = [  # the same columns, then error and message
    (CPU, 0, ("gpu", None), BOTH, ValueError, "backend 'gpu'"),
    (CPU, 0, ("cuda", None), BOTH, ValueError, "needs CUDA tensors"),
    (CPU, 0, ("auto", "sm_80"), BOTH, NotImplementedError, "arch 'sm_80'"),
    (torch.device("meta"), 0, ("auto", None), BOTH, NotImplementedError, "device meta"),
    (GPU, 10, ("emulate", None), BLACKWELL, ValueError, "cuda:0"),
    (GPU, 9, ("auto", None), BLACKWELL, NotImplementedError, "9.0"),
    (GPU, 8, ("auto", None), BLACKWELL, NotImplementedError, "8.0"),
    (GPU, 11, ("auto", None), BLACKWELL, NotImplementedError, "11.0"),
    (GPU, 12, ("auto", None), BLACKWELL, NotImplementedError, "12.0"),
    (GPU, 9, ("auto", "sm_100a"), BOTH, ValueError, "does not run on cuda:0"),
]


@pytest.mark.parametrize(("device", "major", "wish", "archs", "error", "words"), REFUSED)
def test_what_cannot_run_says_why(capability, device, major, wish, archs, error, words):
    capability(major)
    with pytest.raises(error) as raised:
        choose_target(device, *wish, archs)
    assert words in str(raised.value)


def test_emulations_nest():
    with launch.emulation("outer") as outer:
        with launch.emulation("inner") as inner:
            assert launch._emulation.get() is inner
        assert launch._emulation.get() is outer
    assert launch._emulation.get() is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3), torch.zeros(3, 4), torch.zeros(3, 4, 2)[:2], torch.zeros(3, 4, 2)[:, :3],
        torch.zeros(3, 4, 2)[:, :, :1], torch.zeros(4, 3).T, torch.zeros(3, 1, 8)[..., :4],
        torch.zeros(3, 4, 2).transpose(1, 2), torch.zeros(1, 8).expand(3, 8), torch.zeros(3, 0, 2),
        torch.zeros(3, 1).expand(3, 4), torch.zeros(64).as_strided((3, 1, 2), (2, 9, 1)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)  # fmt: skip
def test_rows_in_one_piece(tensor):
    assert has_whole_rows(tensor) is tensor[0].is_contiguous()


def test_strides_of_single_elements_become_harmless():
    odd = torch.zeros(100).as_strided((1, 3, 1, 8), (7, 16, 3, 1))
    plain = with_plain_strides(odd)
    assert plain.stride() == (8, 16, 8, 1)
    assert plain.data_ptr() == odd.data_ptr()
    assert with_plain_strides(plain) is plain
