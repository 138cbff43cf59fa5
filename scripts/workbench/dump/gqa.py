"""What `dump.py gqa` says beside resources: the loop over keys, of one config or of a grid."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gqa_lowlatency.config import COLUMNS, HEAD_DIMS, DecodeConfig
from gqa_lowlatency.launch import compile_for
from kernelkit import hw
from workbench.cases.decode import Case, case_of, cta_of, settled
from workbench.common import changed, refuse
from workbench.dump.kernel import Subject, dump_all, dump_grid, print_kinds
from workbench.flags.groups import ARCHS
from workbench.sass import decode
from workbench.tables import Table

KV_DTYPES = ("bf16", "e4m3")  # of the grid
GRID = tuple(itertools.product(ARCHS[::-1], KV_DTYPES, HEAD_DIMS, COLUMNS))


def subject_of(config: DecodeConfig, arch: str) -> Subject:
    """The kernel of a config."""
    cta = cta_of(config, arch)
    planned = {"warps": cta.threads // hw.WARP_THREADS, "stages": cta.stages}
    planned |= {"smem_bytes": cta.smem_bytes}
    return Subject(
        *("gqa_lowlatency", "gqa", config, arch),
        compile=partial(compile_for, config, arch),
        figures=lambda cubin: planned | decode.figures(cubin, config, arch),
        show=lambda found: print_kinds(
            f"Loop over keys, per warp and {found['unit']}", found["loop"]
        ),
    )


# -- the grid -------------------------------------------------------------------------------------


def row_of(case: Case, columns: int, folder: Path) -> dict[str, Any]:
    """Figures of one config, or why there are none."""
    row = {"arch": case.arch, "kv_dtype": case.kv_dtype}
    row |= {"head_dim": case.head_dim, "columns": columns}
    try:
        _, config = settled(case)
    except (ValueError, NotImplementedError) as refusal:
        return row | {"refused": str(refusal)}
    if config.columns != columns:
        return row | {"refused": f"{config.row_tiles} row tiles of {config.columns} instead"}
    subject = subject_of(config, case.arch)
    return row | {"config": changed(config)} | subject.figures(subject.write(folder)[1])


def cases_of(case: Case) -> Iterator[tuple[Case, int]]:
    """(case, columns) of the grid; all that it does not vary is as in `case`."""
    for arch, kv_dtype, head_dim, columns in GRID:
        q_heads = case.kv_heads * max(1, columns // case.q_len)
        fields = {"arch": arch, "kv_dtype": kv_dtype, "head_dim": head_dim, "q_heads": q_heads}
        yield replace(case, **fields), columns


def table_of(rows: list[dict]) -> Table:
    """A line per config."""
    heads = ["arch", "K, V", "head_dim", "columns", "cluster", "warps", "stages", "registers"]
    heads += ["stack", "spills", "SMEM bytes", "SASS", "loop"]
    lines = []
    for row in rows:
        cells = [row[name] for name in ("arch", "kv_dtype", "head_dim", "columns")]
        if "refused" in row:
            cells += ["-", "", "", "refused", *[""] * 5]
        else:
            cells += [row["config"].get("cluster", 1), row["warps"], row["stages"]]
            cells += [row[name] for name in ("registers", "stack", "spills")]
            loop = f"{sum(row['loop'].values()):g}"
            cells += [f"{row['smem_bytes']:,}", row["instructions"], loop]
        lines.append([*map(str, cells)])
    return "", heads, lines


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    try:
        case = case_of(options)
    except ValueError as refusal:
        return refuse(refusal)
    if options.grid:
        rows = [partial(row_of, one, columns) for one, columns in cases_of(case)]
        return dump_grid(options, rows, table_of, case=f"{case}, but for what a row names")

    def subjects() -> list[Subject]:
        return [subject_of(settled(case)[1], case.arch)]

    return dump_all(options, subjects, case=str(case))
