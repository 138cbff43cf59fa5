"""The product of numbers and weights of four bits: its plan in words, its kernels, and a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from kernelkit.compile.arch import written_for
from kernelkit.compile.compiler import compile_once
from kernelkit.plan import hw
from lab.problems.family import Grid
from lab.problems.mixed_gemm import PLANS
from lab.problems.sections import Section, lines_of, parts_of, plural
from lab.sass import loops
from lab.sass.kernel import Subject, print_kinds, timed_cell
from lab.tools.common import describe
from moe.choose import row_tiles
from moe.mixed.choose import (
    BY_AVERAGE,
    LEAST_UNITS,
    MANY,
    MANY_TEAMS,
    READS_OF,
    choose_split,
    choose_teams,
    tiles_of,
)
from moe.mixed.config import ROWS, ROWS_OF, MixedConfig, fits
from moe.mixed.fragments import DEPTH
from moe.mixed.launch import KERNELS, MixedArguments
from moe.mixed.plan import ProductPlan

FIRST = MixedConfig(swiglu=True, limit=True, bias=True, pdl=True)
KINDS = (
    FIRST,
    replace(FIRST, gather=True),
    MixedConfig(bias=True, pdl=True),
    replace(FIRST, fmt="nvfp4", bias=False),
    replace(FIRST, x="e4m3", row_scale=True, out="e4m3"),
)


def explain(arguments: MixedArguments, product: str) -> Iterator[str]:
    """The whole plan, line by line."""
    arch = arguments.kernel_arch
    for number, config in enumerate(arguments.configs):
        plan = PLANS[arch](config)
        head = f"moe mixed GEMM for {arguments.target.arch}: {describe(config)}"
        yield "\n" * (number > 0) + head
        yield f"product {product}"
        if not arguments.count:
            yield "\nNo rows: no launch."
            return
        of_weights = () if number else (weights(arguments, plan),)
        yield from lines_of((walk(arguments, plan), *of_weights, *parts_of(plan)))


def walk(arguments: MixedArguments, plan: ProductPlan) -> Section:
    """Describe the tiles and which CTAs compute them."""
    w, config, count = arguments.w, plan.config, arguments.count
    units = math.ceil(w.k / DEPTH)
    origin = "gathered by token" if config.gather else "in order"
    rows = [
        ("product", f"{w.experts} x [{w.rows}, {w.k}] in {w.fmt} by [{count}, {w.k}] in {w.x}"),
        ("output", output(arguments, config)),
        ("rows of x", origin),
        ("tile", tile(arguments, config)),
        ("warpgroups", teams(arguments, config)),
        ("tiles", tiles(arguments, config)),
        ("grid", grid(arguments, config)),
        ("K", f"{plural(units, 'unit')} of {DEPTH}, {DEPTH // config.step} MMAs each; "
              f"{plural(plan.units, 'unit')} per stage"),
        ("split", split(arguments, config, units)),
        ("ring", f"{plan.stages} stages of {plan.w_bytes + plan.units * plan.x_bytes:,} bytes"),
    ]  # fmt: skip
    return "The walk over tiles", rows


def output(arguments: MixedArguments, config: MixedConfig) -> str:
    """Describe the output of a tile."""
    form = arguments.activation
    words = f"[{arguments.count}, {arguments.columns}] in {config.out}" + ", a bias" * config.bias
    if form is None:
        return words
    words += f", SwiGLU of pairs: {form.granularity} rows of gate, then of up"
    return words + (f", clamped at {form.limit:g}" if config.limit else "")


def tile(arguments: MixedArguments, config: MixedConfig) -> str:
    """Describe the tile's sizes, and why they were chosen."""
    rows, experts = arguments.count, arguments.w.experts
    words = f"{config.tile_n} rows of an expert's matrix x {config.tile_rows} rows of x"
    why = f"{rows / experts:.3g} rows per expert on average"
    chosen = replace(arguments, tile_rows=None).chosen_rows
    if config.tile_rows not in chosen:
        why += f", which would choose {' and '.join(map(str, chosen))}"
    if config.most:
        why += f"; another launch computes experts with more than {config.most}"
    if config.least:
        why += f"; experts with at least {config.least}, concurrently with the other launch"
    return f"{words} ({why})"


