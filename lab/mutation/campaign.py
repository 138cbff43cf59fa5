"""`mutate.py`: judges many mutants in several processes, and prints the table of verdicts and
the reasons why undetected mutants survive."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lab.mutation.subject import SCHEDULES, Judge
from lab.mutation.subjects import CATEGORIES, EDGE, SUBJECTS, UNEXPLAINED, reason_of
from lab.tools import tables
from lab.tools.common import refuse
from ptxemu.mutation.carried import UNREACHED
from ptxemu.mutation.catalogue import CLASSES, SYNCHRONISATION, Mutant, sampled
from ptxemu.mutation.rerun import BROKEN, NOTICED, UNNOTICED, Verdict

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
    """A judged mutant.

    equivalent: why it means the same as its kernel.
    noted: whether the strict rules still tell the two apart.
    instead: what orders what the changed instruction ordered, or UNREACHED."""

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
        """Whether nothing detects the mutant, and nothing shows that it is equivalent."""
        return self.by == UNNOTICED and not (self.equivalent or self.instead)

    @property
    def same(self) -> str:
        """Why it means the same as its kernel, by a rule or by what a run has shown; else ''."""
        shown = f"{EDGE}: {self.instead}" if self.instead and not self.unreached else ""
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
        """Drop, of the subjects of these mutants, records of texts that they do not launch any
        more."""
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
    """Judge and mutants of this process: mutants come subject by subject."""
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


_TITLE = "mutants, and what tells them from their kernel; noted: equivalent, but for strict rules"
MAX_EQUIVALENT, MIN_KILLED = 0.15, 0.97
_COLUMNS = ("mutants", *NOTICED, "equivalent", "noted", "unreached", "survived")


def counts(records: Sequence[Record]) -> Counter:
    """Count records by the table's columns. A killed mutant is never counted as equivalent."""
    found = Counter(record.by for record in records if record.killed)
    found["mutants"] = len(records)
    found["equivalent"] = sum(bool(r.same) for r in records)
    found["unreached"] = sum(r.unreached for r in records)
    found["noted"] = sum(r.noted for r in records)
    found["survived"] = sum(r.survived for r in records)
    found[BROKEN] = sum(r.by == BROKEN for r in records)
    return found


def shares(records: Sequence[Record]) -> tuple[float, float]:
    """(equivalent among all, killed among the rest that the problem reaches)."""
    found = counts(records)
    rest = found["mutants"] - found["equivalent"] - found["unreached"]
    killed = sum(found[by] for by in NOTICED)
    return found["equivalent"] / max(found["mutants"], 1), killed / max(rest, 1)


def within_contract(records: Sequence[Record]) -> bool:
    equivalent, killed = shares(records)
    return equivalent <= MAX_EQUIVALENT and killed >= MIN_KILLED


def _grouped(records: Sequence[Record], name: str) -> dict[str, Sequence[Record]]:
    """Group by a field, in the order of the records, and add a group of all."""
    values = dict.fromkeys(getattr(record, name) for record in records)
    groups = {value: [r for r in records if getattr(r, name) == value] for value in values}
    return {**groups, "all": records}


def show(records: Sequence[Record], console: Console) -> None:
    """Table, percentages, reasons, survivors."""
    columns = [c for c in (*_COLUMNS, BROKEN) if c != BROKEN or counts(records)[BROKEN]]
    rows = [
        [kind, *(str(counts(group)[column] or "0" * (kind == "all")) for column in columns)]
        for kind, group in _grouped(records, "kind").items()
    ]
    tables.show(_TITLE, ["class", *columns], rows, console)
    for subject, group in _grouped(records, "subject").items():
        equivalent, killed = shares(group)
        console.print(
            f"{subject}: {len(group)} mutants, {equivalent:.1%} equivalent "
            f"(limit {MAX_EQUIVALENT:.0%}), of the rest {killed:.1%} killed "
            f"(at least {MIN_KILLED:.0%})",
            highlight=False,
        )
    console.print("\nEquivalent, by class:")
    for kind, reason in dict.fromkeys(
        (r.kind, r.equivalent) for r in records if r.equivalent and not r.killed
    ):
        console.print(f"  {kind}: {reason}", highlight=False, markup=False, soft_wrap=True)
    for r in records:
        if r.instead and r.same:
            words = f"  {r.subject}: {r.kind} @{r.line}: {r.same}"
            console.print(words, highlight=False, markup=False, soft_wrap=True)
    for title, chosen in (
        ("Killed though called equivalent", [r for r in records if r.equivalent and r.killed]),
        (f"Not reached: {UNREACHED}", [r for r in records if r.unreached]),
        *survivors(records).items(),
        ("No PTX", [r for r in records if r.by == BROKEN]),
    ):
        if chosen:
            console.print(f"\n{title}:")
        for r in chosen:
            _show_one(r, console)


