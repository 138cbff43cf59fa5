"""Results of a bring-up so far: a folder with a record per step, and a document of all of them.

The folder survives whatever ends the process; the next one goes on behind the last record. A record
is of the command line and of our files as they were: where one of these is another, the step is run
again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kernelkit.compile.outside import json_file, json_of, read_bounded, require_fields
from kernelkit.compile.trusted import write_whole
from lab.bringup.steps import Step
from lab.bringup.watch import HUNG
from lab.house.source import ROOT, files
from lab.tools.bringup_words import NOT_RUN

BAD = ("wrong", "died", HUNG, NOT_RUN)
MOST_BYTES = 128 << 10  # of a step's figures in the document; the archive has the others
FORMAT = 1


@dataclass(frozen=True)
class Record:
    """Result of a step.

    verdict: passed, wrong, refused, hung, died; or skipped or not run, for a reason.
    about: that reason, or the last lines of the log.
    gpu: the GPU it ran on, and the output of nvidia-smi before and after.
    planted: a deliberate fault.
    identity: identifies the command line and our files.
    """

    name: str
    verdict: str
    about: str = ""
    seconds: float = 0.0
    code: int | None = 0
    command: str = ""
    gpu: dict[str, Any] = field(default_factory=dict)
    planted: str = ""
    identity: str = ""
    when: str = ""


class Session:
    """The folder of one GPU and architecture."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def place(self, name: str, ending: str) -> Path:
        """Path of a file of a step."""
        return self.folder / f"{name}.{ending}"

    def known(self, name: str) -> Record | None:
        """The record of a step, where it has ended."""
        try:
            content = json_file(self.place(name, "record"))
            require_fields(name, content, {"name": str, "verdict": str, "seconds": (int, float)})
            return Record(**content)
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def keep(self, record: Record) -> None:
        """Write the record atomically: readers see all of it or nothing."""
        text = json.dumps(asdict(record), indent=1)
        write_whole(self.place(record.name, "record"), text.encode(), lasting=True)

    def figures(self, name: str) -> Any:
        """The JSON that a step wrote; None without any, or where it is not whole."""
        path = self.place(name, "json")
        try:
            if path.stat().st_size > MOST_BYTES:
                return {"left out": f"{path.stat().st_size} bytes, in {path.name} of the archive"}
            return json_of(read_bounded(path, MOST_BYTES), path.name)
        except (FileNotFoundError, ValueError):
            return None

    def document(self, steps: Sequence[Step], head: dict[str, Any]) -> dict[str, Any]:
        """All that is known, in the order of the steps."""
        rows = []
        for step in steps:
            record = self.known(step.name) or Record(step.name, NOT_RUN, "not come to yet")
            rows.append({"group": step.group, "words": step.words, **asdict(record),
                         "figures": self.figures(step.name)})  # fmt: skip
        return {"format": FORMAT, **head, "steps": rows}


def identity_of(command: Sequence[str]) -> str:
    """Hash of a command line, and of all our Python files."""
    return hashlib.sha256(json.dumps([*command, sources()]).encode()).hexdigest()[:16]


@cache
def sources() -> str:
    """A digest of what a step may run."""
    found = hashlib.sha256()
    for path in files(".py"):
        if path.parts[0] not in ("tests", "notes"):
            found.update(f"{path}\0".encode())
            found.update((ROOT / path).read_bytes())
    return found.hexdigest()