def teams(arguments: MixedArguments, config: MixedConfig) -> str:
    """Describe which warpgroups share a tile, and why."""
    w, arch = arguments.w, arguments.kernel_arch
    words = f"{config.teams}, each {config.parts} x {ROWS} rows of the matrix"
    chosen = choose_teams(arguments.count, w.experts, w.rows, config.tile_rows, arch, w.x)
    if (config.teams, config.parts) != chosen:
        return f"{words} (sizes would choose {chosen[0]} of {chosen[1]} x {ROWS})"
    if config.tile_rows >= MANY:
        return f"{words} (limited by products)"
    share = f", and {READS_OF[arch][chosen]:.2f} of the speed" * (arch == "sm_90a")
    return f"{words} (limited by reading: waves of CTAs{share})"


def split(arguments: MixedArguments, config: MixedConfig, units: int) -> str:
    """Describe which CTAs share the K of a tile, and why."""
    w = arguments.w
    sizes = arguments.count, w.experts, w.rows, config.tile_rows, config.teams * config.parts
    tiles = tiles_of(*sizes)
    words = f"{plural(config.split, 'CTA')} per tile"
    chosen = choose_split(tiles, config.tile_rows, units, arguments.kernel_arch)
    why = f"{tiles} tiles by sizes, one SM per CTA, at least {LEAST_UNITS} units of K"
    return f"{words} ({why}" + f": sizes would choose {chosen}" * (config.split != chosen) + ")"


def most_tiles(arguments: MixedArguments, config: MixedConfig) -> tuple[int, int]:
    """(of rows, of columns): the most that there can be."""
    count = arguments.count
    most = count if arguments.most_rows is None else arguments.most_rows
    of_rows = row_tiles(count, arguments.w.experts, config.tile_rows, most)
    return of_rows, math.ceil(arguments.w.rows / config.tile_n)


def tiles(arguments: MixedArguments, config: MixedConfig) -> str:
    of_rows, of_columns = most_tiles(arguments, config)
    words = f"{of_columns} of the matrix x at most {of_rows} of rows, for any counts"
    if config.least or config.most:
        return words
    return f"{words}; at least {math.ceil(arguments.count / config.tile_rows)} of rows"


def grid(arguments: MixedArguments, config: MixedConfig) -> str:
    sms, every = hw.SMS_OF[arguments.target.arch], math.prod(most_tiles(arguments, config))
    split = config.split
    clusters = min(sms // split, every)
    if split == 1:
        return f"{plural(clusters, 'CTA')} on {sms} SMs, which take tiles round-robin"
    ctas = plural(clusters * split, "CTA")
    return f"{ctas} on {sms} SMs, {split} per tile, tiles dealt round-robin to {clusters} clusters"


def weights(arguments: MixedArguments, plan: ProductPlan) -> Section:
    """Describe the layout of the weights, and how much is read."""
    w, form = arguments.w, arguments.config.format
    used, one = min(arguments.count, w.experts), w.nbytes // w.experts
    rows = [
        ("a unit", f"{ROWS} rows x {DEPTH} of K, {plan.unit_bytes:,} bytes: 16 per thread, "
                   f"then factors in {form.scale}, one per {form.block} elements"),
        ("an expert", f"{one:,} bytes, {used * one:,} if {used} have rows"),
        ("a value", f"{8 * w.data.nbytes / (w.experts * w.rows * w.k):.3g} bits as stored"),
    ]  # fmt: skip
    return "Weights", rows


# -- dump -----------------------------------------------------------------------------------------


def configs(arch: str) -> tuple[MixedConfig, ...]:
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
    plan = PLANS[written_for(arch)](config)
    planned = {"warps": plan.roles.warps, "stages": plan.stages, "smem_bytes": plan.smem.bytes}
    return Subject(
        *("moe mixed GEMM", "moe_mixed", config, arch),
        compile=partial(compile_once, config, arch, KERNELS[written_for(arch)]),
        figures=lambda cubin: planned | loops.mixed_figures(cubin, config, written_for(arch)),
        show=print_loop,
    )


def print_loop(found: dict[str, Any]) -> None:
    print_kinds(f"Main loop, per warp and {found['unit']}", found["loop"])
    print(f"{found['turn']} of K per iteration")


FIGURES = (
    ("config", lambda row: describe(MixedConfig(**row["config"]))), ("stages", "{stages}"),
    ("registers", "{registers}"), ("stack", "{stack}"), ("spills", "{spills}"),
    ("SMEM bytes", "{smem_bytes:,}"), ("SASS", "{instructions}"),
    ("an MMA", lambda row: f"{sum(row['loop'].values()):.1f}"),
    ("compiled in", "{compile_seconds:.1f} s"),
)  # fmt: skip


def grid_of(arch: str) -> Grid:
    """Every tile that is chosen, with several formats and outputs."""
    subject = partial(subject_of, arch)
    chosen = configs(written_for(arch))
    return Grid((timed_cell(subject, config, arch) for config in chosen), FIGURES, {})
