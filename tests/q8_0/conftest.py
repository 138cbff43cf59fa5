"""What the tests of Q8_0 share."""

import pytest


@pytest.fixture
def largest_tiles(monkeypatch):
    """Of those that tokens fill, so that small problems run all of them."""
    monkeypatch.setattr("q8_0.product.choose.time_of", lambda *_: 0)
