"""What mutate.py does: mutants made, judged, kept and counted."""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lab.mutation import campaign
from lab.mutation.campaign import SUBJECTS, Chosen, Key, Record, Records, keyed
from lab.mutation.subject import SCHEDULES
from lab.mutation.table import show, within_contract
from lab.tools.common import refuse
from ptxemu.mutation.catalogue import CLASSES, SYNCHRONISATION, sampled


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
            campaign.run(keys, options.jobs, schedules, seen)
        finally:
            records.save()


def print_classes() -> None:
    for kind in CLASSES:
        reason = f" Equivalent where {kind.same.reason}." if kind.same.reason else ""
        print(f"{kind.name}: {kind.does} ({kind.section}).{reason}")


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
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
