"""The protocol between verbs and families: run, explain, dump, emulate and cycles use nothing else.

A family is attention, decode, latent keys, experts, Q8_0 or a step. Its module has a `FAMILY`,
which makes the problems that the flags spell, and a `Problem`, which draws inputs, calls the
kernels, judges their results and describes what is compiled and planned.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from lab.measure.timing import Sample
from lab.sass.kernel import Cell, Subject
from lab.tools.place import Place
from lab.tools.tables import Column
from ptxemu.report import LaunchReport

NAMES = ("fmha", "gqa", "mla", "moe", "q8_0", "steps")  # of the modules beside this one


class Problem(Protocol):
    """A call of an operator, or the same call by several of our kernels."""

    gap: ClassVar[str] = ""  # what stands between the plans of two problems
    alike: bool = False  # whether all of `calls` have to give the same bits

    @property
    def sizes(self) -> dict[str, Any]:
        """The first cells of the problem's row: its name, or its sizes."""
        return {"case": str(self)}

    @property
    def named(self) -> dict[str, Any]:
        """Fields of a dump's JSON before the figures of its kernels."""
        return {}

    def draw(self, seed: int, device: str) -> Any:
        """The inputs, on a device."""

    def calls(self, drawn: Any, place: Place) -> Mapping[str, Callable[[], Any]]:
        """Our kernels by name; '' where there is only one way."""

    def judge(self, drawn: Any, name: str, results: Any, slack: float) -> dict[str, Any]:
        """Errors of one of `calls`, and whether it is `ok`; ValueError where a result is wrong.
        slack: scales the limit."""

    def work(self, launches: Sequence[LaunchReport], place: Place) -> dict[str, Any]:
        """Further counts of emulated launches."""
        return {}

    def samples(self, drawn: Any, results: Any, place: Place) -> dict[str, Sample]:
        """Return what is timed on a GPU, by name."""
        return {}

    def plan(self, arch: str) -> Iterator[str]:
        """Yield the plan's lines: launches, roles and memory layout."""

    def kernels(self, arch: str) -> Iterable[Subject]:
        """All that the call launches."""


@dataclass(frozen=True)
class Grid:
    """A table of many kernels: its cells, its columns, and what the JSON says before them."""

    cells: Iterable[Cell]
    columns: Sequence[Column]
    named: Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A family of kernels: how its flags become problems, and how its results are printed."""

    # What its kernels are written for; the first is the default.
    archs: Callable[[argparse.Namespace], Sequence[str]]
    # The problems that the flags spell. Raises ValueError or NotImplementedError for what the
    # kernels refuse.
    problems: Callable[[argparse.Namespace, Place], Sequence[Problem]]
    # Prints the rows of a run; returns the head of its JSON.
    tell: Callable[[Sequence[dict[str, Any]], argparse.Namespace, Place], dict[str, Any]]
    # The kernels of `dump.py --grid`.
    grid: Callable[[argparse.Namespace], Grid] | None = None
    # Whether a run prints first where it runs.
    says_where: bool = False


def family_of(options: argparse.Namespace) -> Family:
    """The family of a command, of the NAMES."""
    return import_module(f"lab.problems.{options.subject}").FAMILY


def planned(options: argparse.Namespace) -> tuple[Sequence[Problem], str]:
    """The problems that the flags spell, and --arch, '' for the first of each kernel; nothing is
    run."""
    arch = options.arch or ""
    return family_of(options).problems(options, Place("plan", arch, "nothing is run")), arch


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether a row of a run is within tolerance."""
    return row["ok"] if "ok" in row else not row["wrong"]
