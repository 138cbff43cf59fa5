"""Every form of an instruction that a shipped kernel uses, on a GPU beside the emulator.

    python -m lab.bringup.instructions --arch sm_100a --json out/instructions.json
    python -m lab.bringup.instructions --arch sm_100a --emulate

Programs of a few instructions come before those of the tensor core. Each runs in a process of its
own where the one before it hung or died. A row says of a program: `same bits` as the emulator,
`within bounds` of the manual where an instruction is an approximation, `differs` with the first
differences, `refused` by the GPU's compiler or by the emulator with the reason, `hang`, or `died`
of an error while it ran; and of one that failed, which kernels use its forms. With --emulate, which
needs no GPU: `as expected`, where a program's file says what it gives, or `runs`, where nothing but
the emulator does. On Hopper (--arch sm_90a) it is a rehearsal, and what that refuses is `not on
Hopper`. Exit code 1: a program failed; 2: refused, without a GPU of the architecture.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.bringup.programs import Trial, every
from lab.bringup.steps import ARCHS, HOPPER
from lab.bringup.table import Table, read
from lab.silicon.conformance import everything, hw_runner
from lab.silicon.conformance.campaign import Campaign, Device, Outputs
from lab.silicon.conformance.ptx_program import aimed_at, check
from lab.tools import groups
from lab.tools.common import refuse, write_json

SAME, NEAR, EXPECTED, RUNS = "same bits", "within bounds", "as expected", "runs"
DIFFERS, REFUSED, HANG, DIED, LEFT = "differs", "refused", "hang", "died", "not run"
ABSENT = "not on Hopper"  # a refusal there, of what Blackwell has
GOOD = (SAME, NEAR, EXPECTED, RUNS)
MOST_HANGS = 3  # one after the other; the GPU is then past helping
_WORDS = 400  # characters of a difference


@dataclass
class Row:
    """Result of one program.

    forms: forms of the program that kernels use.
    kernels: kernels that depend on the forms that failed."""

    program: str
    verdict: str = LEFT
    differences: list[str] = field(default_factory=list)
    forms: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    seconds: float = 0.0
    wrong: set[str] = field(default_factory=set)  # forms that differ, where that is known

    @property
    def failed(self) -> bool:
        return self.verdict not in (*GOOD, ABSENT)

    def differ(self, found: dict[str, list[str]]) -> None:
        """found: form -> differences."""
        self.verdict, self.wrong = DIFFERS, {*found}
        every = (words[:_WORDS] for some in found.values() for words in some)
        self.differences = [*dict.fromkeys(every)]

    def as_dict(self) -> dict[str, Any]:
        """Forms and kernels where it failed; the table has those of all."""
        told = asdict(self)
        silent = ("wrong",) if self.failed else ("wrong", "forms", "kernels", "differences")
        return {key: value for key, value in told.items() if key not in silent}


@dataclass
class Judge:
    """Runs programs. gpu: None, where the emulator is alone."""

    arch: str
    known: Table
    emulator: Device
    gpu: Device | None = None

    def rows(self, trials: Iterable[Trial]) -> Iterator[Row]:
        """Run trials in order; after several hangs, the remaining ones are not run."""
        hung = 0
        for trial in trials:
            row, start = Row(trial.name), time.perf_counter()
            if hung < MOST_HANGS:
                self._judge(trial, row)
                hung = hung + 1 if row.verdict == HANG else 0
            else:
                row.differences = [f"{MOST_HANGS} programs before it hung"]
            row.seconds = round(time.perf_counter() - start, 3)
            yield row

    def _judge(self, trial: Trial, row: Row) -> None:
        """The verdict, whatever becomes of the program."""
        who = "the emulator"
        try:
            emulated, forms = self.emulator.ask(trial.emulated, self.arch)
            row.forms = sorted(forms & self.known.forms.keys())
            if self.gpu is None:
                self._look(trial, row, emulated)
            else:
                who = "the GPU"
                aimed = aimed_at(trial.case.program, self.arch)
                self._compare(trial, row, self.gpu.ask(hw_runner.launch, aimed), emulated)
        except Late:
            row.verdict, row.differences = HANG, [f"{who} did not end in time"]
        except BrokenProcessPool as error:
            row.verdict, row.differences = DIED, [f"{who}: {error}"[:_WORDS]]
        except Exception as error:  # noqa: BLE001  (whatever it is, it is the verdict)
            refused = ABSENT if self.arch == HOPPER else REFUSED
            row.verdict = DIED if who == "the GPU" and faulted(error) else refused
            row.differences = [f"{who}: {type(error).__name__}: {error}"[:_WORDS]]

    def _compare(self, trial: Trial, row: Row, found: Outputs, emulated: Outputs) -> None:
        """The GPU with the emulator, and with what is known besides."""
        result = Campaign()
        result.judge(trial.case, found, emulated)
        wrong = {form: tally.examples for form, tally in everything.different(result).items()}
        near = any(tally.same < tally.inputs for tally in result.forms.values())
        row.verdict = NEAR if near else SAME
        if wrong or (trial.checked and (wrong := unlike_file(trial, found))):
            row.differ(wrong)

    def _look(self, trial: Trial, row: Row, emulated: Outputs) -> None:
        """The emulator with what is known besides, if anything is."""
        row.verdict = EXPECTED if trial.checked else RUNS
        if trial.checked and (wrong := unlike_file(trial, emulated)):
            row.differ(wrong)


def faulted(error: Exception) -> bool:
    """The program was loaded, and ended with an error of the driver."""
    return isinstance(error, RuntimeError) and not str(error).startswith("cuModuleLoadDataEx")


def unlike_file(trial: Trial, found: Outputs) -> dict[str, list[str]]:
    """All forms of the program, if the outputs are others than its file says."""
    try:
        check(trial.case.program, found)
    except AssertionError as difference:
        return {form: [str(difference)] for form in trial.case.forms}
    return {}


def blame(rows: list[Row], known: Table) -> None:
    """Give each row that failed the kernels that depend on it: by the forms that differ, where the
    program tells, and that no other program shows to be right; if all are, by all of them."""
    right = {form for row in rows if row.verdict in GOOD for form in row.forms}
    for row in rows:
        if row.failed and row.verdict != LEFT:
            suspects = [f for f in row.forms if not row.wrong or f in row.wrong or " " in f]
            row.kernels = known.kernels_of([f for f in suspects if f not in right] or suspects)


def perform(options: argparse.Namespace) -> int:
    """Run the programs that the flags select; return the exit code."""
    known, devices = read(options.arch), [Device(gpu=False), Device()]
    try:
        judge = Judge(options.arch, known, devices[0])
        setting = {"gpu": "none, the emulator alone", "target": options.arch}
        if not options.emulate:
            judge.gpu = devices[1]
            try:
                setting = judge.gpu.ask(hw_runner.device)
            except Exception as error:  # noqa: BLE001  whatever keeps a GPU from answering
                return refuse(f"no GPU to compare with: {error}; --emulate needs none")
            if setting["target"] != options.arch:
                return refuse(f"{setting['gpu']} is {setting['target']}, not {options.arch}")
        rows = []
        for row in judge.rows(chosen(every(known.forms), options.only)):
            rows.append(row)
            print(f"{row.verdict:<14}{row.seconds:7.2f} s  {row.program}", flush=True)
            for words in row.differences:
                print(f"    {words}", flush=True)
    finally:
        for device in devices:
            device.close()
    blame(rows, known)
    return finish(options, setting, rows, known)


def chosen(trials: Iterable[Trial], words: list[str]) -> Iterator[Trial]:
    return (trial for trial in trials if not words or any(word in trial.name for word in words))


def finish(
    options: argparse.Namespace, setting: dict[str, str], rows: list[Row], known: Table
) -> int:
    """Say and write what came of it; returns the exit code."""
    failed, untested = [row for row in rows if row.failed], known.untested()
    for row in failed:
        if row.kernels:
            print(f"{row.program} {row.verdict}: used by {', '.join(row.kernels)}")
    for form, why in untested.items():
        print(f"without a program: {form}: {why}")
    counts = Counter(row.verdict for row in rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if options.json:
        document = {"setting": setting, "rows": [row.as_dict() for row in rows]}
        write_json(options.json, document | {"untested": untested})
    return int(bool(failed))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bringup.instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "architecture of the GPU; sm_90a for a rehearsal on Hopper; default: sm_100a"
    parser.add_argument("--arch", choices=ARCHS, default=ARCHS[0], help=words)
    parser.add_argument(
        "--emulate", action="store_true", help="run only the emulator, without a GPU"
    )
    words = "programs whose name contains one of these words; default: all"
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help=words)
    groups.add_json(parser, "a row per program")
    return perform(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
