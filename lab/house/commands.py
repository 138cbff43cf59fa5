"""What house.py knows by name."""

from __future__ import annotations

import argparse
from functools import partial

from lab.tools.command import Command
from ptxemu.host.command_line import output_file


def _flags(parser: argparse.ArgumentParser, *, what: str, picture: bool = False) -> None:
    parser.set_defaults(what=what)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="the same as JSON")
    if picture:
        parser.add_argument("--png", type=output_file, metavar="FILE", help="packages as a picture")


def _command(what: str, about: str, **options: bool) -> Command:
    return Command("lab.house.perform", partial(_flags, what=what, **options), about)


HOUSE = {
    "graph": _command(
        "graph",
        "Prints who imports whom: packages, then circles and arrows upwards.\n\n"
        "Imports inside functions count. Exit code 1 where there is a circle between files or\n"
        "folders, or an arrow that the order of packages does not allow.",
        picture=True,
    ),
    "files": _command("files", "Prints the files of the families side by side, by their duties."),
    "hops": _command(
        "hops",
        "Counts the files that a call touches between the public function and the launch.\n\n"
        "The second call of four operators, on the GPU at hand or as if there were one. Exit code\n"
        "1 where one touches more than its limit.",
    ),
    "trips": _command(
        "trips",
        "Counts the files that a checked call enters, and its moves from one to another.\n\n"
        "The second call of four operators in the emulator, its kernel compiled, nothing of an\n"
        "earlier call repeated. Exit code 1 where one is above what the design asks for.",
    ),
    "lines": _command(
        "lines", "Counts lines by package, and names the longest files and functions."
    ),
}
