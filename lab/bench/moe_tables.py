"""Tables of layers of experts beside their peers: for a terminal, for a page.

Rows are those of `bench.py moe --model`: of a part, a number of tokens, a peer, and how it was
called, with "us" and so on, or why it was "refused".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lab.bench.moe_peers import OURS, OURS_E4M3
from lab.tools.tables import Table
from lab.tools.tables import markdown as markdown_of

TIMES = (
    ("peer", "{peer}"), ("as", "{how}"), ("us", "{us:.1f}"), ("TFLOP/s", "{tflops:.1f}"),
    ("GB/s of weights", "{weight_gbs:.0f}"), ("of bound", "{of_bound:.2f}"), ("bound", "{bound}"),
    ("of best peer", "{of_best:.2f}"), ("spread", "{spread:.1%}"), ("host us", "{host_us:.1f}"),
    ("SM MHz", "{sm_mhz:.0f}"), ("W", "{watts:.0f}"), ("error", "{error:.1e}"),
)  # fmt: skip
SUBJECT = ("model", "fmt", "part", "routing")


def title_of(row: dict) -> str:
    """Of the problem of a row."""
    name, fmt, part, routing = (row[field] for field in SUBJECT)
    rows = f"{row['experts']} experts have rows, {row['most_rows']} at most"
    return f"{name}, {fmt}, {part}, {routing}, {row['tokens']} tokens: {rows}"


def ranked(rows: list[dict]) -> list[dict]:
    """The rows of one problem, those with a time also with `of_best`: the time of the quickest
    other peer, called in any way, over theirs."""
    theirs = [row for row in rows if row["peer"] not in (OURS, OURS_E4M3)]
    best = min((row["us"] for row in theirs if "us" in row), default=None)
    for row in rows:
        if "us" in row and best:
            row["of_best"] = best / row["us"]
    return rows


def by_subject(rows: Sequence[dict]) -> Iterator[tuple[str, list[dict]]]:
    """(model, format, part and routing in words; its rows) of each."""
    order = {key: number for number, key in enumerate(dict.fromkeys(map(_subject, rows)))}
    for key, group in itertools.groupby(sorted(rows, key=lambda r: order[_subject(r)]), _subject):
        yield ", ".join(key), [*group]


def _subject(row: dict) -> tuple[str, ...]:
    return tuple(row[field] for field in SUBJECT)


def lines_of(rows: Sequence[dict], how: str, mark: str) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line per subject and peer: microseconds by tokens, the quickest marked."""
    counts = sorted({row["tokens"] for row in rows})
    lines = []
    for words, found in by_subject([row for row in rows if row["how"] == how]):
        best = {
            count: min((r["us"] for r in found if r["tokens"] == count and "us" in r), default=None)
            for count in counts
        }
        for peer in dict.fromkeys(row["peer"] for row in found):
            mine = {row["tokens"]: row for row in found if row["peer"] == peer}
            cells = []
            for count in counts:
                us = mine.get(count, {}).get("us")
                text = "-" if us is None else f"{us:.{1 if us < 100 else 0}f}"
                cells.append(mark.format(text) if us is not None and us == best[count] else text)
            reason = next((row["refused"] for row in mine.values() if "refused" in row), "")
            lines.append([words, peer, *cells, reason])
    return ["layer", "peer", *map(str, counts), ""], lines


def summary(rows: Sequence[dict], how: str = "graph") -> Table:
    """Microseconds by tokens, in CUDA graphs."""
    heads, lines = lines_of(rows, how, "{} *")
    return f"microseconds by tokens, as {how}", heads, lines


def markdown(rows: Sequence[dict]) -> str:
    """The same for a page."""
    return markdown_of(*lines_of(rows, "graph", "**{}**"))
