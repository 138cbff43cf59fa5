"""Subject of a command, a script or a function of a file, and the progress of its launches."""

from __future__ import annotations

import argparse
import inspect
import os
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ptxemu.check.text import cut
from ptxemu.errors import PtxEmuError
from ptxemu.host import gpus
from ptxemu.host.command_line import inspecting
from ptxemu.options import Options
from ptxemu.report import Report
from ptxemu.schedules import Schedule

_FIRST, _NEXT = 5.0, 20.0  # seconds


class Progress:
    """Progress display for `Options.progress`; quick launches print nothing."""

    def __init__(self) -> None:
        self._began = self._said = 0.0
        self._last = (0, 0)

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if total != self._last[1] or done < self._last[0]:  # another launch
            self._began = self._said = now
        self._last = done, total
        seconds = now - self._began
        if seconds >= _FIRST and now - self._said >= (
            _NEXT if self._said > self._began else _FIRST
        ):
            self._said = now
            left = f", about {seconds / done * (total - done):.0f} s left" if done else ""
            told = f"ptxemu: {done} of {total} clusters after {seconds:.0f} s{left}"
            print(told, file=sys.stderr, flush=True)


RIGHT, WRONG, REFUSED = 0, 1, 2  # exit codes; 2 is argparse's, too
EXIT_CODES = """\
Exit code 0: nothing is wrong; 1: errors, findings, a launch that stopped early, a failure;
2: refused: nothing to run, nothing was launched, or invalid flags."""
PROTOCOL = """\
The protocol of --module: `function(context)`, or `function()`, makes the inputs, compiles and
launches, on "cuda" or CPU tensors. It may compare results; an exception is a failure.
`context.arguments` are the words after the options (after "--" if the first begins with a dash),
`context.policy` and `context.seed` the schedule. The file is imported once and the function is
called once per run, so it may keep what it compiled."""


@dataclass(frozen=True)
class Context:
    """Context passed to a function that --module names."""

    arguments: tuple[str, ...]
    policy: str
    seed: int


Subject = Callable[[Schedule], None]


class Refused(Exception):
    """Error for a subject that cannot be run; the message gives the reason."""


