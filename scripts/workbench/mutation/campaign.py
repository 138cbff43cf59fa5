"""Many mutants in several processes; every verdict is a record, kept in a file as it comes."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

from ptxemu.mutation.classes import Mutant
from workbench.mutation import attention, experts
from workbench.mutation.verdict import BROKEN, KILLERS, SCHEDULES, SURVIVED, Judge, Verdict

SUBJECTS: dict[str, attention.Subject] = {**attention.SUBJECTS, **experts.SUBJECTS}
_SAVE_SECONDS = 5.0
_AHEAD = 4  # mutants per process that wait in the queue, so that an interrupt is quick


@dataclass(frozen=True)
class Record:
    """One judged mutant. equivalent: the reason by which it means the same as its kernel; noted:
    the strict rules tell one that is equivalent from it, all the same."""

    subject: str
    kind: str
    line: int
    instruction: str
    equivalent: str
    ptx: str  # digest of the kernel's text, which the line refers to
    by: str
    how: str
    schedule: str
    seconds: float
    noted: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.subject, self.kind, self.line

    @property
    def killed(self) -> bool:
        return self.by in KILLERS

    @property
    def survived(self) -> bool:
        """Nothing tells it from its kernel, and no reason why."""
        return self.by == SURVIVED and not self.equivalent


class Records:
    """The records of a campaign in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[tuple, Record] = {}
        self.saved = time.monotonic()
        if path.is_file():
            for row in json.loads(path.read_text(encoding="utf-8"))["mutants"]:
                record = Record(**row)
                self.by_key[record.key] = record

    def add(self, record: Record) -> None:
        self.by_key[record.key] = record
        if time.monotonic() - self.saved > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """All or nothing: an interrupt leaves the file before."""
        rows = [asdict(record) for record in self.by_key.values()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps({"mutants": rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)
        self.saved = time.monotonic()

    def of(self, mutants: Iterable[tuple[str, Mutant]]) -> list[Record]:
        """Records of those of these mutants that are judged, on the text as it is."""
        found = (self.by_key.get(key_of(*item)) for item in mutants)
        return [record for record in found if record is not None]


def key_of(subject: str, mutant: Mutant) -> tuple[str, str, int]:
    return subject, mutant.kind.name, mutant.instr.line


def digest(ptx: str) -> str:
    return hashlib.sha256(ptx.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _prepared(subject: str, schedules: int) -> tuple[Judge, dict[tuple, Mutant]]:
    """Of this process: mutants come subject by subject."""
    item = SUBJECTS[subject]
    return item.judge(SCHEDULES[:schedules]), {
        key_of(subject, mutant): mutant for mutant in item.mutants()
    }


def judged(key: tuple[str, str, int], schedules: int) -> Record:
    """The verdict on one mutant, in a process of the pool."""
    judge, mutants = _prepared(key[0], schedules)
    mutant = mutants[key]
    noted = False
    try:
        verdict = judge.verdict(mutant.ptx)
        if mutant.equivalent and not verdict.killed:
            noted = judge.noted(mutant.ptx)
    except Exception as error:  # noqa: BLE001  (a crash is a result, too: it must not end the rest)
        verdict = Verdict(BROKEN, f"{type(error).__name__}: {error}")
    return Record(
        *key,
        instruction=mutant.instruction,
        equivalent=mutant.equivalent,
        ptx=digest(mutant.text.ptx),
        **asdict(verdict),
        noted=noted,
    )


def run(
    keys: list[tuple[str, str, int]], jobs: int, schedules: int, seen: Callable[[Record], None]
) -> None:
    """Judge all under the first `schedules`, and show each record to `seen`."""
    if jobs == 1:
        for key in keys:
            seen(judged(key, schedules))
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        waiting: set = set()
        try:
            for key in keys:
                waiting.add(pool.submit(judged, key, schedules))
                if len(waiting) >= jobs * _AHEAD:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    for future in done:
                        seen(future.result())
            for future in waiting:
                seen(future.result())
        finally:
            for future in waiting:
                future.cancel()
