"""What a campaign has to know of a family of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.problems.draws import Draws
from lab.soak.campaign.record import Feature
from lab.soak.campaign.trial import Trial
from lab.tools.place import Place


@dataclass(frozen=True)
class Family:
    """name: as `soak.py` has it. draws: of a seed, an architecture and sizes. sizes: those by their
    names. trial: of a problem. features: of which problems are counted. errors: reports of a trial
    whose shares of their limits are shown, and what they are called."""

    name: str
    archs: Sequence[str]
    draws: Callable[[int, str, Any], Draws]
    sizes: Mapping[str, Any]
    trial: Callable[[Any, Place], Trial]
    features: Mapping[str, Feature]
    errors: Mapping[str, str]
