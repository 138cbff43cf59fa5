"""What `dump.py moe` says beside resources: the epilogue of a grouped GEMM, or of a grid."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from lab.cases.moe import layer_of, product_of
from lab.sass import epilogue
from lab.tools.common import describe, refuse
from lab.verbs.dump import moe_mixed
from lab.verbs.dump.files import print_kinds
from lab.verbs.dump.kernel import Subject, dump_all, dump_grid, timed_cell
from moe.config import TILE_ROWS, GroupedConfig
from moe.launch import ARCHS, compile_for
from moe.sm100.plan import ROLES, make_plan

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


FIGURES = (
    ("config", lambda row: describe(GroupedConfig(**row["config"]))), ("stages", "{stages}"),
    ("registers", "{registers}"), ("stack", "{stack}"), ("spills", "{spills}"),
    ("SMEM bytes", "{smem_bytes:,}"), ("TMEM", "{tmem_columns}"), ("SASS", "{instructions}"),
    ("epilogue", lambda row: f"{sum(row['epilogue'].values()):.0f}"), ("of columns", "{loaded}"),
    ("compiled in", "{compile_seconds:.1f} s"),
)  # fmt: skip


def perform(options: argparse.Namespace) -> int:
    try:
        layer = layer_of(options)
    except ValueError as refusal:
        return refuse(refusal)
    if layer.mixed:
        return moe_mixed.perform(options)
    if options.grid:
        return dump_grid(
            options, (timed_cell(subject_of, config, ARCHS[0]) for config in GRID), FIGURES
        )
    named = {"layer": str(layer), "product": options.product}
    return dump_all(options, lambda: [subject_of(product_of(options).config)], **named)
