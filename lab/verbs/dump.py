"""What `dump.py` does for every family: a kernel as the compiler made it, or a grid of kernels."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from lab.measure.timing import heading
from lab.problems.family import Grid, family_of, planned
from lab.sass.kernel import Cell, Subject, print_ptx, print_sass
from lab.tools.common import progress_bar, refuse, save_rows, write_json
from lab.tools.tables import show, table


def dump(subject: Subject, folder: Path) -> dict[str, Any]:
    """Print everything about a kernel; returns it."""
    print(subject.title)
    ptx, cubin, seconds = subject.write(folder)
    print(f"compiled in {seconds:.1f} s")
    found = {"config": asdict(subject.config), "arch": subject.arch}
    found |= {"compile_seconds": round(seconds, 2), "ptx": print_ptx(ptx)}
    if not tools_found():
        print(f"\n{HOW_TO_GET_TOOLS}")
        return found
    found["sass"] = print_sass(cubin)
    figures = subject.figures(cubin)
    smem = figures.get("smem_bytes")
    memory = f", {smem:,} bytes of shared memory" if smem else ""
    print(
        f"\n{figures['registers']} registers, {figures['stack']} bytes of stack, "
        f"{figures['spills']} spills{memory}"
    )
    if figures.get("serialised") is not None:
        print(f"wgmma serialised: {'yes' if figures['serialised'] else 'no'}")
    subject.show(figures)
    return found | figures


def subjects_of(options: argparse.Namespace) -> Iterable[tuple[dict[str, Any], Subject]]:
    """Each kernel once, and what the JSON says before its figures."""
    problems, arch = planned(options)
    known = set()
    for problem in problems:
        for subject in problem.kernels(arch):
            key = subject.what, subject.config, subject.arch
            if key not in known:
                known.add(key)
                yield problem.named, subject


def dump_all(options: argparse.Namespace) -> int:
    """Dump kernels one by one, with their figures in --json. Return the exit code."""
    found = [named | dump(subject, options.out) for named, subject in subjects_of(options)]
    if options.json:
        write_json(options.json, found[0] if len(found) == 1 else found)
    return 0


def rows_of(cells: Iterable[Cell], console: Console) -> list[dict]:
    """Figures of every kernel of a grid, or why there are none."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, progress_bar(console) as bar:
        for named, figures in bar.track([*cells], description="compiling"):
            try:
                rows.append(named | figures(Path(folder)))
            except (ValueError, NotImplementedError) as refusal:
                rows.append(named | {"refused": str(refusal)})
    return rows


def dump_grid(options: argparse.Namespace, grid: Grid) -> int:
    """A table with a row per kernel. Returns the exit code."""
    if not tools_found():
        return refuse(HOW_TO_GET_TOOLS)
    found = [{"kind": "static", **row} for row in rows_of(grid.cells, Console(stderr=True))]
    show(*table("", grid.columns, found))
    if options.json:
        save_rows(options.json, [heading(**grid.named), *found])
    return 0


def perform(options: argparse.Namespace) -> int:
    try:
        make = family_of(options).grid
        if make and getattr(options, "grid", False):
            return dump_grid(options, make(options))
        return dump_all(options)
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
