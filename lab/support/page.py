"""docs/support.md: what functions support as tables, and the tables read back."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

from kernelkit.compile.arch import written_for
from lab.house.size import MARKDOWN_COLUMNS
from lab.support.ask import ASKED_OF, KERNELS, OPTIONS, TOGETHER, Rule, Support
from lab.support.space import GPU, GPUS

HEAD = """\
# What is supported

This page lists what each function accepts, and the limit that refuses the rest.
`python scripts/house.py support --write` makes it: it calls the functions with small tensors,
compiles nothing, and asks their own checks. `tests/lab/test_support.py` reads the page, makes 2,000
random calls, and compares.

| GPU | for example |
|---|---|
| sm_100a, sm_103a | B200, B300 |
| sm_90a | H100, H200 |
| sm_80, sm_86, sm_87, sm_89 | A100, RTX 30, Jetson Orin, RTX 40 and L40S |
| sm_120a, sm_121a | RTX 50 and RTX PRO 6000, DGX Spark |
| sm_75 | stands for every GPU without kernels |

How to read a section:

- **Kernels**: the kernel that runs for a GPU and the main arguments, or the number of the limit
  that refuses them. If many head dims have the same kernel, page sizes were asked of the smallest
  and the largest.
- **Options**: values of one further argument, all others at their defaults.
- **Not together**: pairs of values that are refused, though each is accepted without the other.
  They were asked on {asked}, and hold for all GPUs that the same kernels serve.
- **Asked**: all arguments and values, the default first. A value that is not listed was not asked.
- **Limits**: the text of the error, with the values of one such call.

Folders of kernels: `sm100` uses tcgen05, `sm90` wgmma, and `portable` mma.sync.
"""
ANY, ALL_BUT, BETWEEN = "any", "all but ", "; "
LEAST_RUN, MOST_LEFT_OUT = 5, 3
_RUN = re.compile(r"(\d+)-(\d+) step (\d+)")
_NUMBER = re.compile(r"no \[(\d+)\]")
TITLES = {KERNELS: "Kernels", OPTIONS: "Options", TOGETHER: "Not together"}
RUNS, ARGUMENT, VALUE, WITH = "runs", "argument", "value", "with"
ASKED, LIMITS, NUMBER, BAR = "Asked", "Limits", "limit", "\\|"


def page(found: Mapping[str, Support]) -> str:
    """Return the text of docs/support.md."""
    head = HEAD.format(asked=", ".join(ASKED_OF))
    parts = (section(name, each) for name, each in found.items())
    return "\n".join((head, *_rows(_summary(found)), "", *parts))


def _summary(found: Mapping[str, Support]) -> list[tuple[str, ...]]:
    """Return a table of the kernels of each function for every set of GPUs that they serve."""
    served = {of: [gpu for gpu in GPUS if written_for(gpu) == written_for(of)] for of in ASKED_OF}
    rows = [("function", *(", ".join(gpus) for gpus in served.values()))]
    for name, support in found.items():
        rules = [rule for rule in support.rules[KERNELS] if rule.result not in support.notes]
        kernels = (
            dict.fromkeys(rule.result for rule in rules if rule.where[GPU].intersection(gpus))
            for gpus in served.values()
        )
        rows.append((f"`{name}`", *(", ".join(each) or "-" for each in kernels)))
    return rows


def section(name: str, support: Support) -> str:
    """Return the part of the page about one function."""
    lines = [f"## `{name}`", "", *wrap(support.about, MARKDOWN_COLUMNS)]
    for kind, title in TITLES.items():
        rules = sorted(support.rules.get(kind, ()), key=lambda rule: rule.result in support.notes)
        if rules:
            lines += ["", f"**{title}**", "", *_table(kind, rules, support)]
    asked = [(factor, BETWEEN.join(values)) for factor, values in support.factors.items()]
    lines += ["", f"**{ASKED}**", "", *_rows([(ARGUMENT, "values"), *asked])]
    lines += ["", f"**{LIMITS}**", ""]
    lines += _rows([(NUMBER, "error", "its text"), *map(_error, support.notes.items())])
    return "\n".join((*lines, ""))


def _table(kind: str, rules: Sequence[Rule], support: Support) -> list[str]:
    """The lines of the table of one kind of rules."""
    named = {KERNELS: 0, OPTIONS: 1, TOGETHER: 2}[kind]  # factors that a row names itself
    others = [*rules[0].where][named:]
    pairs = [ARGUMENT, VALUE, WITH, VALUE][: 2 * named]
    rows = [(*pairs, *others, RUNS if kind == KERNELS else "accepted")]
    for rule in rules:
        cells = []
        for place, (name, values) in enumerate(rule.where.items()):
            cells += [name] * (place < named) + [values_text(values, support.factors[name])]
        result = f"no [{rule.result}]" if rule.result in support.notes else rule.result
        rows.append((*cells, result))
    return _rows(rows)


def _rows(cells: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown; the first row is its head."""
    lines = [f"| {' | '.join(cell.replace('|', BAR) for cell in row)} |" for row in cells]
    return [lines[0], "|" + "---|" * len(cells[0]), *lines[1:]]


