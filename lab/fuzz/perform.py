"""Implementation of fuzz.py: runs damaged files through their readers and reports failures."""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.fuzz.damage import damaged
from lab.fuzz.kinds import KINDS, Kind
from lab.tools.common import refuse, write_json

SECONDS = 5.0  # of CPU time for a file
ROOM = 2 << 30  # bytes of address space beyond those of the process as it begins
_SHOWN = 5  # failures that are kept


@dataclass
class Verdict:
    """Outcome of a kind.

    outcomes: 'read' or the class of the error -> number of files.
    failures: seeds, each with what was wrong.
    slowest: seconds of CPU time."""

    kind: str
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return the verdict for a JSON file."""
        outcomes = dict(self.outcomes.most_common())
        return {"kind": self.kind, "outcomes": outcomes, "slowest": round(self.slowest, 3),
                "failures": self.failures}  # fmt: skip

    def line(self) -> str:
        """Return the verdict as a line of text."""
        total = sum(self.outcomes.values())
        counts = ", ".join(f"{name} {count:,}" for name, count in self.outcomes.most_common())
        return f"{self.kind}: {total:,} files, slowest {self.slowest:.2f} s; {counts}"


def perform(options: argparse.Namespace) -> int:
    """Return the exit code: 0, or 1 if a file failed."""
    unknown = [name for name in options.kinds if name not in KINDS]
    if unknown:
        return refuse(f"{', '.join(unknown)}: kinds are {', '.join(KINDS)}")
    verdicts = []
    for name in options.kinds or KINDS:
        verdict = judged(KINDS[name], range(options.seed, options.seed + options.count))
        verdicts.append(verdict)
        print(verdict.line(), *verdict.failures, sep="\n  ", flush=True)
    if options.json:
        kinds = [each.document() for each in verdicts]
        write_json(options.json, {"count": options.count, "seed": options.seed, "kinds": kinds})
    return 1 if any(verdict.failures for verdict in verdicts) else 0


@contextmanager
def bounded_memory(room: int = ROOM) -> Iterator[None]:
    """Within the block this process gets at most so much more address space."""
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used * resource.getpagesize() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def judged(kind: Kind, seeds: range) -> Verdict:
    """Read one damaged file per seed. Anything but success and the errors that the kind names is a
    failure, and so is a file that takes longer than SECONDS."""
    found = Verdict(kind.name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, bounded_memory():
        samples = kind.samples(Path(folder))
        for sample in samples:
            kind.read(Path(folder), sample)  # whole, it is read
        for seed in seeds:
            name = f"{kind.name} {seed}"
            data = damaged(samples[seed % len(samples)], kind.damages, name)
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = _outcome(kind, Path(folder), data, found, name)
            seconds = time.process_time() - start
            found.outcomes[outcome] += 1
            found.slowest = max(found.slowest, seconds)
            if seconds > SECONDS:
                _note(found, f"{name}: {seconds:.1f} s of CPU time")
    return found


def _outcome(kind: Kind, folder: Path, data: bytes, found: Verdict, name: str) -> str:
    try:
        kind.read(folder, data)
    except kind.errors as error:
        if not str(error).strip():
            _note(found, f"{name}: {type(error).__name__} without a message")
        return type(error).__name__
    except Exception as error:  # noqa: BLE001  each is a finding
        _note(found, f"{name}: {traceback.format_exc(limit=-4)}")
        return f"UNNAMED {type(error).__name__}"
    return "read"


def _note(found: Verdict, what: str) -> None:
    if len(found.failures) < _SHOWN:
        found.failures.append(what)
