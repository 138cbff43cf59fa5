"""Mutants of the kernels: each synchronising instruction removed or weakened in turn, and
what tells the mutant from the kernel.

    python scripts/mutate.py --list                        # what would be judged
    python scripts/mutate.py --subject "64 base tmem"      # one kernel
    python scripts/mutate.py --jobs 2                      # all; an interrupted campaign goes on

Every verdict is kept in the JSON file at once. A mutant is killed by a finding of the checker, by
wrong bits, a deadlock or a refusal, under the first schedule that notices.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests are not installed

from _common import refuse
from tests.mutation import campaign
from tests.mutation.campaign import Record, Records, digest, key_of
from tests.mutation.catalogue import CLASSES
from tests.mutation.classes import Mutant
from tests.mutation.subjects import SUBJECTS
from tests.mutation.table import show, within_contract
from tests.mutation.verdict import SCHEDULES

Chosen = list[tuple[str, Mutant]]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()))
    parser.add_argument(
        "--subject", action="append", metavar="TEXT", help="kernels whose name contains it"
    )
    parser.add_argument(
        "--kind", action="append", metavar="TEXT", help="mutation classes whose name contains it"
    )
    parser.add_argument("--list", action="store_true", help="count the mutants and judge none")
    parser.add_argument("--classes", action="store_true", help="print the mutation classes")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; default: 2")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="so many of each kernel")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--schedules",
        type=int,
        default=len(SCHEDULES),
        metavar="N",
        help="only the first N of them; the first one is checked",
    )
    parser.add_argument(
        "--again",
        choices=("survivors", "all"),
        help="judge again what the file holds, or what survived in it",
    )
    parser.add_argument(
        "--json", type=Path, default=Path("out/mutants.json"), help="default: out/mutants.json"
    )
    return parser.parse_args()


def print_classes() -> None:
    for kind in CLASSES:
        reason = f" Equivalent where {kind.same.reason}." if kind.same.reason else ""
        print(f"{kind.name}: {kind.does} ({kind.section}).{reason}")


def chosen_mutants(options: argparse.Namespace) -> Chosen:
    """Kernel by kernel; each is compiled for it."""
    found: Chosen = []
    for name, subject in SUBJECTS.items():
        if options.subject and not any(part in name for part in options.subject):
            continue
        mutants = [
            mutant
            for mutant in subject.mutants()
            if not options.kind or any(part in mutant.kind.name for part in options.kind)
        ]
        if options.sample:
            numbers = random.Random(options.seed).sample(
                range(len(mutants)), min(options.sample, len(mutants))
            )
            mutants = [mutants[number] for number in sorted(numbers)]
        found += [(name, mutant) for mutant in mutants]
    return found


def print_list(chosen: Chosen) -> None:
    for name, mutant in chosen:
        print(f"{name}: {mutant.name}  {mutant.instruction}")
    for name, count in Counter(name for name, _ in chosen).items():
        same = sum(bool(mutant.equivalent) for subject, mutant in chosen if subject == name)
        print(f"{name}: {count} mutants, {same} of them equivalent by rule")


def still_to_judge(chosen: Chosen, records: Records, again: str | None) -> list:
    """Mutants without a verdict on the text as it is, and those that are wanted again."""
    keys = []
    for name, mutant in chosen:
        record = records.by_key.get(key_of(name, mutant))
        known = record is not None and record.ptx == digest(mutant.text.ptx)
        if not known or again == "all" or (again == "survivors" and not record.killed):
            keys.append(key_of(name, mutant))
    return keys


def judge(keys: list, records: Records, options: argparse.Namespace, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
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
            campaign.run(keys, options.jobs, options.schedules, seen)
        finally:
            records.save()


def main() -> int:
    options, console = parsed(), Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the pool, too
    if options.classes:
        print_classes()
        return 0
    chosen = chosen_mutants(options)
    if not chosen:
        return refuse(f"nothing of --subject {options.subject} and --kind {options.kind}")
    if options.list:
        print_list(chosen)
        return 0
    records = Records(options.json)
    keys = still_to_judge(chosen, records, options.again)
    if keys:
        judge(keys, records, options, console)
    found = records.of(chosen)
    show(found, console)
    return 0 if within_contract(found) else 1


if __name__ == "__main__":
    sys.exit(main())
