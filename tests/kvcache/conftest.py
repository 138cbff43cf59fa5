"""What tests of several files here share."""

from __future__ import annotations

import pytest

from kernelkit.compile import compiler as kernel_compile
from kvcache.movement import launch as forward


@pytest.fixture
def no_launches(monkeypatch):
    """Nothing compiles, nothing is launched."""
    monkeypatch.setattr(kernel_compile, "_make", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(forward, "launch", lambda *_: pytest.fail("launched"))
