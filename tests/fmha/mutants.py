"""Copies of a kernel's PTX with one synchronisation removed each, and what becomes of them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ptxemu
from ptxemu import Deadlock, Options, PtxEmuError, Report
from ptxemu.host import cutedsl
from ptxemu.host.emulator import Emulator
from ptxemu.host.launch_config import LaunchRequest

_WAIT_LOOP = r"mbarrier\.try_wait[^;]*;\s+@P1 bra\.uni DONE;\s+bra\.uni\s+LAB_WAIT;"
_EXPECT_TX = r"(mov\.b32\s+(%r\d+), )\d+(;\s+mbarrier\.arrive\.expect_tx[^;]*\2;)"

# kind -> (what one occurrence looks like, what is left of it)
REMOVALS: dict[str, tuple[str, str]] = {
    "mbarrier wait": (_WAIT_LOOP, ""),
    "wait::st": (r"tcgen05\.wait::st\.sync\.aligned;", ""),
    "commit": (r"tcgen05\.commit[^;]*;", ""),
    "expect_tx count": (_EXPECT_TX, r"\g<1>0\3"),
    "proxy fence": (r"fence\.proxy\.async[^;]*;", ""),
    "thread arrival": (r"mbarrier\.arrive\.shared(::cluster)?\.b64[^;]*;", ""),
    "named barrier": (r"bar\.sync[^;]*;", ""),
    "cluster arrival": (r"barrier\.cluster\.arrive[^;]*;", ""),
    "cluster wait": (r"barrier\.cluster\.wait[^;]*;", ""),
}


@dataclass(frozen=True)
class Mutant:
    """`number`: which occurrence of `kind` is removed, in the order of the text."""

    kind: str
    number: int
    ptx: str

    @property
    def name(self) -> str:
        """As survivors are listed."""
        return f"{self.kind} {self.number}"


def mutants(ptx: str) -> Iterator[Mutant]:
    """One mutant for every occurrence of every removal."""
    for kind, (pattern, remainder) in REMOVALS.items():
        for number, match in enumerate(re.finditer(pattern, ptx)):
            left = match.expand(remainder)
            if left == match[0]:  # a signal that announces no bytes has none to lose
                continue
            yield Mutant(kind, number, ptx[: match.start()] + left + ptx[match.end() :])


@contextmanager
def changed_launches(change: Callable[[str], str]) -> Iterator[None]:
    """Within the block every emulated launch runs `change` of its PTX."""

    def run(compiled: Any, *arguments: Any, options: Options | None = None) -> Report:
        emulator = Emulator(options)

        def launcher(request: LaunchRequest) -> Any:
            return emulator(dataclasses.replace(request, ptx=change(request.ptx)))

        cutedsl.run(compiled, *arguments, launcher=launcher)
        return emulator.report

    with mock.patch.object(ptxemu, "run", run):
        yield


def verdict(run: Callable[[], bool]) -> str:
    """'killed: ...' or 'survived' of one run that returns whether its bits were right."""
    try:
        right = run()
    except Deadlock:
        return "killed: deadlock"
    except PtxEmuError as error:
        return f"killed: {type(error).__name__}"
    return "survived" if right else "killed: wrong bits"
