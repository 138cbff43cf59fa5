"""A watchdog that runs one command in a separate process group.

A command that hangs is ended with all processes that it started, and costs only its time limit. A
process that waits for a GPU may not end at once, or at all: then the result reports that, and
nothing waits for the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PASSED, WRONG, REFUSED, HUNG, DIED = "passed", "wrong", "refused", "hung", "died"
VERDICTS = {0: PASSED, 1: WRONG, 2: REFUSED}
PATIENCE = 15.0  # seconds from a signal to the next stronger one
LOOK = 0.1  # seconds between looks at a process
LINES = 12  # of the log, that a record keeps


@dataclass(frozen=True)
class Ended:
    """End of a command.

    verdict: one of those above.
    code: exit code, negative for a signal; None if the process could not be ended.
    tail: the last lines that it wrote, and how it ended if it did not exit normally."""

    verdict: str
    code: int | None
    seconds: float
    tail: str


def run(
    command: Sequence[str],
    log: Path,
    seconds: float,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    tick: Callable[[float], None] = lambda _: None,
) -> Ended:
    """Run a command with its output in a file, for at most `seconds` seconds.

    KeyboardInterrupt ends the command, too, and is passed on.

    Args:
        tick: called ten times a second with the seconds since the start.
    """
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env=None if env is None else {**env}, cwd=cwd, start_new_session=True,
        )  # fmt: skip
    hung = False
    try:
        while process.poll() is None:
            passed = time.monotonic() - start
            tick(passed)
            if passed > seconds:
                hung = True
                break
            time.sleep(LOOK)
    finally:
        code = end(process)
    took = time.monotonic() - start
    verdict = HUNG if hung else VERDICTS.get(code if code is not None else -1, DIED)
    words = [tail_of(log), how_it_ended(verdict, code, seconds)]
    return Ended(verdict, code, took, "\n".join(filter(None, words)))


def how_it_ended(verdict: str, code: int | None, limit: float) -> str:
    """Describe how the command ended, which the log does not show."""
    if code is None:
        return f"no end after {limit:.0f} s, and none by a signal: it is still there"
    if verdict == HUNG:
        return f"no end after {limit:.0f} s"
    if verdict == DIED:
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return ""


def end(process: subprocess.Popen) -> int | None:
    """End a process and all of its group, stronger from signal to signal; None where it stays."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)  # also what it has left behind
        with suppress(subprocess.TimeoutExpired):
            return process.wait(PATIENCE)
    return None


def tail_of(log: Path) -> str:
    """The last lines of a log that say something."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.rstrip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "\n".join(lines[-LINES:])
