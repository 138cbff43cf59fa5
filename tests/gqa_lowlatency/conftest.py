"""What tests of several files here share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def poisoned_outputs():
    """torch.empty returns NaN, so that what the kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
