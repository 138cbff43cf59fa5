"""The plugin, imported beside stand-ins of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.integrations.plugins import beside
from tests.integrations.vllm import stand_ins


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """`integrations.vllm.backend`."""
    yield from beside(stand_ins.modules(), "integrations.vllm.backend", monkeypatch)
