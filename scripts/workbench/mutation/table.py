"""The table of a campaign: class by class what killed its mutants, and the percentages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table

from workbench.mutation.campaign import Record
from workbench.mutation.verdict import BROKEN, KILLERS

_TITLE = "mutants, and what tells them from their kernel; noted: equivalent, but for strict rules"
MAX_EQUIVALENT, MIN_KILLED = 0.15, 0.95
_COLUMNS = ("mutants", *KILLERS, "equivalent", "noted", "survived")


def counts(records: Sequence[Record]) -> Counter:
    """By the columns of the table. A mutant that is killed is not equivalent, whatever was said."""
    found = Counter(record.by for record in records if record.killed)
    found["mutants"] = len(records)
    found["equivalent"] = sum(bool(r.equivalent) and not r.killed for r in records)
    found["noted"] = sum(r.noted for r in records)
    found["survived"] = sum(r.survived for r in records)
    found[BROKEN] = sum(r.by == BROKEN for r in records)
    return found


def shares(records: Sequence[Record]) -> tuple[float, float]:
    """(equivalent among all, killed among the rest)."""
    found = counts(records)
    rest = found["mutants"] - found["equivalent"]
    killed = sum(found[by] for by in KILLERS)
    return found["equivalent"] / max(found["mutants"], 1), killed / max(rest, 1)


def within_contract(records: Sequence[Record]) -> bool:
    equivalent, killed = shares(records)
    return equivalent <= MAX_EQUIVALENT and killed >= MIN_KILLED


def table(records: Sequence[Record]) -> Table:
    """A row for each class in the order of the records, and the sum."""
    kinds = dict.fromkeys(record.kind for record in records)
    columns = [c for c in (*_COLUMNS, BROKEN) if c != BROKEN or counts(records)[BROKEN]]
    found = Table("class", title=_TITLE)
    for column in columns:
        found.add_column(column, justify="right")
    for kind in kinds:
        row = counts([record for record in records if record.kind == kind])
        found.add_row(kind, *(str(row[column] or "") for column in columns))
    found.add_section()
    total = counts(records)
    found.add_row("all", *(str(total[column]) for column in columns))
    return found


def show(records: Sequence[Record], console: Console) -> None:
    """Table, percentages, reasons, survivors."""
    console.print(Group(table(records)))
    by_subject = {subject: [r for r in records if r.subject == subject]
                  for subject in dict.fromkeys(r.subject for r in records)}  # fmt: skip
    for subject, of_subject in {**by_subject, "all": list(records)}.items():
        equivalent, killed = shares(of_subject)
        console.print(
            f"{subject}: {len(of_subject)} mutants, {equivalent:.1%} equivalent "
            f"(limit {MAX_EQUIVALENT:.0%}), of the rest {killed:.1%} killed "
            f"(at least {MIN_KILLED:.0%})",
            highlight=False,
        )
    console.print("\nEquivalent, by class:")
    for kind, reason in dict.fromkeys(
        (r.kind, r.equivalent) for r in records if r.equivalent and not r.killed
    ):
        console.print(f"  {kind}: {reason}", highlight=False, markup=False, soft_wrap=True)
    for title, chosen in (
        ("Killed though called equivalent", [r for r in records if r.equivalent and r.killed]),
        ("Survivors", [r for r in records if r.survived]),
        ("No PTX", [r for r in records if r.by == BROKEN]),
    ):
        if chosen:
            console.print(f"\n{title}:")
        for r in chosen:
            how = f": {r.how}" if r.how else ""
            console.print(
                f"  {r.subject}: {r.kind} @{r.line}  {r.instruction}{how}",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip
