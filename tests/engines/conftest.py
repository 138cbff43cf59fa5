"""The environment that `make engines` builds, and models that judge its engines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from lab.engines import run
from lab.engines.environment import Environment
from lab.engines.judge import Reference
from lab.engines.scenarios import Scenario


@pytest.fixture(scope="session")
def environment() -> Environment:
    """The environment of the engines; an error where it is not built."""
    found = Environment()
    if not found.is_built():
        pytest.fail(f"{found.folder} is not built for this checkout: python scripts/engines.py")
    return found


@pytest.fixture(scope="session")
def reference_of(environment: Environment) -> Callable[[Scenario], Reference]:
    """The judge of a scenario's tokens; the models of a worker stay in memory."""
    return partial(run.reference_of, environment)
