"""`--check` and `--strict` of a command that emulates: the options, and what they do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from ptxemu.check.text import document, render, single
from ptxemu.findings import MANUAL, Finding
from ptxemu.inspect_flags import source_lines
from ptxemu.report import Report
from ptxemu.watch import Hearer, heard, watched


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """--check, --strict and --check-json, in a group of their own."""
    group = parser.add_argument_group("checker")
    group.add_argument(
        "--check",
        action="store_true",
        help="report races, data never written, leaks and misused barriers; exit code 1 on errors",
    )
    group.add_argument(
        "--strict", action="store_true", help="and, as notes, what only the manual's text asks for"
    )
    group.add_argument(
        "--check-json",
        type=output_file,
        metavar="FILE",
        help="write the findings there as well; until the end each goes to FILE.partial at once",
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
    """Within the block launches are checked as the options ask, and are in the report.

    At the end the findings are printed to `out` (stdout) and written, also where the block raises.
    Until then each is told as it arises, see `told_at_once`; to `out` where that is asked for by
    `at_once`. Nothing happens where no option asks.
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
    """Where findings go before `write_json` writes the report to `path`, which removes it: if the
    process dies, they are there."""
    return path.with_name(path.name + ".partial")


@contextmanager
def told_at_once(path: Path | None, out: TextIO | None) -> Iterator[None]:
    """Within the block each finding is told as it arises: as a line of JSON in `partial_path` that
    the system keeps before the launch goes on, and as a line of text to `out`."""
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
    """Prints a line for each finding whose like has not been printed."""
    known: set[object] = set()

    def hear(_: str, what: Finding | str) -> None:
        if isinstance(what, Finding) and (key := _told_as(what)) not in known:
            known.add(key)
            print(single(what), file=out, flush=True)

    return hear


def _told_as(finding: Finding) -> object:
    """Of what only the manual asks for, one line tells of all; the report at the end lists them."""
    return (MANUAL, finding.missing) if finding.check == MANUAL else finding.place


def write_json(path: Path, report: Report, *, counts: bool = False) -> None:
    """Write the findings of a report, or all of it; and the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(report, counts=counts), indent=1) + "\n", encoding="utf-8")
    partial_path(path).unlink(missing_ok=True)
