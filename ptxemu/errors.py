"""Errors of an emulated launch: one exception per kind, each with its PTX line.

`UnsupportedPtx` and `PtxSyntaxError` concern the text. The others stand for what hardware would
have done: trap (`OutOfBounds`, `HardwareRefusal`), hang (`Deadlock`) or run past the user's limit
(`LimitExceeded`). No error is ever swallowed: the results of an emulator that continues after one
would be wrong.
"""

from __future__ import annotations

from typing import Any


class PtxEmuError(Exception):
    """Base of all errors of this package. `where` is filled in as the error leaves the machine."""

    def __init__(self, message: str, *, line: int | None = None, text: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.line = line  # 1-based line in the PTX text
        self.text = text  # the instruction, as written
        self.source = ""  # "path/file.py:123", where the PTX has line information
        self.where = ""  # "cta (0,0,0) warp 4" once known

    def at(
        self, *, line: int | None = None, text: str = "", where: str = "", source: str = ""
    ) -> PtxEmuError:
        """Add what is known of the place; the first place recorded wins."""
        if self.line is None:
            self.line = line
            self.source = source
        self.text = self.text or text
        self.where = self.where or where
        return self

    def __str__(self) -> str:
        line = f"line {self.line}" if self.line else ""
        place = [part for part in (self.where, line, self.source) if part]
        suffix = f" [{', '.join(place)}]" if place else ""
        quoted = f": `{self.text}`" if self.text else ""
        return f"{self.message}{suffix}{quoted}"


class PtxSyntaxError(PtxEmuError):
    """The text is not PTX that this parser knows."""


class UnsupportedPtx(PtxEmuError):
    """Well-formed PTX whose meaning is not implemented; never guessed at."""


class HardwareRefusal(PtxEmuError):
    """Hardware would trap or reject: misaligned access, bad descriptor, TMEM not allocated, ..."""


class AssertionFailed(HardwareRefusal):
    """An assertion of the kernel failed (`assert` of CUDA C++, `tl.device_assert` of Triton)."""


class OutOfBounds(HardwareRefusal):
    """An access outside the memory that the kernel may touch."""


class Deadlock(PtxEmuError):
    """Every warp waits for something that nobody left can do; the message explains it.

    stall: the same as data, a `ptxemu.machine.deadlock.Stall`.
    """

    def __init__(self, message: str, *, stall: Any = None) -> None:
        super().__init__(message)
        self.stall = stall


class LimitExceeded(PtxEmuError):
    """The launch's estimated or actual work is above `Options.limit`."""
