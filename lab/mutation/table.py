"""The table of a campaign: class by class what killed its mutants, and the percentages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from lab.mutation.campaign import Record
from lab.mutation.reasons import CATEGORIES, UNEXPLAINED, reason_of
from lab.tools import tables
from ptxemu.mutation.carried import UNREACHED
from ptxemu.mutation.rerun import BROKEN, NOTICED

_TITLE = "mutants, and what tells them from their kernel; noted: equivalent, but for strict rules"
MAX_EQUIVALENT, MIN_KILLED = 0.15, 0.97
_COLUMNS = ("mutants", *NOTICED, "equivalent", "noted", "unreached", "survived")


def counts(records: Sequence[Record]) -> Counter:
    """By the columns of the table. A mutant that is killed is not equivalent, whatever was said."""
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
    """By a field, in the order of the records, and all of them."""
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
    """By the category of their reason; those that have none come last."""
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
