"""What dump.py does with decode configs: PTX, registers, spills and SASS of one or of a grid."""

from __future__ import annotations

import argparse
import datetime
import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from gqa_lowlatency.config import COLUMNS, HEAD_DIMS, DecodeConfig
from gqa_lowlatency.forward import ARCHS, compile_for
from kernelkit import hw
from workbench.cases.decode import Case, case_of, cta_of, settled
from workbench.common import describe, refuse, write_json, write_rows
from workbench.dump.files import print_ptx, print_sass, write_to
from workbench.sass.decode import static
from workbench.sass.listing import HOW_TO_GET_TOOLS, ptxas_version, tools_found
from workbench.timing import setting

KV_DTYPES = ("bf16", "e4m3")  # of the grid
GRID = tuple(itertools.product(ARCHS, KV_DTYPES, HEAD_DIMS, COLUMNS))


def compile_to(folder: Path, config: DecodeConfig, arch: str) -> tuple[Path, Path]:
    """Compile and write (PTX, cubin), named after the config."""
    return write_to(folder, f"gqa_{arch}_{describe(config)}", compile_for(config, arch))


def figures_of(config: DecodeConfig, arch: str, cubin: Path) -> dict:
    """What the plan and ptxas say."""
    cta = cta_of(config, arch)
    figures = {"warps": cta.threads // hw.WARP_THREADS, "stages": cta.stages}
    figures |= {"smem_bytes": cta.smem_bytes, "ptxas": ptxas_version(cubin)}
    return figures | static(cubin, config, arch).as_dict()


def print_static(figures: dict) -> None:
    """Resources, and the loop over keys."""
    print(
        f"\n{figures['registers']} registers, {figures['stack']} bytes of stack, "
        f"{figures['spills']} spills, {figures['smem_bytes']:,} bytes of shared memory"
    )
    loop = figures["loop"]
    print(f"\nLoop over keys, per warp and {figures['unit']}: {sum(loop.values()):g} instructions")
    for kind, count in loop.items():
        if count:
            print(f"  {kind:<22}{count:>6g}")


# -- one config -----------------------------------------------------------------------------------


def dump(case: Case, folder: Path) -> dict:
    """Print everything about the config of a case; returns it."""
    _, config = settled(case)
    print(f"gqa_lowlatency for {case.arch}: {describe(config)}")
    ptx, cubin = compile_to(folder, config, case.arch)
    found = {"case": str(case), "config": asdict(config), "arch": case.arch, "ptx": print_ptx(ptx)}
    if not tools_found():
        print(f"\n{HOW_TO_GET_TOOLS}")
        return found
    found["sass"] = print_sass(cubin)
    figures = figures_of(config, case.arch, cubin)
    print_static(figures)
    return found | figures


# -- the grid -------------------------------------------------------------------------------------


def row_of(case: Case, columns: int, folder: Path) -> dict:
    """Figures of one config, or why there are none."""
    row = {"kind": "static", "arch": case.arch, "kv_dtype": case.kv_dtype}
    row |= {"head_dim": case.head_dim, "columns": columns}
    try:
        _, config = settled(case)
    except (ValueError, NotImplementedError) as refusal:
        return row | {"refused": str(refusal)}
    if config.columns != columns:
        return row | {"refused": f"{config.row_tiles} row tiles of {config.columns} instead"}
    _, cubin = compile_to(folder, config, case.arch)
    return row | {"config": changed(config)} | figures_of(config, case.arch, cubin)


def changed(config: DecodeConfig) -> dict:
    """Its fields that are not as by default."""
    plain = asdict(DecodeConfig())
    return {name: value for name, value in asdict(config).items() if value != plain[name]}


def cases_of(case: Case) -> Iterator[tuple[Case, int]]:
    """(case, columns) of the grid; all that it does not vary is as in `case`."""
    for arch, kv_dtype, head_dim, columns in GRID:
        q_heads = case.kvH * max(1, columns // case.qL)
        fields = {"arch": arch, "kv_dtype": kv_dtype, "head_dim": head_dim, "qH": q_heads}
        yield replace(case, **fields), columns


def grid(case: Case, console: Console) -> list[dict]:
    """What made the figures, then a row per config."""
    cases = list(cases_of(case))
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row_of(one, columns, Path(folder))
            for one, columns in track(cases, "compiling", console=console, transient=True)
        ]
    head = {"kind": "setting", "date": datetime.date.today().isoformat(), **setting()}
    return [head | {"case": f"{case}, but for what a row names"}, *rows]


def table_of(rows: list[dict]) -> Table:
    """A line per config."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("arch", "K, V", "head_dim", "columns", "cluster", "warps", "stages", "registers")
    for name in (*names, "stack", "spills", "SMEM bytes", "SASS", "loop"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [row[name] for name in ("arch", "kv_dtype", "head_dim", "columns")]
        if "refused" in row:
            cells += ["-", "", "", "refused"]
        else:
            cells += [row["config"].get("cluster", 1), row["warps"], row["stages"]]
            cells += [row[name] for name in ("registers", "stack", "spills")]
            cells += [
                f"{row['smem_bytes']:,}",
                row["instructions"],
                f"{sum(row['loop'].values()):g}",
            ]
        table.add_row(*map(str, cells))
    return table


def show_grid(case: Case, report: Path | None) -> None:
    """Print the table, and write it as JSON."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    rows = grid(case, console)
    console.print(table_of(rows[1:]))
    if report:
        write_rows(report, rows)


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    if options.grid and not tools_found():
        return refuse(HOW_TO_GET_TOOLS)
    try:
        case = case_of(options)
        if options.grid:
            show_grid(case, options.json)
        else:
            figures = dump(case, options.out)
            if options.json:
                write_json(options.json, figures)
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    return 0
