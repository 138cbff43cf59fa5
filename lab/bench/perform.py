"""Run `bench.py` for any family: time problems on a GPU, print tables, and read files again.

A module of `lab.bench` defines how its family is timed as `BENCH`, a `Bench` made from the flags.
Without a GPU a run prints what follows from sizes alone.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.console import Console

from lab.measure.timing import heading, setting
from lab.report.documents import Document, measured
from lab.tools import tables
from lab.tools.common import progress_bar, read_rows, refuse, save_rows

OUTPUT = frozenset({"show", "markdown", "plot"})  # flags that go with --show in every family


class Bench(ABC):
    """Benchmark of a family, for the flags of one run."""

    kind: ClassVar[str]  # of a timed row in a file
    more: ClassVar[Collection[str]] = ()  # kinds of other rows that `tell` prints
    no_gpu: ClassVar[str] = ""  # what is not done without a GPU
    static_columns: ClassVar[Sequence[tables.Column]] = ()  # of what is known without times
    selects: ClassVar[Collection[str]] = ()  # flags that choose rows of a file

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @abstractmethod
    def problems(self) -> Sequence[Any]:
        """Return the problems. Raises ValueError for flags that are refused."""

    @abstractmethod
    def setting(self) -> dict[str, Any]:
        """Return what a file says of inputs and method."""

    def machine(self) -> dict[str, Any]:
        """Measure what figures of this GPU are compared with; return it for the file."""
        return {}

    @abstractmethod
    def rows(self, problem: Any) -> list[dict]:
        """Return a row per peer, with its times or why it is `refused`."""

    def once(self, problems: Sequence[Any]) -> list[dict]:
        """Return rows that are measured once, before the problems."""
        return []

    def untimed(self, problems: Sequence[Any]) -> None:
        """Print why nothing is timed."""
        print(self.no_gpu)

    def known(self, problems: Sequence[Any]) -> list[dict]:
        """Return what follows from the sizes of the problems."""
        return [problem.sizes for problem in problems]

    def static(self, problems: Sequence[Any]) -> list[dict]:
        """Print what is known without times; return its rows."""
        rows = [{"kind": "static", **row} for row in self.known(problems)]
        tables.show(*tables.table("static figures", self.static_columns, rows))
        return rows

    @abstractmethod
    def show(self, rows: Sequence[dict]) -> None:
        """Print the table of the timed rows of one problem."""

    def tell(self, rows: Sequence[dict]) -> None:  # noqa: B027 - most families have no more
        """Print what the tables of single problems do not show, after the last one."""

    @abstractmethod
    def subject(self, row: Mapping[str, Any]) -> Any:
        """Return what the rows of one problem have in common."""

    def has(self, row: Mapping[str, Any]) -> bool:
        """Whether the flags select this row of a file."""
        return True

    def markdown(self, rows: Sequence[dict]) -> str:
        """Return one table of all rows for a page."""
        raise NotImplementedError

    def draw(self, path: Path, document: Document) -> None:
        """Draw the picture of --plot."""
        raise NotImplementedError

    @property
    def wants_times(self) -> bool:
        return True

    @property
    def wants_static(self) -> bool | None:
        """Whether static figures are printed; None: if nothing is timed."""
        return None


def bench_of(options: argparse.Namespace) -> Bench:
    """Return the benchmark of a command's family."""
    return import_module(f"lab.bench.{options.subject}").BENCH(options)


def perform(options: argparse.Namespace) -> int:
    bench = bench_of(options)
    if options.show:
        return show_again(bench)
    try:
        if getattr(options, "markdown", False):
            raise ValueError("--markdown without --show: it is of the file of an earlier run")
        problems = bench.problems()
    except ValueError as error:
        return refuse(error)
    head, rows = heading(**bench.setting()), []
    if bench.wants_times and torch.cuda.is_available():
        rows = timed(bench, problems, head)
    elif bench.wants_times:
        bench.untimed(problems)
    wanted = bench.wants_static
    static = bench.static(problems) if wanted or (wanted is None and not rows) else []
    if options.json:
        save_rows(options.json, [head, *static, *rows])
    return 0


def timed(bench: Bench, problems: Sequence[Any], head: dict[str, Any]) -> list[dict]:
    """Return the rows of all problems. Each is shown, and kept in --json, when it is done."""
    print(torch.cuda.get_device_name())
    head |= bench.machine()
    rows = bench.once(problems)
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(problems))
        for problem in problems:
            bar.update(task, description=str(problem))
            gc.collect()
            torch.cuda.empty_cache()
            found = [{"kind": bench.kind, **row} for row in bench.rows(problem)]
            rows += found
            if bench.options.json:
                save_rows(bench.options.json, [head, *rows])
            show(bench, found)
            bar.advance(task)
    tell(bench, head, rows)
    draw(bench, head, rows)
    return [*rows, {"kind": "after", "gpu": setting().get("gpu")}]


def show_again(bench: Bench) -> int:
    """Print the tables of the file of an earlier run."""
    options, selects = bench.options, sorted(bench.selects)
    if others := sorted(options.given - OUTPUT - {*selects}):
        return refuse(f"--show with --{others[0].replace('_', '-')}: a file is shown as it is")
    head, *found = read_rows(options.show)
    rows = [row for row in found if row["kind"] in (bench.kind, *bench.more) and bench.has(row)]
    if not (times := _times(bench, rows)):
        chosen = " with this " + " or ".join(f"--{name}" for name in selects) if selects else ""
        return refuse(f"{options.show}: no times{chosen}")
    if getattr(options, "markdown", False):
        print(bench.markdown(times))
    else:
        show(bench, times)
        tell(bench, head, rows)
    draw(bench, head, rows)
    return 0


def show(bench: Bench, rows: Sequence[dict]) -> None:
    """Print a table for each problem of these rows."""
    for _, group in itertools.groupby(_times(bench, rows), key=bench.subject):
        bench.show([*group])


def tell(bench: Bench, head: Mapping[str, Any], rows: Sequence[dict]) -> None:
    """Print what follows the tables of problems, and where and how it was measured."""
    bench.tell(rows)
    words = (head.get("gpu", {}).get("name", "no GPU"), head["date"], head.get("order"))
    print(", ".join(filter(None, words)))


def draw(bench: Bench, head: dict[str, Any], rows: Sequence[dict]) -> None:
    """Draw the picture of --plot, if there are times."""
    path, times = getattr(bench.options, "plot", None), _times(bench, rows)
    if path and times:
        bench.draw(path, measured(head, times))


def _times(bench: Bench, rows: Sequence[dict]) -> list[dict]:
    return [row for row in rows if row["kind"] == bench.kind]
