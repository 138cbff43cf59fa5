"""The attention kernels whose mutants are judged, each with a problem that uses all its edges: more
tiles than ring stages, maxima that move, boundary tiles, NaN past the lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from unittest import mock

import torch

import ptxemu
from ptxemu import LaunchReport, Options, Report
from ptxemu.host.emulator import Emulator
from ptxemu.host.engine import host_program
from ptxemu.host.launch_config import LaunchRequest
from ptxemu.mutation.catalogue import CLASSES
from ptxemu.mutation.classes import Mutant, mutants
from ptxemu.mutation.observe import observe
from ptxemu.mutation.text import Text
from workbench.mutation.verdict import SCHEDULES, Judge
from workbench.problems import attention as cases
from workbench.problems.attention import Case, same_bits

MOVING = {"causal": True, "amplitude": 4.0}  # maxima move from tile to tile
TAIL = {"kv_lens": (650,), **MOVING}

Outcome = tuple[tuple[torch.Tensor, ...], list[LaunchReport]]


@dataclass(frozen=True)
class Subject:
    """A problem of `fmha.attention`. changes: further arguments; only: the mutation classes of
    interest, by a part of their names."""

    case: Case
    changes: dict[str, Any] = field(default_factory=dict)
    only: str = ""

    def run(self, options: Options) -> Outcome:
        """Results and reports; outputs are poisoned before."""
        with poisoned_outputs():
            results, reports = cases.run_reported(self.case, options, **self.changes)
        return results, [launch for report in reports for launch in report.launches]

    def run_changed(self, ptx: str, options: Options) -> Outcome:
        """The same with other PTX in every launch."""
        with changed_launches(lambda _: ptx):
            return self.run(options)

    @cached_property
    def text(self) -> str:
        """PTX of the kernel."""
        texts: list[str] = []
        with changed_launches(lambda ptx: texts.append(ptx) or ptx):
            self.run(Options(limit=None))
        (text,) = set(texts)
        return text

    def mutants(self) -> list[Mutant]:
        text = Text(self.text, observe(self.run))
        return mutants(text, (kind for kind in CLASSES if self.only in kind.name))

    def judge(self, schedules: Sequence[Options] = SCHEDULES) -> Judge:
        return Judge(self.text, self.run_changed, same_bits, schedules)


def _problem(queries: int, keys: int, **options: Any) -> Subject:
    return Subject(Case(queries, keys, **options))


def _of_head_dim(dim: int) -> dict[str, Subject]:
    """Both schedules on both P paths."""
    base = partial(_problem, 130, 700, dims=(dim, dim), schedule="base", **TAIL)
    pingpong = partial(_problem, 260, 700, dims=(dim, dim), schedule="pingpong", **TAIL)
    return {
        f"{dim} {schedule} {path}": make(p_path=path)
        for schedule, make in (("base", base), ("pingpong", pingpong))
        for path in ("tmem", "smem")
    }


SUBJECTS: dict[str, Subject] = {
    **_of_head_dim(64),
    **_of_head_dim(128),
    "512 pair": _problem(130, 520, dims=(512, 512), kv_lens=(500,), **MOVING),
    # No lengths: the fence of zeroed V rows would stand in for that of the gathered Q. A window,
    # for more than one masked tile.
    "64 packed heads": _problem(
        50, 1000, heads=(6, 2), window=(700, None), pack_heads=True, schedule="base", **MOVING
    ),
    "64 dependent launch": Subject(
        Case(130, 300, schedule="base"), changes={"pdl": True}, only="depend"
    ),
}


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """torch.empty returns NaN, so that what a kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def changed_launches(change: Callable[[str], str]) -> Iterator[None]:
    """Within the block every emulated launch runs `change` of its PTX."""

    def run(code: Any, pointers: Sequence[int], options: Options | None = None) -> Report:
        emulator = Emulator(options)

        def launcher(request: LaunchRequest) -> Any:
            return emulator(dataclasses.replace(request, ptx=change(request.ptx)))

        host_program(code).call(pointers, launcher)
        return emulator.report

    with mock.patch.object(ptxemu, "run_host", run):
        yield
