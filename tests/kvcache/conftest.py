"""Fixtures that several test files here share."""

from __future__ import annotations

import pytest

from kernelkit.compile import compiler as kernel_compile
from kvcache.movement import launch as forward


@pytest.fixture
def no_launches(monkeypatch):
    """Fail if anything is compiled or launched."""
    monkeypatch.setattr(kernel_compile, "_make", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(forward, "launch", lambda *_: pytest.fail("launched"))
