"""How a script ends in which an emulated launch fails: with what is wrong and nothing behind it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ptxemu.errors import PtxEmuError


@dataclass
class Ending:
    """code: of the exit, 1 after an error of the emulator."""

    code: int = 0


@contextmanager
def report_alone(script: str, *, told: bool = False) -> Iterator[Ending]:
    """Within the block an error of the emulator ends the script: what it says and the line of the
    script that made the launch go to stderr. Every other error passes through, with its traceback.

    told: the report is printed elsewhere.
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
