"""What tests of several files here share."""

from __future__ import annotations

import pytest

from tests.moe.mixed_space import CTAS


@pytest.fixture
def three_ctas(monkeypatch):
    """Of the grouped GEMM: each takes several tiles, of several experts."""
    monkeypatch.setattr("moe.launch.sms_of", lambda device: 3)


@pytest.fixture
def two_ctas(monkeypatch):
    """Of Hopper's grouped GEMM with weights of four bits: each takes many tiles."""
    monkeypatch.setattr("moe.mixed.launch.sms_of", lambda device: CTAS)
