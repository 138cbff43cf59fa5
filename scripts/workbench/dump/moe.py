"""What `dump.py moe` says beside resources: the epilogue of a grouped GEMM, or of a grid."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from moe.config import TILE_ROWS, GroupedConfig
from moe.launch import ARCHS, compile_for
from moe.sm100.plan import ROLES, make_plan
from workbench.cases.moe import layer_of, product_of
from workbench.common import changed, describe, refuse
from workbench.dump.kernel import Subject, dump_all, dump_grid, print_kinds
from workbench.sass import epilogue
from workbench.tables import Table

FIRST = GroupedConfig(limit=True, amax=True)  # of two products, that with SwiGLU
QUANTISED = replace(FIRST, out="nvfp4")
KINDS = (
    *(replace(FIRST, fmt=fmt, out=fmt) for fmt in ("nvfp4", "mxfp4", "mxfp8")),
    FIRST,
    GroupedConfig(granularity=0),
)
GRID = (
    *(replace(config, tile_rows=rows) for rows in TILE_ROWS for config in KINDS),
    *(replace(QUANTISED, tile_rows=rows, tile_n=256) for rows in TILE_ROWS[-2:]),
    *(replace(QUANTISED, granularity=size) for size in (8, 16, 64)),
    *(replace(QUANTISED, granularity=8, carry=True, tile_rows=rows) for rows in TILE_ROWS[-2:]),
)


def subject_of(config: GroupedConfig) -> Subject:
    """The kernel of a config; raises what its plan raises."""
    plan = make_plan(config)
    planned = {"warps": ROLES.warps, "stages": plan.stages, "smem_bytes": plan.smem.bytes}
    planned |= {"tmem_columns": plan.tmem.allocated}
    return Subject(
        *("moe grouped GEMM", "moe", config, ARCHS[0]),
        compile=partial(compile_for, config, ARCHS[0]),
        figures=lambda cubin: planned | epilogue.figures(cubin),
        show=print_epilogue,
    )


def print_epilogue(found: dict[str, Any]) -> None:
    print_kinds(f"Epilogue, per warp and {found['unit']}", found["epilogue"])
    print(f"{found['loaded']} columns a turn; beside that {found['around']} for every tile")


# -- the grid -------------------------------------------------------------------------------------


def row_of(config: GroupedConfig, folder: Path) -> dict[str, Any]:
    """Figures of one config, or why there are none."""
    row = {"arch": ARCHS[0], "config": changed(config)}
    try:
        subject = subject_of(config)
    except (ValueError, NotImplementedError) as refusal:
        return row | {"refused": str(refusal)}
    _, cubin, seconds = subject.write(folder)
    return row | {"compile_seconds": round(seconds, 2)} | subject.figures(cubin)


def table_of(rows: list[dict]) -> Table:
    """A line per config."""
    heads = ["config", "stages", "registers", "stack", "spills", "SMEM bytes", "TMEM", "SASS"]
    heads += ["epilogue", "of columns", "compiled in"]
    lines = []
    for row in rows:
        cells = [describe(GroupedConfig(**row["config"]))]
        if "refused" in row:
            cells += [""] * (len(heads) - 2) + ["refused"]
        else:
            cells += [str(row[name]) for name in ("stages", "registers", "stack", "spills")]
            cells += [f"{row['smem_bytes']:,}", str(row["tmem_columns"]), str(row["instructions"])]
            cells += [f"{sum(row['epilogue'].values()):.0f}", str(row["loaded"])]
            cells.append(f"{row['compile_seconds']:.1f} s")
        lines.append(cells)
    return "", heads, lines


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    if options.grid:
        return dump_grid(options, [partial(row_of, config) for config in GRID], table_of)
    try:
        named = {"layer": str(layer_of(options)), "product": options.product}
    except ValueError as refusal:
        return refuse(refusal)
    return dump_all(options, lambda: [subject_of(product_of(options).config)], **named)