def survivors(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group survivors by the category of their reason; those without a reason come last."""
    found: dict[str, list[Record]] = {
        f"Survivors, {name}": [] for name in (*CATEGORIES, UNEXPLAINED)
    }
    for record in records:
        if record.survived:
            reason = reason_of(record.subject, record.kind, record.instruction)
            found[f"Survivors, {reason.category if reason else UNEXPLAINED}"].append(record)
    return found


def _show_one(record: Record, console: Console) -> None:
    reason = reason_of(record.subject, record.kind, record.instruction)
    words = f"  {record.subject}: {record.kind} @{record.line}  {record.instruction}"
    words += f": {record.how}" * bool(record.how)
    words += f"\n      {reason.argument}" if record.survived and reason else ""
    console.print(words, highlight=False, markup=False, soft_wrap=True)


def chosen_mutants(options: argparse.Namespace) -> Chosen:
    """Subject by subject; the kernels are compiled and launched for it."""
    found: Chosen = []
    kinds = [kind for kind in CLASSES if any(part in kind.name for part in options.kind or ())]
    for name, subject in SUBJECTS.items():
        if options.subject and not any(part in name for part in options.subject):
            continue
        mutants = subject.mutants(kinds if options.kind else SYNCHRONISATION)
        if options.sample:
            mutants = sampled(mutants, options.sample, options.seed)
        found += [keyed(name, *mutant) for mutant in mutants]
    return found


def print_list(chosen: Chosen) -> None:
    for (name, *_), mutant in chosen:
        print(f"{name}: {mutant.name}  {mutant.instruction}")
    for name, count in Counter(name for (name, *_), _ in chosen).items():
        same = sum(bool(mutant.equivalent) for key, mutant in chosen if key[0] == name)
        print(f"{name}: {count} mutants, {same} of them equivalent by rule")


def still_to_judge(chosen: Chosen, records: Records, again: str | None) -> list[Key]:
    """Mutants without a verdict on the text as it is, and those that are wanted again."""
    keys = []
    for key, _ in chosen:
        record = records.by_key.get(key)
        if not record or again == "all" or (again == "survivors" and not record.killed):
            keys.append(key)
    return keys


def judge(keys: list[Key], records: Records, options: argparse.Namespace, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    schedules = len(SCHEDULES) if options.schedules is None else options.schedules
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("mutants", total=len(keys))

        def seen(record: Record) -> None:
            records.add(record)
            progress.update(task, advance=1, description=record.subject)
            if record.survived:
                progress.console.print(
                    f"survived: {record.subject}: {record.kind} @{record.line} "
                    f"{record.instruction}",
                    highlight=False, markup=False, soft_wrap=True,
                )  # fmt: skip

        try:
            run(keys, options.jobs, schedules, seen)
        finally:
            records.save()


def print_classes() -> None:
    for kind in CLASSES:
        reason = f" Equivalent where {kind.same.reason}." if kind.same.reason else ""
        print(f"{kind.name}: {kind.does} ({kind.section}).{reason}")


def perform(options: argparse.Namespace) -> int:
    """Do what the flags request; return the exit code."""
    if options.classes:
        print_classes()
        return 0
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the pool, too
    chosen = chosen_mutants(options)
    if not chosen:
        return refuse(f"nothing of --subject {options.subject} and --kind {options.kind}")
    if options.list:
        print_list(chosen)
        return 0
    records = Records(options.json)
    records.forget_other_kernels(chosen)
    keys = still_to_judge(chosen, records, options.again)
    if keys:
        judge(keys, records, options, console)
    found = records.of(chosen)
    show(found, console)
    return 0 if within_contract(found) else 1
