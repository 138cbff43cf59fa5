"""Flags of a command that emulates: `--check` and `--strict`; `--dump`, `--watch`, `--last`.

add_inspect_arguments(parser)
with inspecting(parser.parse_args()):
    ...  # every launch is looked at as the flags ask
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ptxemu.check.text import document, render, single
from ptxemu.findings import MANUAL, Finding
from ptxemu.report import Report
from ptxemu.watch import Hearer, heard, watched

if TYPE_CHECKING:
    from ptxemu.request import Inspect

_LINE_INFO = "CUTE_DSL_LINEINFO"
_FOLDER = "ptxemu_dump"


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --dump, --at, --cta, --warp, --when, --region, --dump-dir, --dump-limit, --watch,
    --watch-keep, --last and --name-printf, in a separate group.
    """
    group = parser.add_argument_group("looking inside")
    group.add_argument(
        "--dump", type=_kinds, metavar="KINDS", help="write some of smem,tmem,regs as files"
    )
    add_place_arguments(group)
    group.add_argument("--dump-dir", default=_FOLDER, metavar="DIR", help=f"default {_FOLDER}")
    group.add_argument(
        "--watch",
        action="append",
        default=[],
        type=_said("Watch.parse"),
        metavar="SPACE:FIRST+COUNT[@CTA]",
        help="report writes to bytes of global, smem, param<N>, columns of tmem; may be repeated",
    )
    group.add_argument(
        "--watch-keep", type=int, default=20, metavar="N", help="newest writes kept (default 20)"
    )
    group.add_argument(
        "--last", type=int, default=0, metavar="N", help="print the last N events if a launch fails"
    )
    group.add_argument(
        "--name-printf",
        action="store_true",
        help="prefix the lines that a kernel prints with CTA and warp",
    )


def add_place_arguments(group: argparse._ActionsContainer) -> None:
    """--at, --cta, --warp, --when, --region, --dump-limit: where and when to look."""
    group.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="FILE.py:LINE",
        help="stop before this line (or ptx:LINE) is executed; may be repeated",
    )
    group.add_argument("--cta", type=_said("parse_cta"), help="only this CTA: index, or x,y,z")
    group.add_argument("--warp", type=int, help="only this warp of a CTA")
    group.add_argument(
        "--when",
        default="",
        metavar="CONDITION",
        help='such as "step==3 and %%r7 > 0"; step counts from 0 how often a warp gets there',
    )
    group.add_argument(
        "--region",
        action="append",
        default=[],
        type=_said("Region.parse"),
        metavar="NAME=OFFSET,ROWS,COLUMNS,DTYPE[,SWIZZLE]",
        help="dump a matrix in shared memory by name, with its swizzle (such as 128B) undone",
    )
    group.add_argument(
        "--dump-limit", type=int, default=16, metavar="N", help="most dumps per launch (default 16)"
    )


def inspection_of(arguments: argparse.Namespace) -> Inspect | None:
    """Return the inspection that the flags request, or None. Raises ValueError."""
    from ptxemu.request import Inspect, Stop

    if bool(arguments.dump) != bool(arguments.at):
        raise ValueError("--dump and --at must be given together: what, and where")
    stops = tuple(
        Stop(
            at=at,
            dump=arguments.dump,
            cta=arguments.cta,
            warp=arguments.warp,
            when=arguments.when,
            regions=tuple(arguments.region),
            limit=arguments.dump_limit,
        )
        for at in arguments.at
    )
    if not (stops or arguments.watch or arguments.last):
        return None
    return Inspect(
        stops=stops,
        watches=tuple(arguments.watch),
        keep=arguments.watch_keep,
        last=arguments.last,
        folder=arguments.dump_dir,
    )


def inspecting(arguments: argparse.Namespace) -> AbstractContextManager[Report]:
    """Within the block, inspect launches as the flags request; results are in the report.

    Kernels compiled within the block have line information, unless the user decided otherwise.
    Raises ValueError at once for conflicting flags.
    """
    nothing = not (arguments.dump or arguments.at or arguments.watch or arguments.last)
    wanted = None if nothing else inspection_of(arguments)
    changes: dict[str, Any] = {"inspect": wanted} if wanted else {}
    if arguments.name_printf:
        changes["name_printf"] = True
    return _looking(changes)


@contextmanager
def _looking(changes: dict[str, Any]) -> Iterator[Report]:
    if not changes:
        yield Report()
        return
    with source_lines(), watched(**changes) as report:
        yield report


