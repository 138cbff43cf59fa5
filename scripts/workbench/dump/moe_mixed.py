"""What `dump.py moe` says of Hopper's product of numbers and weights of four bits, or of a grid."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from kernelkit.compile import compile_once
from moe.mixed.choose import LARGEST, MANY, READS
from moe.mixed.config import TILE_ROWS, MixedConfig, fits
from moe.mixed.launch import ARCHS, KERNEL
from moe.mixed.sm90.plan import make_plan
from workbench.cases.moe import layer_of, mixed_product_of
from workbench.common import describe
from workbench.dump.files import print_kinds
from workbench.dump.kernel import Subject, dump_all, dump_grid, timed_cell
from workbench.sass import mixed

FIRST = MixedConfig(swiglu=True, limit=True, bias=True, gather=True, pdl=True)
KINDS = (
    FIRST,
    MixedConfig(bias=True, pdl=True),
    replace(FIRST, fmt="nvfp4", bias=False),
    replace(FIRST, x="e4m3", row_scale=True, out="e4m3"),
)
MANY_ROWS = ((3, 1), (2, 1))  # warpgroups, times 64 rows of weights: where products take the time
GRID = tuple(
    replace(kind, tile_rows=rows, teams=teams, parts=parts)
    for kind in KINDS
    for rows in TILE_ROWS
    for teams, parts in (READS if rows < MANY else MANY_ROWS)
    if fits(rows, teams, parts) and (rows <= LARGEST or not kind.gather)
)


def subject_of(config: MixedConfig) -> Subject:
    """The kernel of a config; raises what its plan raises."""
    plan = make_plan(config)
    planned = {"warps": plan.roles.warps, "stages": plan.stages, "smem_bytes": plan.smem.bytes}
    return Subject(
        *("moe mixed GEMM", "moe_mixed", config, ARCHS[0]),
        compile=partial(compile_once, config, ARCHS[0], KERNEL),
        figures=lambda cubin: planned | mixed.figures(cubin, config),
        show=print_loop,
    )


def print_loop(found: dict[str, Any]) -> None:
    print_kinds(f"Main loop, per warp and {found['unit']}", found["loop"])
    print(f"{found['turn']} of K a turn")


FIGURES = (
    ("config", lambda row: describe(MixedConfig(**row["config"]))), ("stages", "{stages}"),
    ("registers", "{registers}"), ("stack", "{stack}"), ("spills", "{spills}"),
    ("SMEM bytes", "{smem_bytes:,}"), ("SASS", "{instructions}"),
    ("an MMA", lambda row: f"{sum(row['loop'].values()):.1f}"),
    ("compiled in", "{compile_seconds:.1f} s"),
)  # fmt: skip


def perform(options: argparse.Namespace) -> int:
    """Of a layer whose activations are numbers."""
    if options.grid:
        return dump_grid(
            options, (timed_cell(subject_of, config, ARCHS[0]) for config in GRID), FIGURES
        )
    named = {"layer": str(layer_of(options)), "product": options.product}
    return dump_all(options, lambda: [subject_of(mixed_product_of(options).config)], **named)
