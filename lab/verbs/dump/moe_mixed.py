"""What `dump.py moe` says beside resources, of products of numbers and weights of four bits: the
main loop, or a grid of them."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from functools import partial
from typing import Any

from kernelkit.compile.compiler import compile_once
from lab.cases.moe import layer_of, mixed_product_of
from lab.problems.mixed_gemm import PLANS
from lab.sass import mixed
from lab.tools.common import describe
from lab.verbs.dump.files import print_kinds
from lab.verbs.dump.kernel import Subject, dump_all, dump_grid, timed_cell
from moe.mixed.choose import BY_AVERAGE, MANY, MANY_TEAMS, READS_OF
from moe.mixed.config import ROWS_OF, MixedConfig, fits
from moe.mixed.launch import KERNELS

FIRST = MixedConfig(swiglu=True, limit=True, bias=True, pdl=True)
KINDS = (
    FIRST,
    replace(FIRST, gather=True),
    MixedConfig(bias=True, pdl=True),
    replace(FIRST, fmt="nvfp4", bias=False),
    replace(FIRST, x="e4m3", row_scale=True, out="e4m3"),
)


def grid(arch: str) -> tuple[MixedConfig, ...]:
    """Every tile that is chosen, with several formats and outputs."""
    return tuple(
        replace(kind, tile_rows=rows, teams=teams, parts=parts)
        for kind in KINDS
        if (arch, kind.x) in BY_AVERAGE
        for rows in sorted({*itertools.chain(*BY_AVERAGE[arch, kind.x].values())})
        for teams, parts in (READS_OF[arch] if rows < MANY else [MANY_TEAMS[arch][rows]])
        if fits(arch, rows, teams, parts, kind.x) and (rows == ROWS_OF[arch][0]) >= kind.gather
    )


def subject_of(arch: str, config: MixedConfig) -> Subject:
    """The kernel of a config; raises what its plan raises."""
    plan = PLANS[arch](config)
    planned = {"warps": plan.roles.warps, "stages": plan.stages, "smem_bytes": plan.smem.bytes}
    return Subject(
        *("moe mixed GEMM", "moe_mixed", config, arch),
        compile=partial(compile_once, config, arch, KERNELS[arch]),
        figures=lambda cubin: planned | mixed.figures(cubin, config, arch),
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
    arch = options.arch or layer_of(options).archs[0]
    subject = partial(subject_of, arch)
    if options.grid:
        cells = (timed_cell(subject, config, arch) for config in grid(arch))
        return dump_grid(options, cells, FIGURES)
    named = {"layer": str(layer_of(options)), "product": options.product}
    return dump_all(options, lambda: [*map(subject, mixed_product_of(options).configs)], **named)
