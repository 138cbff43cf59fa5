"""Choice of the place where commands run their kernels: the local GPU, or the emulator."""

from __future__ import annotations

import argparse

import pytest
import torch

from kernelkit.compile.arch import PORTABLE
from lab.flags import moe
from lab.tools.groups import ARCHS
from lab.tools.place import choose_place


@pytest.fixture
def place(monkeypatch):
    """Return the choice on a machine with a GPU of this capability, or without one."""

    def chosen(backend, arch, *, check=False, capability=None, archs=ARCHS):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        asked = {"backend": backend, "arch": arch, "check": check}
        found = choose_place(argparse.Namespace(**asked, strict=False, check_json=None), archs)
        return found.backend, found.arch

    return chosen


HERE = [  # (backend, arch), checked, capability of the GPU -> (backend, arch)
    (("auto", None), False, None, ("emulate", "sm_100a")),
    (("auto", "sm_90a"), False, None, ("emulate", "sm_90a")),
    (("auto", None), False, (9, 0), ("cuda", "sm_90a")),
    (("auto", "sm_90a"), False, (9, 0), ("cuda", "sm_90a")),
    (("auto", "sm_100a"), False, (9, 0), ("emulate", "sm_100a")),
    (("auto", "sm_100a"), False, (10, 3), ("cuda", "sm_103a")),
    (("auto", None), True, (9, 0), ("emulate", "sm_100a")),
    (("auto", "sm_89"), False, (9, 0), ("emulate", "sm_89")),
    (("auto", None), False, (8, 0), ("emulate", "sm_100a")),
    (("emulate", None), False, (10, 0), ("emulate", "sm_100a")),
]


@pytest.mark.parametrize(("asked", "check", "capability", "expected"), HERE)
def test_where_it_runs(place, asked, check, capability, expected):
    assert place(*asked, check=check, capability=capability) == expected


def test_kernels_of_one_architecture_run_on_its_gpus_alone(place):
    found = [place("auto", None, capability=c, archs=moe.ARCHS) for c in ((9, 0), (10, 0), (10, 3))]
    assert found == [("emulate", "sm_100a"), ("cuda", "sm_100a"), ("cuda", "sm_103a")]


def test_kernels_on_mma_sync_are_each_of_one_gpu(place):
    archs = (*ARCHS, PORTABLE)
    assert place("auto", None, capability=(8, 9), archs=archs) == ("cuda", "sm_89")
    assert place("auto", "sm_89", capability=(8, 9), archs=archs) == ("cuda", "sm_89")
    assert place("auto", "sm_80", capability=(8, 9), archs=archs) == ("emulate", "sm_80")
    assert place("auto", "sm_90a", capability=(12, 0), archs=archs) == ("emulate", "sm_90a")
    assert place("cuda", None, capability=(12, 1), archs=archs) == ("cuda", "sm_121a")
    with pytest.raises(ValueError, match=r"9\.0 or 10\.x or 8\.x or 12\.x here"):
        place("cuda", None, archs=archs)


def test_where_it_does_not_run(place):
    with pytest.raises(ValueError, match=r"no GPU of compute capability 9\.0 or 10\.x here"):
        place("cuda", None)
    with pytest.raises(ValueError, match=r"no GPU of compute capability 10\.x here"):
        place("cuda", None, capability=(9, 0), archs=moe.ARCHS)
    with pytest.raises(ValueError, match="the checker is the emulator's"):
        place("cuda", None, check=True, capability=(9, 0))
