"""The plugin, imported beside stand-ins of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.blackwell_engines.plugins import beside
from tests.blackwell_engines.sglang import stand_ins


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`blackwell_engines.sglang.backend`."""
    yield from beside(stand_ins.modules(), "blackwell_engines.sglang.backend", monkeypatch)