@contextmanager
def source_lines() -> Iterator[None]:
    """Kernels that are compiled within the block have line information, where the user has not
    decided otherwise and nothing has imported the DSL before, which reads its settings then."""
    before = os.environ.get(_LINE_INFO)
    os.environ.setdefault(_LINE_INFO, "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_LINE_INFO, None)


def _kinds(text: str) -> tuple[str, ...]:
    from ptxemu.request import KINDS

    kinds = tuple(word.strip() for word in text.split(",") if word.strip())
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise argparse.ArgumentTypeError(f"{text!r}: must be some of {','.join(KINDS)}")
    return kinds


def _said(name: str) -> Callable[[str], Any]:
    """A parser of `request`, imported when it is needed: numpy comes with it. argparse shows the
    words of an ArgumentTypeError alone."""

    def convert(text: str) -> Any:
        parse = attrgetter(name)(import_module("ptxemu.request"))
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --check, --strict and --check-json, in a separate group."""
    group = parser.add_argument_group("checker")
    group.add_argument(
        "--check",
        action="store_true",
        help="report races, data never written, leaks and misused barriers; exit code 1 on errors",
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="also report, as notes, what only the manual's text requires",
    )
    group.add_argument(
        "--check-json",
        type=output_file,
        metavar="FILE",
        help="also write the findings to this file; until then, each goes to FILE.partial",
    )


def output_file(text: str) -> Path:
    """Argument type: a file that can be written to; the folders on the way may have to be made."""
    path = Path(text)
    try:
        missing = path.is_dir() or not path.name
    except (OSError, ValueError) as error:  # too long a name, or one with a null byte
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if missing:
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    return path


def wanted(arguments: argparse.Namespace) -> bool:
    """Whether any of the options asks for a check."""
    return bool(arguments.check or arguments.strict or arguments.check_json)


@contextmanager
def checking(
    arguments: argparse.Namespace, out: TextIO | None = None, *, at_once: bool = False
) -> Iterator[Report]:
    """Within the block, check launches as the options request and add them to the report.

    At the end, even after an exception, the findings are printed to `out` (stdout) and written.
    Until then each is reported as it arises, see `told_at_once`, and to `out` with `at_once`.
    Without such options nothing happens.
    """
    if not wanted(arguments):
        yield Report()
        return
    with (
        source_lines(),
        told_at_once(arguments.check_json, out if at_once else None),
        watched(check=True, strict=arguments.strict) as report,
    ):
        told = ""
        try:
            yield report
        except Exception:
            from ptxemu.check.unused import clues  # with numpy: not for --help

            told = clues(report.launches)
            raise
        finally:
            print("\n".join(filter(None, (render(report), told))), file=out or sys.stdout)
            if arguments.check_json:
                write_json(arguments.check_json, report)


def partial_path(path: Path) -> Path:
    """Return the path of partial findings, which survive if the process dies.

    `write_json` removes that file when it writes the report to `path`.
    """
    return path.with_name(path.name + ".partial")


@contextmanager
def told_at_once(path: Path | None, out: TextIO | None) -> Iterator[None]:
    """Within the block, report each finding as it arises.

    It is a line of JSON in `partial_path`, which the system keeps before the launch continues, and
    a line of text to `out`.
    """
    with ExitStack() as stack:
        if path:
            for old in (path, partial_path(path)):  # of an earlier run
                old.unlink(missing_ok=True)
            stack.enter_context(heard(_records_to(partial_path(path), stack)))
        if out:
            stack.enter_context(heard(_lines_to(out)))
        yield


def _records_to(path: Path, stack: ExitStack) -> Hearer:
    """Writes a line of JSON for each; the file is there from the first one on."""
    files: list[TextIO] = []

    def hear(entry: str, what: Finding | str) -> None:
        if not files:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.append(stack.enter_context(path.open("a", encoding="utf-8")))
        told = {"stopped": what} if isinstance(what, str) else what.to_json()
        files[0].write(json.dumps({"entry": entry, **told}) + "\n")
        files[0].flush()

    return hear


def _lines_to(out: TextIO) -> Hearer:
    """Return a hearer that prints a line for each new kind of finding."""
    known: set[object] = set()

    def hear(_: str, what: Finding | str) -> None:
        if isinstance(what, Finding) and (key := _told_as(what)) not in known:
            known.add(key)
            print(single(what), file=out, flush=True)

    return hear


def _told_as(finding: Finding) -> object:
    """Return the key under which a finding is reported once.

    Notes with the same missing instruction share one line; the final report lists them all.
    """
    return (MANUAL, finding.missing) if finding.check == MANUAL else finding.place


def write_json(path: Path, report: Report, *, counts: bool = False) -> None:
    """Write the findings of a report, or all of it; and the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(report, counts=counts), indent=1) + "\n", encoding="utf-8")
    partial_path(path).unlink(missing_ok=True)
