"""A GPU with room for two CTAs, or two pairs, so that each runs several blocks of a problem."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PLACES = 2


@pytest.fixture
def at_once(monkeypatch) -> Callable[[int], None]:
    """at_once(places): from here on, as many CTAs (or pairs) run at the same time."""

    def set_places(places: int) -> None:
        monkeypatch.setattr("fmha.launch.sms_of", lambda device: places)
        monkeypatch.setattr("fmha.launch.clusters_at_once", lambda device, ctas: places)

    return set_places


@pytest.fixture(autouse=True)
def few_places(at_once):
    """Applies to every test here that sets no other number."""
    at_once(PLACES)
