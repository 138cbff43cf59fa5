"""`--check` and `--strict` of a command that emulates: the options, and what they do."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ptxemu.check.text import document, render
from ptxemu.host.patching import environment
from ptxemu.report import Report
from ptxemu.watch import watched


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
        "--check-json", type=Path, metavar="FILE", help="write the findings there as well"
    )


def wanted(arguments: argparse.Namespace) -> bool:
    """Whether any of the options asks for a check."""
    return bool(arguments.check or arguments.strict or arguments.check_json)


@contextmanager
def checking(arguments: argparse.Namespace, out: TextIO | None = None) -> Iterator[Report]:
    """Within the block launches are checked as the options ask, and are in the report.

    At the end the findings are printed to `out` (stdout) and written, also where the block raises.
    Nothing happens where no option asks.
    """
    if not wanted(arguments):
        yield Report()
        return
    with source_lines(), watched(check=True, strict=arguments.strict) as report:
        try:
            yield report
        finally:
            print(render(report), file=out or sys.stdout)
            if arguments.check_json:
                write_json(arguments.check_json, report)


@contextmanager
def source_lines() -> Iterator[None]:
    """Kernels that are compiled within the block have line information, where the user has not
    decided otherwise and nothing has imported the DSL before, which reads its settings then."""
    name = "CUTE_DSL_LINEINFO"
    with environment({name: os.environ.get(name, "1")}):
        yield


def write_json(path: Path, report: Report, *, counts: bool = False) -> None:
    """Write the findings of a report, or all of it; and the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document(report, counts=counts), indent=1) + "\n", encoding="utf-8")
