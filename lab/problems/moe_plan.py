"""The fused grouped GEMM of a layer: its plan in words, its kernel, and a grid of kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from kernelkit.plan import hw
from lab.problems.family import Grid
from lab.problems.sections import Rows, Section, lines_of, parts_of, plural
from lab.sass import loops
from lab.sass.kernel import Subject, print_kinds, timed_cell
from lab.tools.common import describe
from moe.arguments import Arguments
from moe.choose import choose_tile_rows, row_tiles
from moe.config import TILE_ROWS, GroupedConfig
from moe.formats import SCALE_ATOM_BYTES, SCALE_ROWS, row_blocks, scale_atoms
from moe.launch import ARCHS, compile_for, grid
from moe.sm100.plan import LINE, ROLES, GroupedPlan, make_plan

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


def explain(arguments: Arguments, product: str, arch: str = "") -> Iterator[str]:
    """Yield the whole plan, line by line. arch: '' for the first."""
    plan = make_plan(arguments.config)
    yield f"moe grouped GEMM for {arch or ARCHS[0]}: {describe(arguments.config)}"
    yield f"product {product}"
    if not arguments.x.rows:
        yield "\nNo rows: no launch."
        return
    own = walk(arguments, plan), scale_factors(arguments, plan)
    yield from lines_of((*own, *parts_of(plan, ROLES)))


def walk(arguments: Arguments, plan: GroupedPlan) -> Section:
    """Describe the tiles and which CTAs compute them."""
    x, w = arguments.x, arguments.w
    steps, left = math.ceil(x.k / plan.k_stage), x.k % plan.k_stage or plan.k_stage
    rows = [
        (
            "product",
            f"[{x.rows}, {x.k}] sorted by expert x {arguments.experts} x [{w.rows}, {x.k}]",
        ),
        ("output", output(arguments)),
        ("tile", tile(arguments)),
        ("tiles", tiles(arguments)),
        ("grid", grid_words(arguments)),
        ("walk", "expert by expert; in an expert the row tiles of a column tile first"),
        ("K", f"{plural(steps, 'stage')} of {plan.k_stage}, {LINE} bytes, {plan.k_block} per MMA"),
        ("last stage", f"{left} elements of K, {plural(math.ceil(left / plan.k_block), 'MMA')}"),
        ("ring", f"{plan.stages} stages"),
        ("weights", weights(arguments)),
    ]
    return "The walk over tiles", rows


def output(arguments: Arguments) -> str:
    """Describe the output of a tile."""
    config = arguments.config
    words = f"[{arguments.x.rows}, {arguments.columns}] in {config.out}"
    if not config.swiglu:
        return words
    pairs = f"{config.granularity} rows of gate, then of up"
    words = f"{words}, SwiGLU of pairs: {pairs}"
    if config.limit:
        words += f", clamped at {arguments.activation.limit:g}"
    return words


def tile(arguments: Arguments) -> str:
    """Describe the tile's sizes, and why they were chosen."""
    config = arguments.config
    words = f"{config.tile_rows} rows of an expert x {config.tile_n} rows of its matrix"
    if config.swapped:
        words += ", swapped: tokens are the N of the MMA"
    words += ", a pair of CTAs" * (config.ctas > 1)
    most, average = arguments.most, arguments.x.rows / arguments.experts
    why = f"{average:.3g} rows per expert on average, at most {most}"
    bits = 8 // arguments.x.format.per_byte
    chosen = choose_tile_rows(arguments.x.rows, arguments.experts, arguments.most, bits)
    if config.tile_rows != chosen:
        return f"{words} ({why}, which would choose {chosen})"
    return f"{words} ({why})"


def tiles(arguments: Arguments) -> str:
    config, x = arguments.config, arguments.x
    rows = row_tiles(x.rows, arguments.experts, config.tile_rows, arguments.most)
    columns = math.ceil(arguments.w.rows / config.tile_n)
    return (
        f"{columns} of columns x at most {rows} of rows, for any counts; "
        f"at least {math.ceil(x.rows / config.tile_rows)} of rows"
    )


