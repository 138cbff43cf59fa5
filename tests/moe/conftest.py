"""What tests of several files here share."""

from __future__ import annotations

import pytest


@pytest.fixture
def three_ctas(monkeypatch):
    """Of the grouped GEMM: each takes several tiles, of several experts."""
    monkeypatch.setattr("moe.launch.sms_of", lambda device: 3)
