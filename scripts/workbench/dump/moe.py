"""What dump.py does with grouped GEMMs: PTX, registers, spills and SASS of one or of a grid."""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from moe.config import TILE_ROWS, GroupedConfig
from moe.forward import ARCHS, compile_for
from moe.sm100.plan import ROLES, make_plan
from workbench.cases.moe import layer_of, product_of
from workbench.common import describe, refuse, write_json, write_rows
from workbench.dump.files import print_ptx, print_sass, write_to
from workbench.sass.epilogue import static
from workbench.sass.listing import HOW_TO_GET_TOOLS, ptxas_version, tools_found
from workbench.timing import setting

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


def compile_to(folder: Path, config: GroupedConfig) -> tuple[Path, Path, float]:
    """Compile and write (PTX, cubin), named after the config; seconds it took."""
    start = time.perf_counter()
    compiled = compile_for(config, ARCHS[0])
    seconds = time.perf_counter() - start
    return *write_to(folder, f"moe_{ARCHS[0]}_{describe(config)}", compiled), seconds


def figures_of(config: GroupedConfig, cubin: Path) -> dict:
    """What the plan and ptxas say."""
    plan = make_plan(config)
    figures = {"warps": ROLES.warps, "stages": plan.stages, "smem_bytes": plan.smem.bytes}
    figures |= {"tmem_columns": plan.tmem.allocated, "ptxas": ptxas_version(cubin)}
    return figures | static(cubin).as_dict()


def print_static(figures: dict) -> None:
    """Resources, and the epilogue."""
    print(
        f"\n{figures['registers']} registers, {figures['stack']} bytes of stack, "
        f"{figures['spills']} spills, {figures['smem_bytes']:,} bytes of shared memory"
    )
    epilogue = figures["epilogue"]
    total = sum(epilogue.values())
    print(f"\nEpilogue, per warp and {figures['unit']}: {total:g} instructions")
    for kind, count in epilogue.items():
        if count:
            print(f"  {kind:<22}{count:>8.4g}")
    print(f"{figures['loaded']} columns a turn; beside that {figures['around']} for every tile")


# -- one config -----------------------------------------------------------------------------------


def dump(config: GroupedConfig, folder: Path) -> dict:
    """Print everything about the config of a product; returns it."""
    make_plan(config)
    print(f"moe grouped GEMM for {ARCHS[0]}: {describe(config)}")
    ptx, cubin, seconds = compile_to(folder, config)
    print(f"compiled in {seconds:.1f} s")
    found = {"config": asdict(config), "arch": ARCHS[0], "compile_seconds": round(seconds, 2)}
    found["ptx"] = print_ptx(ptx)
    if not tools_found():
        print(f"\n{HOW_TO_GET_TOOLS}")
        return found
    found["sass"] = print_sass(cubin)
    figures = figures_of(config, cubin)
    print_static(figures)
    return found | figures


# -- the grid -------------------------------------------------------------------------------------


def row_of(config: GroupedConfig, folder: Path) -> dict:
    """Figures of one config, or why there are none."""
    row = {"kind": "static", "arch": ARCHS[0], "config": changed(config)}
    try:
        make_plan(config)
    except (ValueError, NotImplementedError) as refusal:
        return row | {"refused": str(refusal)}
    _, cubin, seconds = compile_to(folder, config)
    return row | {"compile_seconds": round(seconds, 2)} | figures_of(config, cubin)


def changed(config: GroupedConfig) -> dict:
    """Its fields that are not as by default."""
    plain = asdict(GroupedConfig())
    return {name: value for name, value in asdict(config).items() if value != plain[name]}


def grid(console: Console) -> list[dict]:
    """What made the figures, then a row per config."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row_of(config, Path(folder))
            for config in track(GRID, "compiling", console=console, transient=True)
        ]
    head = {"kind": "setting", "date": datetime.date.today().isoformat(), **setting()}
    return [head, *rows]


def table_of(rows: list[dict]) -> Table:
    """A line per config."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("config")
    names = (
        "stages",
        "registers",
        "stack",
        "spills",
        "SMEM bytes",
        "TMEM",
        "SASS",
        "epilogue",
        "of columns",
    )
    for name in (*names, "compiled in"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [describe(GroupedConfig(**row["config"]))]
        if "refused" in row:
            cells += [""] * (len(names) + 1) + ["refused"]
        else:
            cells += [str(row[name]) for name in ("stages", "registers", "stack", "spills")]
            cells += [f"{row['smem_bytes']:,}", str(row["tmem_columns"]), str(row["instructions"])]
            cells += [f"{sum(row['epilogue'].values()):.0f}", str(row["loaded"])]
            cells.append(f"{row['compile_seconds']:.1f} s")
        table.add_row(*cells)
    return table


def show_grid(report: Path | None) -> None:
    """Print the table, and write it as JSON."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    rows = grid(console)
    console.print(table_of(rows[1:]))
    if report:
        write_rows(report, rows)


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    if options.grid and not tools_found():
        return refuse(HOW_TO_GET_TOOLS)
    try:
        if options.grid:
            show_grid(options.json)
        else:
            case = {"layer": str(layer_of(options)), "product": options.product}
            figures = case | dump(product_of(options).config, options.out)
            if options.json:
                write_json(options.json, figures)
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    return 0
