"""Parameters with their reliability, and their files, as `python -m lab.bringup.rates` writes them.

    {"format": 1, "gpu": "NVIDIA H200", "date": "2026-11-24", "rows": "units_h200.json",
     "parameters": {"issue_fma": {"value": 1, "low": 1, "high": 1, "unit": "cycles ...",
                                  "kind": "measured", "source": "units_h200.json: issue (...)"}}}

A parameter that the file does not name keeps the GPU's default.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

MEASURED, PUBLISHED, GUESSED, FITTED = KINDS = ("measured", "published", "guessed", "fitted")


@dataclass(frozen=True)
class Parameter:
    """A number and its reliability.

    Attributes:
        low: Lowest plausible value.
        high: Highest plausible value.
        kind: 'measured' by our micro-benchmark, 'published' by others, 'guessed', or 'fitted' to
            whole kernels.
        source: Origin of the value.
    """

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
    """A GPU and its parameters.

    Attributes:
        arch: Architecture of its cubins.
        sms: Number of streaming multiprocessors.
        l2_bytes: Size of the cache that they share.
    """

    name: str
    arch: str
    sms: int
    l2_bytes: int
    parameters: Mapping[str, Parameter] = field(default_factory=dict)

    def value(self, name: str) -> float:
        """Return a parameter's value; raise KeyError for an unknown name."""
        return self.parameters[name].value

    def perturbed(self, seed: int) -> Gpu:
        """Draw all parameters from their ranges, reproducibly by `seed`."""
        chance = random.Random(seed)
        drawn = {
            name: replace(each, value=chance.uniform(each.low, each.high))
            for name, each in self.parameters.items()
        }
        return replace(self, parameters=drawn)

    def changed(self, **values: float) -> Gpu:
        """Return a GPU with other values, whatever their ranges.

        Raises ValueError for an unknown name.
        """
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


FORMAT = 1
_KEYS = {each.name for each in fields(Parameter)}


@dataclass(frozen=True)
class Table:
    """Parameters of one measurement.

    Attributes:
        gpu: Name that the device reports.
        date: Date of the measurement.
        rows: Name of the file of rows.
        kept: Reasons why names have no number here, for readers only.
    """

    gpu: str
    date: str
    rows: str
    parameters: Mapping[str, Parameter]
    kept: Mapping[str, str]

    def over(self, gpu: Gpu) -> Gpu:
        """Return the GPU with these parameters in place of its defaults.

        Raises ValueError for an unknown name or a different unit.
        """
        known = gpu.parameters
        for name, each in self.parameters.items():
            if name not in known:
                raise ValueError(f"no parameter {name!r}; there are {', '.join(known)}")
            if each.unit != known[name].unit:
                raise ValueError(f"{name} in {each.unit!r}; the model has {known[name].unit!r}")
        return replace(gpu, parameters={**known, **self.parameters})

    def document(self) -> dict[str, Any]:
        """Return the table in the format of its file."""
        named = {name: asdict(each) for name, each in self.parameters.items()}
        return {"format": FORMAT, "gpu": self.gpu, "date": self.date, "rows": self.rows,
                "parameters": named, "kept": dict(self.kept)}  # fmt: skip


def read(path: Path) -> Table:
    """Read a table; raise ValueError, which names file and entry, if it is invalid."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: not a table of parameters in format {FORMAT}")
    named, kept = document.get("parameters", {}), document.get("kept", {})
    if not isinstance(named, dict) or not isinstance(kept, dict):
        raise ValueError(f"{path}: parameters and kept must be objects")
    parameters = {}
    for name, each in named.items():
        if not isinstance(each, dict) or set(each) != _KEYS:
            raise ValueError(f"{path}: {name} must have {', '.join(sorted(_KEYS))}, nothing else")
        try:
            parameters[name] = Parameter(**each)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {name}: {error}") from None
    gpu, date, rows = (str(document.get(key, "")) for key in ("gpu", "date", "rows"))
    return Table(gpu, date, rows, parameters, kept)
