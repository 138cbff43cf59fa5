"""`Run`: one timed call of a peer. Versions and reasons that a peer is absent."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

Launch = Callable[[], torch.Tensor]
Finish = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """A launch, and what turns its result into the one that peers are compared by.

    launch: enqueues the work of a call and returns its result.
    finish: untimed; decodes the result, or brings its rows into the common order.
    held: kept alive as long as the launch, for libraries that keep addresses alone.
    """

    launch: Launch
    finish: Finish
    held: tuple[object, ...] = ()

    def __call__(self) -> torch.Tensor:
        return self.launch()


def values_of(launch: Launch) -> torch.Tensor:
    """Call it once and return the result that is compared."""
    y = launch()
    return launch.finish(y) if isinstance(launch, Run) else y


def missing(*modules: str) -> str:
    """Return why one of these modules cannot be imported; "" if all are installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def versions(distributions: Sequence[str]) -> dict[str, str]:
    """Map each distribution that is installed to its version."""
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
