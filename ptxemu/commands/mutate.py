"""`python -m ptxemu mutate`: synchronisation removed piece by piece, and what notices."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptxemu.commands.subject import (
    EXIT_CODES,
    PROTOCOL,
    REFUSED,
    RIGHT,
    WRONG,
    add_limit,
    limit_of,
    parse,
    parser_of,
)
from ptxemu.host.command_line import output_file
from ptxemu.schedules import add_schedule_arguments, schedules

if TYPE_CHECKING:
    from ptxemu.mutation.catalogue import Mutant
    from ptxemu.mutation.rerun import Baseline, Verdict

ABOUT = f"""\
Mutants of a script's kernels: each synchronising instruction of their PTX is removed in turn, and
the script runs again with the checker. If nothing notices a mutant (no finding, no deadlock, no
refusal, no error of the script), the instruction is not needed by your tests, or the tests are
weak: give the script a problem with more tiles, and let it compare its results.

Mutants that are equivalent to their kernel by a rule are listed with the reason. Every verdict is
written to the JSON file at once. Verdicts in the file for the same PTX and flags are reused, so
that an interrupted campaign can be resumed.

{PROTOCOL}

{EXIT_CODES}
Here 1 means that a mutant went unnoticed, or that the script fails without mutants."""
_LEAST_PATIENCE = (
    60.0  # seconds; a run of a mutant may also be this many times as long as the first
)
_TIMES = 20


@dataclass(frozen=True)
class Row:
    """A judged mutant.

    Attributes:
        by: What noticed it, '' for nothing.
        same: Why it is equivalent to its kernel.
        ptx: Digest of the text to which `line` refers.
        rules: Schedules and strictness.
    """

    kernel: str
    kind: str
    line: int
    instruction: str
    source: str
    by: str
    how: str
    schedule: str
    seconds: float
    same: str
    ptx: str
    rules: str

    @property
    def key(self) -> tuple[Any, ...]:
        return self.ptx, self.kind, self.line, self.rules


def main(words: list[str] | None, program: str | None = None) -> int:
    """Judge the mutants and print the table; returns the exit code."""
    parser = arguments_of(program)
    options = parse(parser, words)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}; must be at least 1")

    from ptxemu.commands.workers import first_run

    rules = _rules(options)
    first = first_run(options, rules)
    if first.failure:
        print(f"the script fails as it is: {first.failure}", file=sys.stderr)
        return WRONG
    if not first.kernels:
        print("nothing was launched: there is nothing to mutate", file=sys.stderr)
        return REFUSED
    if first.known:
        words_ = f"the checker has {len(first.known)} findings in the script as it is"
        print(f"{words_}; mutants are not noticed by them (see `check`)", file=sys.stderr)
    mutants = _chosen(first, options)
    if not mutants:
        print("no instruction of the kernels is one that is asked for", file=sys.stderr)
        return REFUSED
    if options.list:
        print("\n".join(_listed(mutants, first)))
        return RIGHT
    rows = _judge(mutants, first, options, rules)
    print(table(rows))
    return WRONG if any(unnoticed(row) for row in rows) else RIGHT


def arguments_of(program: str | None) -> argparse.ArgumentParser:
    parser = parser_of(program, ABOUT)
    add_schedule_arguments(parser)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also count notes on what only the manual's text requires",
    )
    add_limit(parser, 120.0)
    parser.add_argument(
        "--kind",
        action="append",
        metavar="TEXT",
        help="classes of mutation whose name contains this text; repeatable (default: remove)",
    )
    parser.add_argument(
        "--classes", action=_PrintClasses, nargs=0, help="print the classes, and stop"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants; judge none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default 1)")
    parser.add_argument(
        "--json",
        type=output_file,
        default=Path("ptxemu-mutants.json"),
        metavar="FILE",
        help="file of the verdicts (default ptxemu-mutants.json)",
    )
    return parser


class _PrintClasses(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ptxemu.mutation.catalogue import CLASSES

        for kind in CLASSES:
            print(f"{kind.name}: {kind.does} ({kind.section})")
        parser.exit()


def _rules(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Schedule -> what it changes of the options of every launch."""
    fixed = {"check": True, "strict": options.strict, "limit": limit_of(options)}
    chosen = schedules(options.policy, options.seeds)
    return {str(schedule): {**schedule._asdict(), **fixed} for schedule in chosen}


def _chosen(first: Baseline, options: argparse.Namespace) -> list[tuple[str, Mutant]]:
    """(digest of the kernel, mutant)."""
    from ptxemu.mutation.catalogue import CLASSES, mutants
    from ptxemu.mutation.text import Text

    wanted = options.kind or ["remove "]
    kinds = [kind for kind in CLASSES if any(text in kind.name for text in wanted)]
    return [
        (key, mutant)
        for key, kernel in first.kernels.items()
        for mutant in mutants(Text(kernel.ptx, kernel.observed), kinds)
    ]


