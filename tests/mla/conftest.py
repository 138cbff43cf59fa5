"""Fixtures that several test files here share."""

from __future__ import annotations

import pytest

from mla.compressor import launch as compressor
from mla.glue import launch as glue
from mla.indexer import query_launch, scores_launch, select_launch
from mla.prepare import launch as prepare
from tests.kvcache.conftest import no_launches  # noqa: F401


@pytest.fixture
def nothing_runs(no_launches, monkeypatch):  # noqa: F811
    """Fail if anything is compiled, or a kernel of `mla` other than attention is launched."""
    for module in (compressor, glue, prepare, query_launch, scores_launch, select_launch):
        monkeypatch.setattr(module, "launch", lambda *_: pytest.fail("launched"))
