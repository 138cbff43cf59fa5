"""Fixtures that the tests of Q8_0 share."""

import pytest


@pytest.fixture
def largest_tiles(monkeypatch):
    """Choose the largest tiles that the tokens fill, so that small problems run all kinds."""
    monkeypatch.setattr("q8_0.product.choose.time_of", lambda *_: 0)
