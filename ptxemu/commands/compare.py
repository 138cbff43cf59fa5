"""`python -m ptxemu compare`: where two runs, or a run and a reference, first differ."""

from __future__ import annotations

import argparse
import io
import json
import shlex
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ptxemu.commands import subject as subjects
from ptxemu.commands.subject import Progress
from ptxemu.host.command_line import add_place_arguments, output_file, source_lines
from ptxemu.options import POLICIES
from ptxemu.schedules import Schedule, schedule
from ptxemu.watch import watched

if TYPE_CHECKING:
    from ptxemu.commands.launch_tensors import Found, Judgement
    from ptxemu.difference import Difference
    from ptxemu.inspect.snapshot import Write

ABOUT = f"""\
Find where two runs of your CuTe DSL kernels first differ, and what wrote there.

The script runs twice: with two schedules (--schedule, --against), or with other arguments
(--against-arguments), such as another config; without any of these, with the schedules round-robin
and adversarial. Or it runs once, and is compared with a reference in torch:

    def reference(x, w):              # variables of the script, as they were before the launch
        return {{"y": x @ w}}           # as they should be after it

After each launch the tensors among the script's variables are compared by name. At the first
difference the run stops, and is repeated to watch that element. The report names the launch, the
element, the smallest box that holds all differing elements, both values, and the line of Python
that wrote the element. With --at FILE.py:LINE, tiles in shared memory and tensor memory are
compared instead, as warps see them when they reach that line.

{subjects.PROTOCOL}
torch, numpy and random are seeded before each run; the script's output is not shown.

{subjects.EXIT_CODES}
A difference is a finding."""
_CLOSE = 0.01  # of a reference, where nobody says otherwise: sums of bf16 products agree to that


@dataclass(frozen=True)
class Run:
    """Run to compare; `label` is its name in the report."""

    label: str
    subject: subjects.Subject
    schedule: Schedule
    changes: Mapping[str, Any]

    def go(self, seen: AbstractContextManager[Any]) -> tuple[Any, str]:
        """(what `seen` gives, how the run failed)."""
        from ptxemu.commands.launch_tensors import Enough

        print(f"{self.label} ...", file=sys.stderr, flush=True)
        began, failure = time.monotonic(), ""
        _seed()
        options = {**self.changes, **self.schedule._asdict()}
        nowhere = io.StringIO()
        with (
            watched(**options) as report,
            seen as result,
            redirect_stdout(nowhere),
            suppress(Enough),
        ):
            failure = subjects.failure_of(self.subject, self.schedule, quiet=True)
        count, seconds = len(report.launches), time.monotonic() - began
        launches = "launch" if count == 1 else "launches"
        failure = failure.partition("\n")[0]
        told = f": {failure}" if failure else ""
        print(f"  {count} {launches} in {seconds:.1f} s{told}", file=sys.stderr, flush=True)
        return result, failure


def main(words: list[str] | None, program: str | None = None) -> int:
    """Print the first difference; returns the exit code."""
    parser = arguments_of(program)
    options = subjects.parse(parser, words)
    asked = options.against or options.against_arguments is not None
    if options.reference and (asked or options.at):
        parser.error("--reference excludes --against, --against-arguments and --at")

    from ptxemu.host.emulator import Emulator
    from ptxemu.host.gpu_machine import machine_with_gpu

    with source_lines(), machine_with_gpu(Emulator(), options.gpu):
        try:
            return _compared(options)
        except (subjects.Refused, ValueError) as error:
            parser.error(str(error))


def _compared(options: argparse.Namespace) -> int:
    first, second = _runs(options)
    if options.at:
        return _tiles(options, first, second)
    from ptxemu.commands.launch_tensors import compared, recorded, referred

    judgement: Judgement
    if options.reference:
        tolerance = _CLOSE if options.tolerance is None else options.tolerance
        reference: Any = subjects.function_of(options.reference)
        judgement, failure = first.go(referred(reference, tolerance))
        runs, labels = [first], ("the run", "the reference")
        if judgement.error:
            raise subjects.Refused(f"reference {options.reference}: {judgement.error}")
        if judgement.launches and not judgement.judged and not failure:
            raise subjects.Refused(
                f"no launch has tensors named like the parameters of {options.reference}; "
                f"there are: {', '.join(judgement.known) or 'none'}"
            )
    else:
        launches, failure = first.go(recorded())
        judgement, _ = second.go(compared(launches, options.tolerance or 0.0))
        runs, labels = [first, second], (first.label, second.label)
    if not judgement.launches:
        print(f"nothing was launched{f': {failure}' * bool(failure)}", file=sys.stderr)
        return subjects.REFUSED
    writes = [_writes(run, judgement.found) for run in runs] if judgement.found else []
    _tell(options, judgement, labels, writes)
    return subjects.WRONG if judgement.found or failure else subjects.RIGHT


def _runs(options: argparse.Namespace) -> tuple[Run, Run]:
    changes = {"limit": subjects.limit_of(options), "progress": Progress()}
    other, words = options.against, options.against_arguments
    if other is None:
        other = options.schedule if words is not None else Schedule("adversarial", 0)
    changed = argparse.Namespace(**vars(options))
    if words is not None:
        changed.rest = [*options.rest[: not options.module], *shlex.split(words)]
    labels = _label(options.schedule), _label(other)
    if words is not None:
        labels = labels[0], " ".join([labels[1], words]).strip()
    return (
        Run(labels[0], subjects.subject_of(options), options.schedule, changes),
        Run(labels[1], subjects.subject_of(changed), other, changes),
    )


