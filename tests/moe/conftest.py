"""What tests of several files here share."""

from __future__ import annotations

import pytest
import torch

from kernelkit import compile as kernel_compile


@pytest.fixture
def poison():
    """torch.empty hands out NaN and large integers: what no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def no_compiles(monkeypatch):
    monkeypatch.setattr(kernel_compile, "_make", lambda *_: pytest.fail("compiled"))


@pytest.fixture
def three_ctas(monkeypatch):
    """Of the grouped GEMM: each takes several tiles, of several experts."""
    monkeypatch.setattr("moe.launch.sms_of", lambda device: 3)
