"""A GPU with room for two CTAs, or two pairs: blocks of a problem follow each other in them."""

from __future__ import annotations

import pytest

PLACES = 2


@pytest.fixture(autouse=True)
def few_places(monkeypatch):
    """Not for the launches that a test looks at: `monkeypatch` again takes it back."""
    monkeypatch.setattr("fmha.launch.sms_of", lambda device: PLACES)
    monkeypatch.setattr("fmha.launch.clusters_at_once", lambda device, ctas: PLACES)
