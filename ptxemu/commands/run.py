"""`python -m ptxemu [run] script.py`: an unmodified CuTe DSL script, with every launch emulated."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ptxemu.commands import subject as subjects
from ptxemu.commands.machine_code import keeping
from ptxemu.commands.subject import Progress
from ptxemu.errors import PtxEmuError
from ptxemu.host.command_line import (
    add_check_arguments,
    add_inspect_arguments,
    checking,
    output_file,
    wanted,
    write_json,
)
from ptxemu.options import POLICIES, Options
from ptxemu.report import Report
from ptxemu.watch import watched


@dataclass
class Ending:
    """code: of the exit, 1 after an error of the emulator."""

    code: int = 0


@contextmanager
def report_alone(script: str, *, told: bool = False) -> Iterator[Ending]:
    """Within the block, end the script on an error of the emulator.

    The message and the script's line that made the launch go to stderr. Other errors propagate with
    their traceback. told: the report is printed elsewhere.
    """
    ending = Ending()
    try:
        yield ending
    except PtxEmuError as error:
        ending.code = 1
        where = _line_of(error, script)
        text = f"launched at {where}" if where else ""
        if not told:
            text = f"{type(error).__name__}: {error}" + f"\n{text}" * bool(text)
        print(text, file=sys.stderr, flush=True)


def _line_of(error: BaseException, script: str) -> str:
    """The innermost place of the script on the way to an error."""
    path = Path(script).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    return f"{script}:{lines[-1]}" if lines else ""


@contextmanager
def told_at_the_end() -> Iterator[None]:
    """After the block, print one line on stderr: what was launched in it, or that nothing was."""
    with watched() as report:
        try:
            yield
        finally:
            print(summary(report), file=sys.stderr, flush=True)


def summary(report: Report) -> str:
    """The line about all launches of a script."""
    count = len(report.launches)
    if not count:
        return "ptxemu: warning: no kernel was launched, so nothing was emulated"
    kernels = "kernel" if count == 1 else "kernels"
    return (
        f"ptxemu: {count:,} {kernels} launched, {report.warp_instructions:,} warp-instructions, "
        f"{report.seconds:.1f} s"
    )


ABOUT = """\
Run a script with kernels of the CuTe DSL or Triton on a CPU: their PTX is emulated. The process
seems to have the GPU that --gpu names.

The script needs no changes: tensors on "cuda" are in CPU memory, and everything after its name is
an argument of the script. Exit code: the script's, or 1 if that is 0 and the checker found errors;
2 for invalid flags. `elapsed_time` and benchmarks in the script mean nothing here."""


def main(words: list[str] | None, program: str | None = None) -> int:
    """Run the script or module; its exit code and exceptions leave through here unchanged.

    What a check finds goes to stderr.
    """
    parser = parser_of(program)
    options = parser.parse_args(words)
    script, *rest = options.module or [options.script, *options.arguments]
    if script is None:
        parser.error("a script or -m module is required")
    if not options.module and not Path(script).exists():
        parser.error(f"there is no file {script!r}")

    subjects.require_gpu(parser)
    from ptxemu.host.emulator import Emulator
    from ptxemu.host.gpu_machine import machine_with_gpu

    looking = subjects.looking_inside(parser, options)
    emulator = Emulator(
        Options(
            policy=options.policy,
            seed=options.seed,
            limit=subjects.limit_of(options),
            processes=options.processes,
            progress=Progress(),
        )
    )
    ending = nullcontext() if options.quiet else told_at_the_end()
    with ending, keeping(), looking, checking(options, sys.stderr, at_once=True) as report:
        try:
            alone = report_alone(script, told=wanted(options))
            with alone as hang, machine_with_gpu(emulator, options.gpu):
                subjects.run_script(script, rest, is_module=bool(options.module))
        except SystemExit as ending:
            if ending.code:
                raise
        finally:
            subjects.tell_alone(emulator.report)
            if options.report:
                write_json(options.report, emulator.report, counts=True)
    return subjects.WRONG if report.errors or hang.code else subjects.RIGHT


def parser_of(program: str | None = None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] (SCRIPT | -m MODULE) [ARGUMENT ...]",
    )
    parser.add_argument("--policy", choices=POLICIES, default=POLICIES[0], help="schedule of warps")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random and adversarial policies"
    )
    subjects.add_limit(parser, 60.0)
    subjects.add_processes(parser)
    subjects.add_gpu(parser)
    parser.add_argument("--quiet", action="store_true", help="no line with counts at the end")
    parser.add_argument(
        "--report", type=output_file, metavar="FILE", help="write counts and findings as JSON"
    )
    add_check_arguments(parser)
    add_inspect_arguments(parser)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="run a module with its arguments"
    )
    parser.add_argument("script", nargs="?", help="the script; everything after it is passed to it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
