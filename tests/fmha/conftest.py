"""A GPU with room for two CTAs, or two pairs: blocks of a problem follow each other in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PLACES = 2


@pytest.fixture
def at_once(monkeypatch) -> Callable[[int], None]:
    """at_once(places): from here on so many CTAs, or pairs, run at the same time."""

    def set_places(places: int) -> None:
        monkeypatch.setattr("fmha.launch.sms_of", lambda device: places)
        monkeypatch.setattr("fmha.launch.clusters_at_once", lambda device, ctas: places)

    return set_places


@pytest.fixture(autouse=True)
def few_places(at_once):
    """Of every test here that asks for no other number."""
    at_once(PLACES)
