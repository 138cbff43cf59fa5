"""Files of results/ as they are read here: what they say of their making, and their rows."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "results"
UNKNOWN = "not recorded"
HEADS = ("gpu: ", "date: ")  # comments of a CSV that are its head
Row = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """A file of results.

    name: path within results/.
    data: a JSON document that is not an array.
    rows: lines of a CSV, or elements of an array between its `setting` and the notes `after`.
    head: the setting.
    notes: comments of a CSV.
    digest: digest of its bytes.
    """

    name: str
    head: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    data: Row = field(default_factory=dict)
    notes: str = ""
    digest: str = ""

    @cached_property
    def gpu(self) -> str:
        """Name of the GPU, or of the processor if it ran there."""
        head = self.head
        device = head.get("device")
        found = head.get("gpu") or (device if isinstance(device, dict | str) else None)
        name = found.get("name", "") if isinstance(found, dict) else found
        return name or head.get("processor") or ("a CPU" if self._on_cpu else UNKNOWN)

    @property
    def _on_cpu(self) -> bool:
        return "+cpu" in str(self.head.get("versions", "")) or "cores" in self.head

    @property
    def date(self) -> str:
        return str(self.head.get("date", UNKNOWN))

    def of(self, *kinds: str) -> list[Row]:
        """Rows of these kinds."""
        return [row for row in self.rows if row.get("kind") in kinds]


def measured(head: Row, rows: Sequence[Row]) -> Document:
    """Return a document of rows that a benchmark has just measured."""
    return Document("", head, [*rows])


def read(name: str, folder: Path = RESULTS) -> Document:
    """OSError where there is no such file, ValueError where it is neither JSON nor CSV."""
    raw = (folder / name).read_bytes()
    digest, text = hashlib.sha256(raw).hexdigest()[:16], raw.decode("utf-8")
    if name.endswith(".csv"):
        lines = text.splitlines()
        notes = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
        head = dict(note.split(": ", 1) for note in notes if note.startswith(HEADS))
        rows = [*csv.DictReader(line for line in lines if not line.startswith("#"))]
        words = " ".join(note for note in notes if not note.startswith(HEADS))
        return Document(name, head, rows, notes=words, digest=digest)
    found = json.loads(text)
    if isinstance(found, dict):
        head = {key: found[key] for key in ("date", "device", "gpu") if key in found}
        return Document(name, head | found.get("setting", {}), data=found, digest=digest)
    head = next((row for row in found if row.get("kind") == "setting"), {})
    rows = [row for row in found if row.get("kind") not in ("setting", "after")]
    return Document(name, head, rows, digest=digest)
