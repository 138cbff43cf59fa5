"""Tables of `bench.py toolchains`: the matrix of toolchains, and figures of every case."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.tools.tables import Table

Rows = Sequence[Mapping[str, Any]]
COMPILED, TIMED = "compiled", "timed"  # kinds of rows
ARCH = "sm_90a"  # architecture of the kernels that are timed


def matrix_table(rows: Rows) -> Table:
    """A line per toolchain: versions, kernels compiled by architecture, right results, times
    relative to the first toolchain, and the toolchain with the same machine code."""
    static, times = rows_of(rows, COMPILED), rows_of(rows, TIMED)
    archs = [*dict.fromkeys(row["arch"] for row in static)]
    heads = ["CuTe DSL", "ptxas", "PTX ISA", *archs, "right on a GPU", "time", "machine code"]
    lines = []
    for name in dict.fromkeys(row["toolchain"] for row in static):
        mine = [row for row in static if row["toolchain"] == name]
        same = alike(static, name)
        timed = [row for row in times if row["toolchain"] == (same or name)]
        lines.append([
            name,
            _versions(mine, "ptxas"),
            _versions(mine, "ptx"),
            *(_compiled(mine, arch) for arch in archs),
            f"{sum('us' in row for row in timed)} of {len(timed)}" if timed else "-",
            _relative(times, timed),
            f"that of {same}" if same else "its own",
        ])  # fmt: skip
    return "toolchains", heads, lines


def cases_table(rows: Rows) -> Table:
    """A line per case: registers, instructions and microseconds with each toolchain that makes
    machine code of its own, in their order; and each time over the first one."""
    static = [row for row in rows_of(rows, COMPILED) if row["arch"] == ARCH]
    names = [n for n in dict.fromkeys(row["toolchain"] for row in static) if not alike(static, n)]
    heads = ["case", "registers", "instructions", "us", "over the first"]
    lines = []
    for case in dict.fromkeys(row["case"] for row in static):
        last = [_first(static[::-1], case, name) for name in names]
        times = [_first(rows_of(rows, TIMED), case, name) for name in names]
        us = [row.get("us", math.nan) for row in times]
        over = " / ".join(f"{each / us[0]:.3f}" for each in us[1:])
        lines.append([
            case,
            _cells(last, "registers"),
            _cells(last, "instructions"),
            _cells(times, "us"),
            over.replace("nan", "-"),
        ])  # fmt: skip
    return f"kernels for {ARCH}: {' / '.join(names)}", heads, lines


def rows_of(rows: Rows, kind: str) -> list[Mapping[str, Any]]:
    """The rows of a kind."""
    return [row for row in rows if row["kind"] == kind]


def alike(static: Rows, name: str) -> str:
    """Return the first toolchain before this one with the same machine code, '' for none."""
    mine = _cubins(static, name)
    for other in dict.fromkeys(row["toolchain"] for row in static):
        if other == name:
            return ""
        theirs = _cubins(static, other)
        common = mine.keys() & theirs.keys()
        if common and all(mine[kernel] == theirs[kernel] for kernel in common):
            return str(other)
    return ""


def _cubins(static: Rows, name: str) -> dict[str, str]:
    mine = (row for row in static if row["toolchain"] == name and "cubin" in row)
    return {f"{row['kernel']} {row['arch']}": row["cubin"] for row in mine}


def _first(rows: Rows, case: str, name: str) -> Mapping[str, Any]:
    """The first row of a case and a toolchain; empty where there is none."""
    wanted = case, name
    return next((row for row in rows if (row["case"], row["toolchain"]) == wanted), {})


def _cells(rows: Rows, field: str) -> str:
    """The numbers of all toolchains, or one that they agree on."""
    found = [_cell(row, field) for row in rows]
    return " / ".join(found if len({*found}) > 1 else found[:1])


def _cell(row: Mapping[str, Any], field: str) -> str:
    """A number with three digits or more; 'failed', or '-' for nothing."""
    if field not in row:
        return "failed" if "failed" in row else "-"
    value = row[field]
    text = f"{value:,}" if isinstance(value, int) else f"{value:.{2 if value < 100 else 1}f}"
    spilled = field == "registers" and row.get("spills")
    return text + (f", {row['spills']} spills" if spilled else "")


def _versions(mine: Rows, field: str) -> str:
    return ", ".join(sorted({row[field] for row in mine if row.get(field)})) or "-"


def _compiled(mine: Rows, arch: str) -> str:
    """Kernels that were compiled, of those that there are for an architecture."""
    kernels = {row["kernel"]: row for row in mine if row["arch"] == arch and "kernel" in row}
    good = sum("failed" not in row for row in kernels.values())
    return f"{good} of {len(kernels)}" if kernels else "-"


def _relative(times: Rows, mine: Rows) -> str:
    """Geometric mean of these times over those of the first toolchain, least and largest."""
    base = {row["case"]: row["us"] for row in times if "us" in row
            and row["toolchain"] == times[0]["toolchain"]}  # fmt: skip
    ratios = [row["us"] / base[row["case"]] for row in mine if "us" in row and row["case"] in base]
    if not ratios:
        return "-"
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{mean:.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
