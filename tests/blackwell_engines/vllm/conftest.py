"""The plugin, imported beside stand-ins of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.blackwell_engines.plugins import beside
from tests.blackwell_engines.vllm import stand_ins


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`blackwell_engines.vllm.backend`."""
    yield from beside(stand_ins.modules(), "blackwell_engines.vllm.backend", monkeypatch)
