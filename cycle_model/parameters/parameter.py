"""One number, and how far to trust it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MEASURED, PUBLISHED, GUESSED, FITTED = KINDS = ("measured", "published", "guessed", "fitted")


@dataclass(frozen=True)
class Parameter:
    """kind: 'measured' by a micro-benchmark of ours, 'published' by others, 'guessed', or 'fitted'
    to whole kernels. low, high: what it may be as well; source: where it is from."""

    value: float
    low: float
    high: float
    unit: str
    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; must be one of {', '.join(KINDS)}")
        numbers = self.low, self.value, self.high
        if not all(type(n) in (int, float) and abs(n) < math.inf for n in numbers):
            raise ValueError(f"low, value and high are {numbers!r:.80}, expected finite numbers")
        if not self.low <= self.value <= self.high:
            raise ValueError(f"{self.value} is not within {self.low} .. {self.high}")


@dataclass(frozen=True)
class Gpu:
    """arch: of its cubins. sms: streaming multiprocessors. l2_bytes: of the cache that they
    share."""

    name: str
    arch: str
    sms: int
    l2_bytes: int
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """Raises KeyError for a name that is no parameter."""
        return self.parameters[name].value

    def perturbed(self, seed: int) -> Gpu:
        """All parameters anywhere within their ranges, the same for the same seed."""
        chance = random.Random(seed)
        drawn = {
            name: replace(each, value=chance.uniform(each.low, each.high))
            for name, each in self.parameters.items()
        }
        return replace(self, parameters=drawn)

    def changed(self, **values: float) -> Gpu:
        """With other values, whatever their ranges; raises ValueError for an unknown name."""
        unknown = sorted(set(values) - set(self.parameters))
        if unknown:
            raise ValueError(f"no parameter {unknown[0]!r}; there are {', '.join(self.parameters)}")
        new = {
            name: replace(
                self.parameters[name],
                value=value,
                low=min(value, self.parameters[name].low),
                high=max(value, self.parameters[name].high),
            )
            for name, value in values.items()
        }
        return replace(self, parameters={**self.parameters, **new})
