"""Measured rows to parameters of the cycle model.

`python -m lab.bringup.rates ROWS.json --json TABLE.json` prints what the rows of
`bench.py units` say beside what the model has, and writes the table that `scripts/cycles.py
--parameters TABLE.json` loads. cycle_model/parameters/h200.json is such a file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cycle_model.parameters.parameter import Gpu, Parameter, Table
from lab.silicon.units.rules import gpu_of, table_of
from lab.tools.common import read_rows, refuse, write_json
from lab.tools.tables import show, table

COLUMNS = (
    ("parameter", "{name}"),
    ("measured", "{value:g}"),
    ("range", lambda row: f"{row['low']:g} .. {row['high']:g}"),
    ("the model has", lambda row: f"{row['was'].value:g}, {row['was'].kind}"),
    ("", "{verdict}"),
    ("unit", "{unit}"),
)
KEPT = (("parameter", "{name}"), ("stays", "{value:g}"), ("kind", "{kind}"), ("because", "{why}"))


def verdict_of(found: Parameter, was: Parameter) -> str:
    """Compare a measured value with the model's value and range."""
    if found.value == was.value:
        return "the same"
    within = was.low <= found.value <= was.high
    return "within its range" if within else "outside its range"


def compared(made: Table, gpu: Gpu) -> Iterator[dict[str, Any]]:
    """A row of each measured parameter."""
    for name, each in made.parameters.items():
        was = gpu.parameters[name]
        yield {"name": name, **vars(each), "was": was, "verdict": verdict_of(each, was)}


def told(made: Table, gpu: Gpu) -> None:
    """Two tables: what is measured, and what stays as it is."""
    show(*table(f"{made.gpu}, measured {made.date}", COLUMNS, list(compared(made, gpu))))
    kept = [{"name": name, "why": why, **vars(gpu.parameters[name])}
            for name, why in made.kept.items()]  # fmt: skip
    show(*table("not measured: the model keeps its number", KEPT, kept))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.bringup.rates", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument(
        "rows", type=Path, metavar="ROWS.json", help="results of `bench.py units --json`"
    )
    words = "GPU of the measurements, such as 'NVIDIA H200'; default: that of the file"
    parser.add_argument("--gpu", default="", metavar="NAME", help=words)
    parser.add_argument("--json", type=Path, metavar="TABLE.json", help="write the parameters")
    options = parser.parse_args(argv)
    try:
        made = table_of(read_rows(options.rows), options.rows.name, options.gpu)
    except (OSError, ValueError) as error:
        return refuse(error)
    told(made, gpu_of(made.gpu))
    if options.json:
        write_json(options.json, made.document())
    return 0


if __name__ == "__main__":
    sys.exit(main())
