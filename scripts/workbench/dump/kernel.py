"""What the compiler made of one kernel or of a grid of them: files, figures and tables."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kernelkit.kernel import CompiledKernel
from workbench.common import describe, progress_bar, refuse, save_rows, write_json
from workbench.dump.files import print_ptx, print_sass, write_to
from workbench.sass.listing import HOW_TO_GET_TOOLS, read, tools_found
from workbench.tables import Table, show
from workbench.timing import heading


def resources_alone(cubin: Path) -> dict[str, Any]:
    """Of a kernel whose loops nobody counts."""
    return read(cubin)[0]


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
    figures: Callable[[Path], dict[str, Any]] = resources_alone
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
    subject.show(figures)
    return found | figures


def print_kinds(title: str, counts: dict[str, float]) -> None:
    """Instructions by kind."""
    print(f"\n{title}: {sum(counts.values()):g} instructions")
    for kind, count in counts.items():
        if count:
            print(f"  {kind:<22}{count:>8.4g}")


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


Row = Callable[[Path], dict[str, Any]]


def dump_grid(
    options: argparse.Namespace, rows: Iterable[Row], table: Callable[[list[dict]], Table],
    **named: Any,
) -> int:  # fmt: skip
    """A table with a row per kernel; rows: each compiles one in a folder, and says what there is to
    say or raises its refusal. Returns the exit code."""
    if not tools_found():
        return refuse(HOW_TO_GET_TOOLS)
    found = []
    with tempfile.TemporaryDirectory() as folder, progress_bar(Console(stderr=True)) as bar:
        for row in bar.track([*rows], description="compiling"):
            found.append({"kind": "static", **row(Path(folder))})
    show(*table(found))
    if options.json:
        save_rows(options.json, [heading(**named), *found])
    return 0
