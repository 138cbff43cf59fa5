"""`python -m ptxemu check`: the checker on a script or a function, once for each schedule."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager

from ptxemu.check.text import cut, render
from ptxemu.commands import subject as subjects
from ptxemu.commands.machine_code import keeping
from ptxemu.commands.subject import Progress
from ptxemu.host.command_line import (
    add_inspect_arguments,
    output_file,
    source_lines,
    told_at_once,
    write_json,
)
from ptxemu.report import Report
from ptxemu.schedules import Schedule, add_schedule_arguments, schedules
from ptxemu.watch import watched

ABOUT = f"""\
The checker on your CuTe DSL kernels: races, data never written, leaks, misused barriers.

No GPU is needed, and the file needs no changes: the process seems to have a GPU (tensors on device
"cuda" are in CPU memory). Every kernel launch is emulated and checked, whether it is made by
`cute.compile` and a call, a `@cute.jit` function, tvm-ffi, `ptxemu.run` or
`ptxemu.load(...).launch`.

{subjects.PROTOCOL}

One schedule is enough to find a missing edge. Other schedules (--policy, --seeds) take other
branches, and show the consequences of the missing edge: wrong results or deadlocks.

{subjects.EXIT_CODES}"""


def main(words: list[str] | None, program: str | None = None) -> int:
    """Print the findings of all schedules, and how a run failed; returns the exit code."""
    parser = arguments_of(program)
    options = subjects.parse(parser, words)
    looking = subjects.looking_inside(parser, options)
    from ptxemu.check.unused import clues  # with numpy: not for --help

    with keeping():
        try:
            report, failures = _checked(options, looking)
        except subjects.Refused as error:
            parser.error(str(error))
        print(render(report))
        subjects.tell_alone(report)
        for failure in failures:
            print(f"failed: {cut(failure)}")
        told = failures and clues(report.launches)
        if told:
            print(told)
        if options.json:
            write_json(options.json, report)
        if not report.launches:
            print("nothing was launched: nothing was checked", file=sys.stderr)
            return subjects.REFUSED
    stopped = any(launch.stopped for launch in report.launches)
    return subjects.WRONG if report.errors or stopped or failures else subjects.RIGHT


def _checked(
    options: argparse.Namespace, looking: AbstractContextManager[Report]
) -> tuple[Report, list[str]]:
    """Run as `run_all`, on a machine with a GPU."""
    from ptxemu.host.emulator import Emulator
    from ptxemu.host.gpu_machine import machine_with_gpu

    changes = {
        "strict": options.strict,
        "limit": subjects.limit_of(options),
        "processes": options.processes,
        "progress": Progress(),
    }
    told = told_at_once(options.json, sys.stderr)
    with looking, source_lines(), told, machine_with_gpu(Emulator(), options.gpu):
        chosen = schedules(options.policy, options.seeds)
        return run_all(subjects.subject_of(options), chosen, **changes)


def arguments_of(program: str | None) -> argparse.ArgumentParser:
    parser = subjects.parser_of(program, ABOUT)
    add_schedule_arguments(parser)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also report, as notes, what only the manual's text requires",
    )
    subjects.add_limit(parser, 600.0, ", unchecked")
    subjects.add_processes(parser)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the findings to this file"
    )
    add_inspect_arguments(parser)
    return parser


def run_all(
    subject: subjects.Subject, chosen: Sequence[Schedule], **changes: object
) -> tuple[Report, list[str]]:
    """Run all schedules; return their launches, and failures that the reports do not include.

    changes: to the options of every launch.
    """
    everything, failures = Report(), []
    for schedule in chosen:
        policy, seed = schedule
        with watched(policy=policy, seed=seed, check=True, **changes) as report:
            failure = subjects.failure_of(subject, schedule)
        everything.launches += report.launches
        if failure and not any(launch.stopped for launch in report.launches):
            failures.append(f"{policy}, seed {seed}: {failure}")
    return everything, failures
