"""Fixtures that several test files here share."""

from __future__ import annotations

import sys

import pytest

import moe.mixed.few.launch
import moe.mixed.launch
import moe.quantiser.launch
import moe.routing.launch
import moe.routing.linear_launch
from kernelkit.call.launch import Target, launch
from kernelkit.compile import compiler as kernel_compile
from tests.moe.mixed_space import CTAS


@pytest.fixture
def three_ctas(monkeypatch):
    """Run the grouped GEMM on three CTAs: each has several tiles, of several experts."""
    monkeypatch.setattr("moe.launch.sms_of", lambda device: 3)


@pytest.fixture
def two_ctas(monkeypatch):
    """Run products with arranged weights on two CTAs: each has many tiles."""
    for name in ("moe.mixed.launch", "moe.mixed.few.launch"):
        monkeypatch.setattr(f"{name}.sms_of", lambda device: CTAS)


@pytest.fixture
def launches(monkeypatch):
    """Arguments of launches on a simulated GPU of compute capability 10.0."""
    seen = []
    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setattr(kernel_compile, "_make", lambda config, arch, source: source)
    for name, module in tuple(sys.modules.items()):
        if name.startswith("moe.") and getattr(module, "launch", None) is launch:
            monkeypatch.setattr(module, "launch", lambda *launched: seen.append(launched))
        if name.startswith("moe.") and hasattr(module, "choose_target"):
            monkeypatch.setattr(module, "choose_target", lambda *_: Target("cuda", "sm_100a"))
    routing = moe.routing.launch, moe.routing.linear_launch
    for module in (moe.mixed.launch, moe.quantiser.launch, *routing):
        # A fake tensor has no address.
        monkeypatch.setattr(module, "require_tma", lambda name, tensor: None)
    return seen