def _label(schedule: Schedule) -> str:
    """A policy that leaves nothing to chance has no seed."""
    return schedule.policy if schedule.policy == POLICIES[0] else str(schedule)


def _writes(run: Run, found: Found) -> list[Write]:
    from ptxemu.commands.launch_tensors import written

    return run.go(written(found))[0]


def _tiles(options: argparse.Namespace, first: Run, second: Run) -> int:
    """Compare what warps see at a line."""
    from ptxemu.difference import first_tile_difference
    from ptxemu.request import Stop

    stop = Stop(
        at=options.at[0],
        dump=("smem", "tmem"),
        cta=options.cta,
        warp=options.warp,
        when=options.when,
        regions=tuple(options.region),
        limit=options.dump_limit,
    )

    def of(run: Run) -> Any:
        from contextlib import nullcontext

        return lambda: run.go(nullcontext())

    difference = first_tile_difference(of(first), stop, other=of(second))
    if difference is None:
        print(f"no tile differs at {stop.at} between {first.label} and {second.label}")
        return subjects.RIGHT
    print(difference)
    _write_json(options, {"at": stop.at, **_difference(difference)})
    return subjects.WRONG


def _tell(
    options: argparse.Namespace,
    judgement: Judgement,
    labels: tuple[str, str],
    writes: list[list[Write]],
) -> None:
    found = judgement.found
    if found is None:
        names = ", ".join(judgement.known) or "none"
        print(f"nothing differs between {labels[0]} and {labels[1]} in {judgement.judged} of "
              f"{judgement.launches} launches; tensors: {names}")  # fmt: skip
        _write_json(options, {"difference": None, "tensors": [*judgement.known]})
        return
    from ptxemu.check.text import at_source, cut

    difference = found.difference
    name, place = difference.name, list(difference.index)
    box = ", ".join(f"{a}:{b + 1}" for a, b in zip(found.low, found.high, strict=True))
    lines = [
        f"launch {found.launch} (from 0), kernel {cut(found.entry)}",
        f"first difference: {name}{place} is {difference.first} by {labels[0]}, and "
        f"{difference.second} by {labels[1]}",
        f"  {difference.different} of {difference.size} elements of {name} {found.shape} differ, "
        f"all of them in {name}[{box}]",
    ]
    if found.shifted:
        lines.append(
            f"  what is there belongs to another place: by {labels[1]} the same values are "
            f"{name}{found.shifted}"
        )
    if found.others:
        lines.append(f"  different before this launch already: {', '.join(found.others)}")
    for label, some in zip(labels, writes, strict=False):
        lines += [f"  {label}: nobody wrote it in this launch"] * (not some)
        for number, write in enumerate(reversed(some)):
            when = "before that" if number else "last written"
            lines.append(f"  {label}: {when} by {_who(write)}")
            if write.instr:
                text = " ".join(write.instr.text.split())
                lines.append(f"    PTX line {write.instr.line}: {cut(text)}")
            lines += [f"    {at_source(write.source)}"] * bool(write.source)
    print("\n".join(lines))
    _write_json(
        options,
        {
            "launch": found.launch,
            "entry": found.entry,
            **_difference(difference),
            "box": [found.low, found.high],
            "same_values_at": found.shifted,
            "different_before": found.others,
            "writes": {
                label: [str(write) for write in some]
                for label, some in zip(labels, writes, strict=False)
            },
        },
    )


def _who(write: Write) -> str:
    lanes = f", lane {', '.join(map(str, write.lanes))}" if len(write.lanes) in (1, 2) else ""
    return write.agent + lanes


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "name": difference.name,
        "index": difference.index,
        "first": str(difference.first),
        "second": str(difference.second),
        "different": difference.different,
        "size": difference.size,
    }


def _write_json(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _seed() -> None:
    """Seed the generators, so that both runs draw the same numbers."""
    import random

    import numpy as np

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (scripts draw from the old generator, too)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(0)


def arguments_of(program: str | None) -> argparse.ArgumentParser:
    parser = subjects.parser_of(program, ABOUT)
    parser.add_argument(
        "--schedule", type=schedule, default=Schedule(), metavar="POLICY[-SEED]", help="first run"
    )
    parser.add_argument(
        "--against", type=schedule, metavar="POLICY[-SEED]", help="second run: another schedule"
    )
    parser.add_argument(
        "--against-arguments",
        metavar="WORDS",
        help='second run: other arguments of the script, such as "--stages 1"',
    )
    parser.add_argument(
        "--reference",
        metavar="FILE:FUNCTION",
        help="compare with the results of this function of the script's tensors",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help=f"limit of differences: T * max(1, |value|); default {_CLOSE} for a reference, "
        "0 (equal bits) for a run",
    )
    subjects.add_limit(parser, 600.0)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the difference to this file"
    )
    add_place_arguments(parser.add_argument_group("tiles instead of tensors"))
    return parser
