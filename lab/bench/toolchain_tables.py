"""Tables of `bench.py toolchains`: the matrix of toolchains, and figures of every case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.tools.tables import Table

Rows = Sequence[Mapping[str, Any]]
TIMED = "sm_90a"  # architecture of the kernels that a time is of


def matrix_table(rows: Rows) -> Table:
    """A line per toolchain: versions, kernels compiled by architecture, right results, times
    relative to the first toolchain that has any."""
    static, times = _of(rows, "static"), _of(rows, "time")
    archs = [*dict.fromkeys(row["arch"] for row in static)]
    heads = ["CuTe DSL", "ptxas", "PTX ISA", *archs, "right", "time", "machine code"]
    return "toolchains", heads, [
        [
            name,
            _versions(static, name, "ptxas"),
            _versions(static, name, "ptx"),
            *(_compiled(static, name, arch) for arch in archs),
            _right(times, name),
            _relative(times, name),
            _alike(static, name),
        ]
        for name in dict.fromkeys(row["toolchain"] for row in static)
    ]  # fmt: skip


def cases_table(rows: Rows) -> Table:
    """A line per case: registers, instructions and microseconds with each toolchain that makes
    machine code of its own."""
    static = [row for row in _of(rows, "static") if row["arch"] == TIMED]
    names = _distinct(static)
    heads = ["case", *(f"{what}, {name}" for what in ("registers", "SASS", "us") for name in names)]
    lines = []
    for case in dict.fromkeys(row["case"] for row in static):
        last = [_first(static[::-1], case, name) for name in names]
        times = [_first(_of(rows, "time"), case, name) for name in names]
        lines.append([
            case,
            *(_cell(row, "registers") for row in last),
            *(_cell(row, "instructions") for row in last),
            *(_cell(row, "us") for row in times),
        ])  # fmt: skip
    return f"{TIMED}: each case's own kernel, and microseconds of a call", heads, lines


def _of(rows: Iterable[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == kind]


def _first(rows: Rows, case: str, name: str) -> Mapping[str, Any]:
    """The first row of a case and a toolchain; empty where there is none."""
    wanted = case, name
    return next((row for row in rows if (row["case"], row["toolchain"]) == wanted), {})


def _cell(row: Mapping[str, Any], field: str) -> str:
    """A number with three digits or more; why there is none, or '-'."""
    if field not in row:
        return "failed" if "failed" in row else "-"
    value = row[field]
    text = f"{value:,}" if isinstance(value, int) else f"{value:.{1 if value < 100 else 0}f}"
    spilled = field == "registers" and row.get("spills")
    return text + (f", {row['spills']} spills" if spilled else "")


def _versions(static: Rows, name: str, field: str) -> str:
    found = {row[field] for row in static if row["toolchain"] == name and row.get(field)}
    return ", ".join(sorted(found)) or "-"


def _compiled(static: Rows, name: str, arch: str) -> str:
    mine = [row for row in static if row["toolchain"] == name and row["arch"] == arch]
    kernels = {row["kernel"]: row for row in mine if "kernel" in row}
    if not kernels:
        return "-"
    good = sum("failed" not in row for row in kernels.values())
    return f"{good} of {len(kernels)}"


def _right(times: Rows, name: str) -> str:
    mine = [row for row in times if row["toolchain"] == name]
    return f"{sum('us' in row for row in mine)} of {len(mine)}" if mine else "-"


def _relative(times: Rows, name: str) -> str:
    """Geometric mean, least and largest of the times over those of the first toolchain."""
    base = {row["case"]: row["us"] for row in times if "us" in row
            and row["toolchain"] == times[0]["toolchain"]}  # fmt: skip
    mine = {row["case"]: row["us"] for row in times if "us" in row and row["toolchain"] == name}
    ratios = [mine[case] / base[case] for case in mine if case in base]
    if not ratios:
        return "-"
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _cubins(static: Rows, name: str) -> dict[str, str]:
    return {
        row["kernel"]: row["cubin"] for row in static if row["toolchain"] == name and "cubin" in row
    }


def _alike(static: Rows, name: str) -> str:
    """The first toolchain with the same cubins, or how many differ from those of the first one."""
    mine = _cubins(static, name)
    names = [*dict.fromkeys(row["toolchain"] for row in static)]
    for other in names[: names.index(name)]:
        theirs = _cubins(static, other)
        common = mine.keys() & theirs.keys()
        if common and all(mine[kernel] == theirs[kernel] for kernel in common):
            return f"that of {other}"
    return "its own"


def _distinct(static: Rows) -> list[str]:
    names = dict.fromkeys(row["toolchain"] for row in static)
    return [name for name in names if _alike(static, name) == "its own"]
