"""Whether anything tells a mutant from its kernel: a finding, its bits, a deadlock, a refusal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ptxemu import Deadlock, LaunchReport, Options, PtxEmuError
from ptxemu.errors import LimitExceeded, PtxSyntaxError, UnsupportedPtx

CHECKER, BITS, DEADLOCK, REFUSED = KILLERS = ("checker", "wrong bits", "deadlock", "refused")
SURVIVED, BROKEN = "", "broken"  # broken: the mutant is no PTX, which says nothing
LIMIT = 120.0  # seconds of a launch; a mutant may run on for ever

# The run that tells most comes first; the others see what is left.
SCHEDULES: tuple[Options, ...] = (
    Options(check=True, limit=LIMIT),
    *(Options(policy="adversarial", seed=seed, limit=LIMIT) for seed in range(2)),
    Options(policy="random", limit=LIMIT),
)
STRICT = Options(check=True, strict=True, limit=LIMIT)

Results = Sequence[Any]
# (PTX, options) -> (results, reports of the launches)
Run = Callable[[str, Options], tuple[Results, Sequence[LaunchReport]]]


@dataclass(frozen=True)
class Verdict:
    """by: one of KILLERS, SURVIVED or BROKEN; how: in the words of what noticed it."""

    by: str
    how: str = ""
    schedule: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.by in KILLERS


class Judge:
    """Compares runs of mutants with those of the kernel `ptx`, which have to agree."""

    def __init__(
        self,
        ptx: str,
        run: Run,
        same: Callable[[Results, Results], bool],
        schedules: Sequence[Options] = SCHEDULES,
    ) -> None:
        self.ptx = ptx
        self.run = run
        self.same = same
        self.schedules = schedules
        self.known: set[tuple] = set()  # findings that the kernel itself has
        self._notes: set[tuple] | None = None
        self.expected, launches = run(ptx, schedules[0])
        self._note(launches)
        for options in schedules[1:]:
            results, launches = run(ptx, options)
            self._note(launches)
            if not same(results, self.expected):
                raise ValueError(f"the kernel itself differs under {describe(options)}")

    def _note(self, launches: Sequence[LaunchReport]) -> None:
        self.known |= {finding.place for launch in launches for finding in launch.errors}

    def verdict(self, ptx: str) -> Verdict:
        """Of the first schedule that tells."""
        began = time.perf_counter()
        found = Verdict(SURVIVED)
        for options in self.schedules:
            found = replace(self._under(options, ptx), schedule=describe(options))
            if found.by != SURVIVED:
                break
        return replace(found, seconds=round(time.perf_counter() - began, 2))

    def noted(self, ptx: str) -> bool:
        """The strict rules, which go by the text of the manual, note what they do not note of the
        kernel."""
        if self._notes is None:
            self._notes = self._all_findings(self.ptx)
        return bool(self._all_findings(ptx) - self._notes)

    def _all_findings(self, ptx: str) -> set[tuple]:
        _, launches = self.run(ptx, STRICT)
        return {finding.place for launch in launches for finding in launch.findings}

    def _under(self, options: Options, ptx: str) -> Verdict:
        try:
            results, launches = self.run(ptx, options)
        except (Deadlock, LimitExceeded) as error:
            return Verdict(DEADLOCK, _first_line(error))
        except (PtxSyntaxError, UnsupportedPtx) as error:
            return Verdict(BROKEN, _first_line(error))
        except PtxEmuError as error:
            return Verdict(REFUSED, f"{type(error).__name__}: {_first_line(error)}")
        found = [finding for launch in launches for finding in launch.errors]
        new = [finding for finding in found if finding.place not in self.known]
        if new:
            return Verdict(CHECKER, f"{new[0].check}: {new[0].message}")
        return Verdict(SURVIVED if self.same(results, self.expected) else BITS)


def describe(options: Options) -> str:
    """The schedule in a word or two."""
    if options.policy == "round-robin":
        return options.policy + ", checked" * options.check
    return f"{options.policy} {options.seed}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
