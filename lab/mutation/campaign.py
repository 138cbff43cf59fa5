"""Many mutants in several processes; every verdict is a record, kept in a file as it comes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from lab.mutation import attention, cache, decode, experts
from lab.mutation.subject import SCHEDULES, Judge, Subject
from ptxemu.mutation.carried import UNREACHED
from ptxemu.mutation.catalogue import CLASSES, Mutant
from ptxemu.mutation.rerun import BROKEN, NOTICED, UNNOTICED, Verdict

SUBJECTS: dict[str, Subject] = {
    **attention.SUBJECTS, **decode.SUBJECTS, **experts.SUBJECTS, **cache.SUBJECTS,
}  # fmt: skip
ELSEWHERE = "ordered by another edge"
MANUAL_ALONE = (
    "the strict rules note it: the manual's text asks for what kernels known right on hardware do "
    "without (ptxemu/check/manual.py)"
)
_SAVE_SECONDS = 5.0
_AHEAD = 4  # mutants per process that wait in the queue, so that an interrupt is quick


Key = tuple[str, str, str, int]  # subject, digest of the kernel's text, class, line of the text
Chosen = list[tuple[Key, Mutant]]


@dataclass(frozen=True)
class Record:
    """One judged mutant. equivalent: the reason by which it means the same as its kernel; noted:
    the strict rules tell the two apart, all the same; instead: what orders what the changed
    instruction ordered, or UNREACHED."""

    subject: str
    ptx: str
    kind: str
    line: int
    instruction: str
    equivalent: str
    by: str
    how: str
    schedule: str
    seconds: float
    noted: bool = False
    instead: str = ""

    @property
    def key(self) -> Key:
        return self.subject, self.ptx, self.kind, self.line

    @property
    def killed(self) -> bool:
        return self.by in NOTICED

    @property
    def survived(self) -> bool:
        """Nothing tells it from its kernel, and nothing shows that it means the same."""
        return self.by == UNNOTICED and not (self.equivalent or self.instead)

    @property
    def same(self) -> str:
        """Why it means the same as its kernel, by a rule or by what a run has shown; else ''."""
        shown = f"{ELSEWHERE}: {self.instead}" if self.instead and not self.unreached else ""
        return "" if self.killed else self.equivalent or shown

    @property
    def unreached(self) -> bool:
        """The problem has nothing that the changed instruction is for."""
        return self.instead == UNREACHED and not self.equivalent and not self.killed


class Records:
    """The records of a campaign in a JSON file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_key: dict[Key, Record] = {}
        self.saved = time.monotonic()
        if path.is_file():
            for row in json.loads(path.read_text(encoding="utf-8"))["mutants"]:
                record = Record(**row)
                self.by_key[record.key] = record

    def add(self, record: Record) -> None:
        self.by_key[record.key] = record
        if time.monotonic() - self.saved > _SAVE_SECONDS:
            self.save()

    def forget_other_kernels(self, chosen: Chosen) -> None:
        """Of the subjects of these mutants, records of texts that they do not launch any more."""
        launched = {key[:2] for key, _ in chosen}
        subjects = {subject for subject, _ in launched}
        self.by_key = {
            key: record
            for key, record in self.by_key.items()
            if key[0] not in subjects or key[:2] in launched
        }

    def save(self) -> None:
        """All or nothing: an interrupt leaves the file before."""
        rows = [asdict(record) for record in self.by_key.values()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps({"mutants": rows}, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, self.path)
        self.saved = time.monotonic()

    def of(self, chosen: Chosen) -> list[Record]:
        """Records of those of these mutants that are judged."""
        return [self.by_key[key] for key, _ in chosen if key in self.by_key]


def keyed(subject: str, kernel: str, mutant: Mutant) -> tuple[Key, Mutant]:
    return (subject, kernel, mutant.kind.name, mutant.instr.line), mutant


@lru_cache(maxsize=1)
def _prepared(subject: str, schedules: int) -> tuple[Judge, dict[Key, Mutant]]:
    """Of this process: mutants come subject by subject."""
    item = SUBJECTS[subject]
    judge = item.judge(dict(islice(SCHEDULES.items(), schedules)))
    return judge, dict(keyed(subject, *each) for each in item.mutants(CLASSES))


def judged(key: Key, schedules: int) -> Record:
    """The verdict on one mutant, in a process of the pool."""
    subject, kernel, *_ = key
    judge, mutants = _prepared(subject, schedules)
    mutant = mutants[key]
    equivalent, noted, instead = mutant.equivalent, False, ""
    if not mutant.executed:
        nothing = asdict(Verdict(UNNOTICED))
        return Record(*key, mutant.instruction, equivalent, **nothing, instead=UNREACHED)
    try:
        verdict = judge.verdict(kernel, mutant)
        if verdict.by == UNNOTICED:
            noted = judge.noted(kernel, mutant)
            takes_away = mutant.kind.name.startswith(("remove", "weaken", "move"))
            equivalent = equivalent or MANUAL_ALONE * (noted and takes_away)
        if verdict.by == UNNOTICED and not equivalent:
            instead = judge.instead(kernel, mutant)
            rest = judge.rest.verdict(kernel, mutant) if instead else verdict
            verdict = rest if rest.noticed else verdict
    except Exception as error:  # noqa: BLE001  (a crash is a result, too: it must not end the rest)
        verdict = Verdict(BROKEN, f"{type(error).__name__}: {error}")
    found = mutant.instruction, equivalent
    return Record(*key, *found, **asdict(verdict), noted=noted, instead=instead)


def run(keys: list[Key], jobs: int, schedules: int, seen: Callable[[Record], None]) -> None:
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
