"""What tests of several files here share."""

from __future__ import annotations

import ctypes

import pytest
import torch

from gqa_lowlatency import direct, forward
from kernelkit.launch import Target
from tests.kernelkit.recorded import Gpu, Recorded


@pytest.fixture
def poisoned_outputs():
    """torch.empty returns NaN, so that what the kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def launched(monkeypatch):
    """What plans and steps would launch on a GPU of compute capability 9.0, one for each of them.

    kinds: addresses of tensors and tables, numbers, the stream.
    """
    made, word = [], ctypes.c_uint64
    numbers = [*[ctypes.c_float] * 2, *[ctypes.c_int32] * 3]

    def compile_for(config, arch):
        tables = config.lens + config.sinks + config.k_scale + config.v_scale + 2 * config.parts
        kinds = [*[word] * (5 + tables), *numbers, word]
        made.append(Recorded(forward.compile_for(config, arch), kinds))
        return made[-1]

    monkeypatch.setattr(forward, "choose_target", lambda *_: Target("cuda", "sm_90a"))
    monkeypatch.setattr(forward, "clusters_at_once", lambda device, width: 132 // width)
    monkeypatch.setattr(direct, "compile_for", compile_for)
    Gpu(monkeypatch)
    return made
