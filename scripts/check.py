"""The checker on CuTe DSL kernels of your own: races, data never written, leaks, misused barriers.

    python scripts/check.py [options] script.py [its arguments]
    python scripts/check.py --module path/to/file.py:function [options] [its arguments]

No GPU is needed, and the file need not know of ptxemu: the process looks like one with a B200
(tensors on device "cuda" lie in CPU memory), and every kernel launch in it is emulated and checked,
whichever way it is made: `cute.compile` and a call, a `@cute.jit` function, tvm-ffi, `ptxemu.run`,
`ptxemu.load(...).launch`.

The protocol of --module: `function(context)`, or `function()`, makes the inputs, compiles and
launches. It may compare results; an exception is a failure. `context.arguments` are the words
behind the options (after "--" where the first begins with a dash), `context.policy` and
`context.seed` the schedule. The file is imported once and the function called once per schedule,
so that it may keep what it compiled:

    @functools.cache
    def compiled():
        return cute.compile(host_function, *inputs())

    def gemm():
        compiled()(*inputs())

One schedule is enough to see that an edge is missing. Others (--policy, --seeds) take other
branches, and show as wrong results or deadlocks what the edge was for. Exit code 0: no errors;
1: errors, a launch that stopped early, a failure; 2: nothing to run, or nothing was launched.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptxemu.check.text import render
from ptxemu.errors import PtxEmuError
from ptxemu.host.command_line import source_lines, write_json
from ptxemu.options import POLICIES
from ptxemu.report import Report
from ptxemu.watch import watched

NOTHING = 2  # exit code, as argparse's


@dataclass(frozen=True)
class Context:
    """What a function named by --module may want to know."""

    arguments: tuple[str, ...]
    policy: str
    seed: int


Schedule = tuple[str, int]
Subject = Callable[[str, int], None]


def policies(text: str) -> list[str]:
    """Argument type: 'round-robin,adversarial'."""
    names = text.split(",")
    unknown = set(names) - set(POLICIES)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: of {', '.join(POLICIES)}")
    return names


def seeds(text: str) -> list[int]:
    """Argument type: '0,1,2'."""
    return [int(seed) for seed in text.split(",")]


def parse_arguments(
    argv: Sequence[str] | None,
) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] (SCRIPT | --module FILE:FUNCTION) [ARGUMENT ...]",
    )
    parser.add_argument("--module", metavar="FILE:FUNCTION", help="call this function")
    parser.add_argument(
        "--policy", type=policies, default=POLICIES[:1], metavar="NAME,...", help=f"of {POLICIES}"
    )
    parser.add_argument(
        "--seeds", type=seeds, default=[0], metavar="N,...", help="of the policies with chance"
    )
    parser.add_argument(
        "--strict", action="store_true", help="and, as notes, what only the manual's text asks for"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="refuse a launch estimated above this, unchecked (default 600; 0: no limit)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.rest[:1] == ["--"]:
        del arguments.rest[0]
    return parser, arguments


def function_of(name: str) -> Callable[..., object]:
    """The function of 'path/to/file.py:function', whose folder becomes importable."""
    path, _, function = name.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    names = runpy.run_path(path, run_name=Path(path).stem)
    if function not in names:
        raise argparse.ArgumentTypeError(f"{path} has no function {function!r}")
    return names[function]


def subject_of(arguments: argparse.Namespace) -> Subject:
    """What runs once per schedule."""
    from ptxemu.__main__ import run_script

    rest = arguments.rest
    if not arguments.module:
        return lambda *_: run_script(rest[0], rest[1:], is_module=False)
    function = function_of(arguments.module)
    takes_context = bool(inspect.signature(function).parameters)

    def call(policy: str, seed: int) -> None:
        function(*[Context(tuple(rest), policy, seed)] * takes_context)

    return call


def run_all(
    subject: Subject, schedules: Sequence[Schedule], **changes: object
) -> tuple[Report, list[str]]:
    """The launches of all schedules, and how they failed where the reports do not say it.

    changes: to the options of every launch.
    """
    everything, failures = Report(), []
    for policy, seed in schedules:
        with watched(policy=policy, seed=seed, check=True, **changes) as report:
            failure = _failure(subject, policy, seed)
        everything.launches += report.launches
        if failure and not any(launch.stopped for launch in report.launches):
            failures.append(f"{policy}, seed {seed}: {failure}")
    return everything, failures


def _failure(subject: Subject, policy: str, seed: int) -> str:
    """Run the subject once; what it raised, in one line, its traceback on stderr."""
    try:
        subject(policy, seed)
    except SystemExit as ending:
        return f"exit code {ending.code}" if ending.code else ""
    except Exception as error:  # noqa: BLE001  (whatever it is, it fails this schedule alone)
        if not isinstance(error, PtxEmuError):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    parser, arguments = parse_arguments(argv)
    if not (arguments.module or arguments.rest):
        parser.error("a script or --module FILE:FUNCTION is required")
    file = arguments.module.rpartition(":")[0] if arguments.module else arguments.rest[0]
    if not Path(file).is_file():
        parser.error(f"there is no file {file!r}")
    from ptxemu.__main__ import machine_with_gpu
    from ptxemu.host.emulator import Emulator

    schedules = [
        (policy, seed)
        for policy, seed in itertools.product(arguments.policy, arguments.seeds)
        if policy != "round-robin" or seed == arguments.seeds[0]
    ]
    changes = {"strict": arguments.strict, "limit": arguments.limit or None}
    with source_lines(), machine_with_gpu(Emulator()):
        try:
            subject = subject_of(arguments)
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
        report, failures = run_all(subject, schedules, **changes)
    print(render(report))
    for failure in failures:
        print(f"failed: {failure}")
    if arguments.json:
        write_json(arguments.json, report)
    if not report.launches:
        print("nothing was launched: nothing was checked", file=sys.stderr)
        return NOTHING
    stopped = any(launch.stopped for launch in report.launches)
    return 1 if report.errors or stopped or failures else 0


if __name__ == "__main__":
    sys.exit(main())