def _listed(mutants: Sequence[tuple[str, Mutant]], first: Baseline) -> Iterator[str]:
    for key, kernel in first.kernels.items():
        own = [mutant for other, mutant in mutants if other == key]
        yield f"kernel {kernel.entry}: {len(own)} mutants"
        for mutant in own:
            yield f"  {mutant.name}  {mutant.instruction}"
            yield from [f"    at {mutant.instr.source}"] * bool(mutant.instr.source)


def _judge(
    mutants: Sequence[tuple[str, Mutant]],
    first: Baseline,
    options: argparse.Namespace,
    rules: dict[str, dict[str, Any]],
) -> list[Row]:
    """Return the rows of these mutants, including those in the file."""
    from ptxemu.commands.workers import judged

    named = ",".join(rules) + ", strict" * options.strict
    rows = {row.key: row for row in _kept(options.json)}
    keys = {(key, m.kind.name, m.instr.line, named): None for key, m in mutants}
    todo = [(key, m) for key, m in mutants if (key, m.kind.name, m.instr.line, named) not in rows]
    patience = _LEAST_PATIENCE + _TIMES * first.seconds * len(rules)
    verdicts = judged(
        options,
        rules,
        todo,
        lambda item: (item[0], dict(item[1].change.lines)),
        first.known,
        patience,
    )
    done = len(mutants) - len(todo)
    for (key, mutant), verdict in verdicts:
        row = _row(first.kernels[key].entry, key, mutant, verdict, named)
        rows[row.key] = row
        _keep(options.json, rows.values())
        done += 1
        told = f"{row.by}: {row.how}" if row.by else "unnoticed" + ", equivalent" * bool(row.same)
        print(f"[{done}/{len(mutants)}] {mutant.name}: {told} ({row.seconds} s)", file=sys.stderr)
    return [rows[key] for key in keys]


def _row(entry: str, key: str, mutant: Mutant, verdict: Verdict, rules: str) -> Row:
    return Row(
        entry,
        mutant.kind.name,
        mutant.instr.line,
        mutant.instruction,
        mutant.instr.source,
        **asdict(verdict),
        same=mutant.equivalent,
        ptx=key,
        rules=rules,
    )


def _kept(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["mutants"]]


def _keep(path: Path, rows: Any) -> None:
    """Write the file atomically: an interrupt leaves the previous one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps({"mutants": [*map(asdict, rows)]}, indent=1) + "\n", "utf-8")
    os.replace(draft, path)


# ---- the table


def unnoticed(row: Row) -> bool:
    """Whether nothing noticed the mutant and no reason makes it equivalent."""
    return not row.by and not row.same


def table(rows: Sequence[Row]) -> str:
    """Return a table: by class, what noticed its mutants and in what time; then unnoticed ones."""
    from ptxemu.mutation.rerun import BROKEN, NOTICED

    columns = ["mutants", *NOTICED, BROKEN, "equivalent", "unnoticed"]
    groups = {kind: [row for row in rows if row.kind == kind] for kind in (r.kind for r in rows)}
    counts = {kind: _counts(group) for kind, group in {**groups, "all": [*rows]}.items()}
    columns = [name for name in columns if counts["all"][name] or name in ("mutants", "unnoticed")]
    width = max(map(len, counts))
    lines = [" ".join([" " * width, *columns])]
    for kind, count in counts.items():
        cells = [f"{count[name] or '':>{len(name)}}" for name in columns]
        lines.append(" ".join([f"{kind:<{width}}", *cells]).rstrip())
    noticed = sum(counts["all"][name] for name in NOTICED)
    judged = noticed + counts["all"]["unnoticed"]
    lines += ["", f"noticed: {noticed} of {judged} ({noticed / max(judged, 1):.1%})"]
    for title, chosen in (
        ("Unnoticed", [row for row in rows if unnoticed(row)]),
        ("Equivalent", [row for row in rows if row.same and not row.by]),
        ("No PTX", [row for row in rows if row.by == BROKEN]),
    ):
        lines += ["", f"{title}:"] * bool(chosen)
        for kernel in dict.fromkeys(row.kernel for row in chosen):
            lines.append(f"  kernel {kernel}")
            for row in (row for row in chosen if row.kernel == kernel):
                place = f" at {row.source}" * bool(row.source)
                lines.append(f"    {row.kind} @{row.line}  {row.instruction}{place}")
                lines += [f"      {text}" for text in (row.same, row.how) if text]
    return "\n".join(lines)


def _counts(rows: Sequence[Row]) -> Counter[str]:
    found = Counter(row.by for row in rows if row.by)
    found["mutants"] = len(rows)
    found["equivalent"] = sum(bool(row.same) and not row.by for row in rows)
    found["unnoticed"] = sum(map(unnoticed, rows))
    return found
