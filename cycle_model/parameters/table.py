"""Files of measured parameters, which `python -m lab.bringup.rates` writes.

    {"format": 1, "gpu": "NVIDIA H200", "date": "2026-11-24", "rows": "units_h200.json",
     "parameters": {"issue_fma": {"value": 1, "low": 1, "high": 1, "unit": "cycles ...",
                                  "kind": "measured", "source": "units_h200.json: issue (...)"}}}

What a file does not name keeps the number that the GPU has without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from cycle_model.parameters.parameter import Gpu, Parameter

FORMAT = 1
_KEYS = {each.name for each in fields(Parameter)}


@dataclass(frozen=True)
class Table:
    """gpu: what the device calls itself. date: of the measurement. rows: the name of the file of
    rows. kept: why names have no number here, which is for readers alone."""

    gpu: str
    date: str
    rows: str
    parameters: Mapping[str, Parameter]
    kept: Mapping[str, str]

    def over(self, gpu: Gpu) -> Gpu:
        """The GPU with these parameters in the place of its own. ValueError for a name that is no
        parameter, and for another unit than it has."""
        known = gpu.parameters
        for name, each in self.parameters.items():
            if name not in known:
                raise ValueError(f"no parameter {name!r}; there are {', '.join(known)}")
            if each.unit != known[name].unit:
                raise ValueError(f"{name} in {each.unit!r}; the model has {known[name].unit!r}")
        return replace(gpu, parameters={**known, **self.parameters})

    def document(self) -> dict[str, Any]:
        """As it stands in a file."""
        named = {name: asdict(each) for name, each in self.parameters.items()}
        return {"format": FORMAT, "gpu": self.gpu, "date": self.date, "rows": self.rows,
                "parameters": named, "kept": dict(self.kept)}  # fmt: skip


def read(path: Path) -> Table:
    """The table of a file. ValueError that names the file and the entry where it is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"{path}: no table of parameters of format {FORMAT}")
    named, kept = document.get("parameters", {}), document.get("kept", {})
    if not isinstance(named, dict) or not isinstance(kept, dict):
        raise ValueError(f"{path}: parameters and kept are objects")
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
