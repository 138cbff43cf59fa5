"""Results of a session on a GPU so far, case by case, so that the next session can resume.

A line of JSON for the GPU, then one for each case: its name, a digest of its program, and what it
adds to the result. A case whose program is another by now is done again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

from lab.silicon.conformance.campaign import Campaign, Tally
from lab.silicon.conformance.case import Case


def fingerprint(case: Case) -> str:
    """Hash of the program and its inputs."""
    found = hashlib.sha256(case.program.text.encode())
    for buffer in case.program.buffers():
        found.update(np.ascontiguousarray(buffer.data).tobytes())
    return found.hexdigest()[:16]


class Journal:
    """The file behind `--resume`; without a path nothing is kept."""

    def __init__(self, path: Path | None, setting: dict[str, str]) -> None:
        """Raises ValueError for a journal of another GPU, driver, or accumulation."""
        self.path, self._known = path, dict[str, dict]()
        same = {k: setting[k] for k in ("gpu", "driver", "accumulation") if k in setting}
        if path is None:
            return
        if path.exists():
            first, *lines = path.read_text(encoding="utf-8").splitlines()
            if json.loads(first) != same:
                raise ValueError(f"{path} is of {json.loads(first)}, and this is {same}")
            for line in lines:
                if line.endswith("}"):  # the last one may have been cut off
                    entry = json.loads(line)
                    self._known[entry["case"]] = entry
        else:
            path.write_text(json.dumps(same) + "\n", encoding="utf-8")

    def restore(self, case: Case, result: Campaign) -> bool:
        """Whether the case is done; then what it said is in the result."""
        entry = self._known.get(case.name)
        if entry is None or entry["program"] != fingerprint(case):
            return False
        forms = {form: Tally(**tally) for form, tally in entry["forms"].items()}
        result.absorb(Campaign(forms, entry["digests"], programs=1, sums=entry.get("sums", {})))
        return True

    def keep(self, case: Case, found: Campaign) -> None:
        """Record the results of a case that did not fail."""
        if self.path is None or found.failures:
            return
        entry = {
            "case": case.name,
            "program": fingerprint(case),
            "forms": {form: dataclasses.asdict(tally) for form, tally in found.forms.items()},
            "digests": found.digests,
            "sums": found.sums,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