def grid_words(arguments: Arguments) -> str:
    ctas, shared = grid(arguments), arguments.config.ctas
    words, turns = plural(ctas, "CTA"), ctas // shared
    if shared > 1:
        words += f" in {plural(turns, 'cluster')} of {shared}"
    return f"{words} on {hw.SMS} SMs, tiles dealt round-robin to {turns}"


def weights(arguments: Arguments) -> str:
    """Describe the bytes to read if every expert has a row."""
    used = min(arguments.x.rows, arguments.experts)
    one = arguments.w.nbytes // arguments.experts
    return f"{one:,} bytes per expert, {used * one:,} if {used} have rows"


def scale_factors(arguments: Arguments, plan: GroupedPlan) -> Section:
    """Describe where both operands' scale factors lie, in global memory and on the way to the
    MMA."""
    form, x, w = arguments.config.format, arguments.x, arguments.w
    atoms = scale_atoms(form.columns(x.k))
    rows: Rows = [
        ("one factor", f"{form.scale}, for {form.block} elements of K in {form.element}"),
        ("an atom", f"{SCALE_ROWS} rows x 4 factors, {SCALE_ATOM_BYTES} bytes; "
                    f"row r, factor c: byte 16 (r % 32) + 4 (r / 32) + c"),
        ("x", f"at most {arguments.blocks} blocks of {SCALE_ROWS} rows, {atoms} atoms each; "
              "every expert begins with a new block"),
        ("w", f"{row_blocks(w.rows)} blocks per expert, {atoms} atoms each"),
        ("a stage", f"{plan.atoms} adjacent atoms of a block, "
                    f"{plan.scales_of_block} factors of a row per MMA"),
        ("tensor memory", "by tcgen05.cp, 4 columns per atom, before the MMAs that read them"),
    ]  # fmt: skip
    out = arguments.config.out_format
    if out is not None:
        own = scale_atoms(out.columns(arguments.columns))
        rows.append(("output", f"at most {arguments.blocks} blocks of {own} atoms, as those of x"))
    return "Scale factors", rows


# -- dump -----------------------------------------------------------------------------------------


def subject_of(config: GroupedConfig, arch: str = "") -> Subject:
    """Return the kernel of a config, for the first architecture if `arch` is ''. Raises what its
    plan raises."""
    arch = arch or ARCHS[0]
    plan = make_plan(config)
    planned = {"warps": ROLES.warps, "stages": plan.stages, "smem_bytes": plan.smem.bytes}
    planned |= {"tmem_columns": plan.tmem.allocated}
    return Subject(
        *("moe grouped GEMM", "moe", config, arch),
        compile=partial(compile_for, config, arch),
        figures=lambda cubin: planned | loops.epilogue_figures(cubin),
        show=print_epilogue,
    )


def print_epilogue(found: dict[str, Any]) -> None:
    print_kinds(f"Epilogue, per warp and {found['unit']}", found["epilogue"])
    print(f"{found['loaded']} columns per iteration, and {found['around']} more per tile")


FIGURES = (
    ("config", lambda row: describe(GroupedConfig(**row["config"]))), ("stages", "{stages}"),
    ("registers", "{registers}"), ("stack", "{stack}"), ("spills", "{spills}"),
    ("SMEM bytes", "{smem_bytes:,}"), ("TMEM", "{tmem_columns}"), ("SASS", "{instructions}"),
    ("epilogue", lambda row: f"{sum(row['epilogue'].values()):.0f}"), ("of columns", "{loaded}"),
    ("compiled in", "{compile_seconds:.1f} s"),
)  # fmt: skip


def grid_of(arch: str) -> Grid:
    """Return every tile_rows, with several formats and outputs."""
    subject = partial(subject_of, arch=arch)
    return Grid((timed_cell(subject, config, arch) for config in GRID), FIGURES, {})
