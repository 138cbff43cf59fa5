"""What the compiler made of one kernel or of a grid of them: files, figures and tables."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, read, tools_found
from kernelkit.compile.kernel import CompiledKernel
from lab.measure.timing import heading
from lab.tools.common import changed, describe, progress_bar, refuse, save_rows, write_json
from lab.tools.tables import Column, show, table
from lab.verbs.dump.files import print_ptx, print_sass, write_to


@dataclass(frozen=True)
class Subject:
    """A kernel to be dumped. what: it is, in words; stem: of its files, before the config.

    figures: of its cubin, resources and the loop that matters; show: prints them.
    """

    what: str
    stem: str
    config: Any
    arch: str
    compile: Callable[[], CompiledKernel]
    figures: Callable[[Path], dict[str, Any]] = lambda cubin: read(cubin)[0]
    show: Callable[[dict[str, Any]], None] = lambda figures: None

    @property
    def title(self) -> str:
        return f"{self.what} for {self.arch}: {describe(self.config)}"

    def write(self, folder: Path) -> tuple[Path, Path, float]:
        """(PTX, cubin, seconds to find or compile them), files named after the config."""
        start = time.perf_counter()
        compiled = self.compile()
        seconds = time.perf_counter() - start
        stem = f"{self.stem}_{self.arch}_{describe(self.config)}"
        return *write_to(folder, stem, compiled), seconds


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


def dump_all(options: argparse.Namespace, subjects: Callable[[], Iterable[Subject]],
             **named: Any) -> int:  # fmt: skip
    """One kernel after another, and their figures in --json; named: what that says before. Returns
    the exit code."""
    try:
        found = [named | dump(subject, options.out) for subject in subjects()]
    except (ValueError, NotImplementedError) as refusal:
        return refuse(refusal)
    if options.json:
        write_json(options.json, found[0] if len(found) == 1 else found)
    return 0


# What names a kernel of a grid, and what compiles it into a folder: figures, or a refusal.
Cell = tuple[dict[str, Any], Callable[[Path], dict[str, Any]]]


def timed_cell(subject_of: Callable[[Any], Subject], config: Any, arch: str) -> Cell:
    """The kernel of a config, and how long it takes to compile."""

    def figures(folder: Path) -> dict[str, Any]:
        subject = subject_of(config)
        _, cubin, seconds = subject.write(folder)
        return {"compile_seconds": round(seconds, 2)} | subject.figures(cubin)

    return {"arch": arch, "config": changed(config)}, figures


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


def dump_grid(
    options: argparse.Namespace, cells: Iterable[Cell], columns: Sequence[Column], **named: Any
) -> int:
    """A table with a row per kernel; named: what --json says before. Returns the exit code."""
    if not tools_found():
        return refuse(HOW_TO_GET_TOOLS)
    found = [{"kind": "static", **row} for row in rows_of(cells, Console(stderr=True))]
    show(*table("", columns, found))
    if options.json:
        save_rows(options.json, [heading(**named), *found])
    return 0