def parser_of(program: str | None, about: str, *, gpu: bool = True) -> argparse.ArgumentParser:
    """Return a parser for a command that runs a subject, with the arguments that name the subject.

    Args:
        program: Name in the usage line; None: the name of the script.
        about: Text of the help.
        gpu: Whether it has the flag of `add_gpu`.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] (SCRIPT | --module FILE:FUNCTION) [ARGUMENT ...]",
    )
    parser.add_argument("--module", metavar="FILE:FUNCTION", help="call this function")
    if gpu:
        add_gpu(parser)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def add_limit(parser: argparse.ArgumentParser, seconds: float, what: str = "") -> None:
    """--limit SECONDS; 0 means none, see `limit_of`."""
    parser.add_argument(
        "--limit",
        type=float,
        default=seconds,
        metavar="SECONDS",
        help=f"refuse a launch estimated to take longer{what} (default {seconds:g}; 0: no limit)",
    )


def add_processes(parser: argparse.ArgumentParser) -> None:
    """--processes N."""
    parser.add_argument(
        "--processes",
        type=_processes,
        default=1,
        metavar="N",
        help="processes that share the CTAs of a launch if these do not communicate (default 1)",
    )


def _processes(text: str) -> int:
    """Argument type: what `Options` takes."""
    try:
        return Options(processes=int(text)).processes
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_gpu(parser: argparse.ArgumentParser) -> None:
    """--gpu NAME."""
    parser.add_argument(
        "--gpu",
        type=_gpu,
        metavar="NAME",
        help=f"GPU that the process seems to have: {', '.join(gpus.GPUS)} "
        f"(default: that of {gpus.ARCH_VARIABLE}, else b200)",
    )


def _gpu(text: str) -> gpus.Gpu:
    """Argument type: a GPU of the table that does not contradict the environment."""
    try:
        gpu = gpus.named(text)
        return gpus.chosen(gpu, os.environ)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def tell_alone(report: Report) -> None:
    """On stderr: which launches ran in one process, where more were asked for, and why."""
    for entry, why in dict.fromkeys((each.entry, each.alone) for each in report.launches):
        if why:
            print(f"one process ran kernel {cut(entry)}: {why}", file=sys.stderr)


def limit_of(options: argparse.Namespace) -> float | None:
    """Seconds of `Options.limit`."""
    return options.limit if options.limit > 0 else None


def parse(parser: argparse.ArgumentParser, words: list[str] | None) -> argparse.Namespace:
    """The options, with a subject whose file exists; leaves by `parser.error` otherwise."""
    options = parser.parse_args(words)
    if options.rest[:1] == ["--"]:
        del options.rest[0]
    if not (options.module or options.rest):
        parser.error(f"a script or --module FILE:FUNCTION is required{_hint(parser.prog)}")
    file = options.module.rpartition(":")[0] if options.module else options.rest[0]
    if not Path(file).is_file():
        parser.error(f"there is no file {file!r}")
    require_gpu(parser)
    return options


def require_gpu(parser: argparse.ArgumentParser) -> None:
    """Leave by `parser.error` if CUTE_DSL_ARCH is no architecture."""
    try:
        gpus.chosen(None, os.environ)
    except ValueError as error:
        parser.error(str(error))


def looking_inside(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> AbstractContextManager[Report]:
    """Return the inspection that the flags of `add_inspect_arguments` request.

    Conflicting flags end the program with an error.
    """
    try:
        return inspecting(options)
    except ValueError as error:
        parser.error(str(error))


def _hint(program: str) -> str:
    name = program.rpartition(" ")[2]
    return f" (the file {name!r} itself: ./{name})" if Path(name).is_file() else ""


def subject_of(options: argparse.Namespace) -> Subject:
    """Return the subject, which runs once per schedule.

    Raises `Refused` if the file has no such function.
    """
    rest = options.rest
    if not options.module:
        return lambda _: run_script(rest[0], rest[1:], is_module=False)
    function = function_of(options.module)
    takes_context = bool(inspect.signature(function).parameters)

    def call(schedule: Schedule) -> None:
        function(*[Context(tuple(rest), *schedule)] * takes_context)

    return call


def function_of(name: str) -> Callable[..., object]:
    """The function of 'path/to/file.py:function', whose folder becomes importable."""
    path, _, function = name.rpartition(":")
    sys.path.insert(0, str(Path(path).resolve().parent))
    names = runpy.run_path(path, run_name=Path(path).stem)
    if not callable(names.get(function)):
        raise Refused(f"{path} has no function {function!r}")
    return names[function]


def failure_of(subject: Subject, schedule: Schedule, *, quiet: bool = False) -> str:
    """Run the subject once; what it raised, in one line, its traceback on stderr."""
    try:
        subject(schedule)
    except SystemExit as ending:
        return f"exit code {ending.code}" if ending.code else ""
    except Exception as error:  # noqa: BLE001  (whatever it is, it fails this run alone)
        if not (quiet or isinstance(error, PtxEmuError)):
            traceback.print_exception(type(error), error, _of_subject(error.__traceback__))
        return f"{type(error).__name__}: {error}"
    return ""


def _of_subject(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of ours that called the subject."""
    below = frames
    while below is not None:
        path = below.tb_frame.f_code.co_filename
        if path != __file__ and not path.startswith("<frozen"):
            return below
        below = below.tb_next
    return frames


def run_script(script: str, arguments: list[str], *, is_module: bool) -> None:
    """Run a script as the interpreter would, with its own sys.argv and sys.path[0]."""
    argv, path = sys.argv, sys.path[0]
    try:
        sys.argv = [script, *arguments]
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[0] = argv, path