def _error(note: tuple[str, str]) -> tuple[str, ...]:
    """The cells of a note: its number, the error's name and text."""
    number, text = note
    return (number, *text.split(": ", 1))


def read(text: str) -> dict[str, Support]:
    """Return what a page says, by the names of functions."""
    found = {}
    for part in text.split("\n## `")[1:]:
        name, _, body = part.partition("`\n")
        about, *titles = body.split("\n**")
        parts = {title.partition("**")[0]: title.partition("**")[2] for title in titles}
        factors = {row[0]: row[1].split(BETWEEN) for row in _cells(parts[ASKED])[1:]}
        support = Support(" ".join(about.split()), factors)
        support.notes = {row[0]: f"{row[1]}: {row[2]}" for row in _cells(parts[LIMITS])[1:]}
        for kind, title in TITLES.items():
            if title in parts:
                support.rules[kind] = _rules(_cells(parts[title]), factors)
        found[name] = support
    return found


def _cells(text: str) -> list[list[str]]:
    """The cells of a table, its head included."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return [[cell.replace(BAR, "|") for cell in row] for row in rows]


def _rules(cells: Sequence[Sequence[str]], factors: Mapping[str, Sequence[str]]) -> list[Rule]:
    """Read the rules of a table."""
    head, *rows = cells
    rules = []
    for *row, result in rows:
        where, named = {}, None
        for title, cell in zip(head, row, strict=False):
            if title in (ARGUMENT, WITH):
                named = cell
            else:
                name = named if title == VALUE and named else title
                where[name] = values_of(cell, factors[name])
        number = _NUMBER.fullmatch(result)
        rules.append(Rule(where, number[1] if number else result))
    return rules


def values_text(values: Iterable[str], every: Sequence[str]) -> str:
    """Return a set of a factor's values as text: `any`, ranges of numbers, and others by name."""
    chosen = set(values)
    if chosen == set(every):
        return ANY
    left_out = [value for value in every if value not in chosen]
    if len(left_out) <= MOST_LEFT_OUT < len(chosen):
        return ALL_BUT + BETWEEN.join(left_out)
    words: list[str] = []
    numbers = sorted(int(value) for value in chosen if value.isdigit())
    while numbers:
        count = _run(numbers)
        if count >= LEAST_RUN:
            words.append(f"{numbers[0]}-{numbers[count - 1]} step {numbers[1] - numbers[0]}")
        else:
            count = 1
            words.append(str(numbers[0]))
        numbers = numbers[count:]
    others = (value for value in every if value in chosen and not value.isdigit())
    return BETWEEN.join((*words, *others))


def _run(numbers: Sequence[int]) -> int:
    """How many of the first numbers are equally far from each other."""
    count = min(len(numbers), 2)
    while count < len(numbers) and numbers[count] - numbers[count - 1] == numbers[1] - numbers[0]:
        count += 1
    return count


def values_of(text: str, every: Sequence[str]) -> frozenset[str]:
    """Read what `values_text` wrote; ValueError for what is no value."""
    if text == ANY:
        return frozenset(every)
    if text.startswith(ALL_BUT):
        return frozenset(every) - values_of(text.removeprefix(ALL_BUT), every)
    found: set[str] = set()
    for word in text.split(BETWEEN):
        run = _RUN.fullmatch(word)
        if run is not None:
            first, last, step = map(int, run.groups())
            found |= {str(number) for number in range(first, last + 1, step)}
        else:
            found.add(word)
    if not found <= set(every):
        raise ValueError(f"{text!r}: {sorted(found - set(every))} was not asked")
    return frozenset(found)
