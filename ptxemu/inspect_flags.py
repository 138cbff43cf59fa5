"""`--dump`, `--watch`, `--last` and their companions: flags of a command that emulates.

add_inspect_arguments(parser)
with inspecting(parser.parse_args()):
    ...  # every launch is looked at as the flags ask
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ptxemu.report import Report
from ptxemu.watch import watched

if TYPE_CHECKING:
    from ptxemu.request import Inspect

_LINE_INFO = "CUTE_DSL_LINEINFO"
_FOLDER = "ptxemu_dump"


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """--dump, --at, --cta, --warp, --when, --region, --dump-dir, --dump-limit, --watch,
    --watch-keep, --last and --name-printf, in a group of their own."""
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
        help="who writes there: bytes of global, smem, param<N>, columns of tmem; may be repeated",
    )
    group.add_argument(
        "--watch-keep", type=int, default=20, metavar="N", help="newest writes kept (default 20)"
    )
    group.add_argument(
        "--last", type=int, default=0, metavar="N", help="print the last N events if a launch fails"
    )
    group.add_argument(
        "--name-printf", action="store_true", help="begin what a kernel prints with CTA and warp"
    )


def add_place_arguments(group: argparse._ActionsContainer) -> None:
    """--at, --cta, --warp, --when, --region, --dump-limit: where and when to look."""
    group.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="FILE.py:LINE",
        help="where (or ptx:LINE); before the line is executed; may be repeated",
    )
    group.add_argument("--cta", type=_said("parse_cta"), help="only this CTA: index, or x,y,z")
    group.add_argument("--warp", type=int, help="only this warp of a CTA")
    group.add_argument(
        "--when",
        default="",
        metavar="CONDITION",
        help='such as "step==3 and %%r7 > 0"; step counts the arrivals of a warp from 0',
    )
    group.add_argument(
        "--region",
        action="append",
        default=[],
        type=_said("Region.parse"),
        metavar="NAME=OFFSET,ROWS,COLUMNS,DTYPE[,SWIZZLE]",
        help="a matrix in shared memory to dump by name, its swizzle (such as 128B) undone",
    )
    group.add_argument(
        "--dump-limit", type=int, default=16, metavar="N", help="moments of a launch (default 16)"
    )


def inspection_of(arguments: argparse.Namespace) -> Inspect | None:
    """What the flags ask for; None where they ask for nothing. Raises ValueError."""
    from ptxemu.request import Inspect, Stop

    if bool(arguments.dump) != bool(arguments.at):
        raise ValueError("--dump and --at belong together: what, and where")
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
    """Within the block launches are looked at as the flags ask; they are in the report.

    Kernels that are compiled within it have line information, where the user has not decided
    otherwise. Raises ValueError at once for flags that do not fit each other.
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
