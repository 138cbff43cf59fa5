"""Tables and pictures of layers of experts beside their peers: for a terminal, for a page, with
matplotlib.

Rows are those of `bench.py moe --model`: of a part, a number of tokens, a peer, and how it was
called, with "us" and so on, or why it was "refused".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from workbench.bench.moe_peers import OURS, OURS_E4M3
from workbench.tables import Table, picture
from workbench.tables import markdown as markdown_of

TIMES = (
    ("peer", "{peer}"), ("as", "{how}"), ("us", "{us:.1f}"), ("TFLOP/s", "{tflops:.1f}"),
    ("GB/s of weights", "{weight_gbs:.0f}"), ("of bound", "{of_bound:.2f}"), ("bound", "{bound}"),
    ("of best peer", "{of_best:.2f}"), ("spread", "{spread:.1%}"), ("host us", "{host_us:.1f}"),
    ("SM MHz", "{sm_mhz:.0f}"), ("W", "{watts:.0f}"), ("error", "{error:.1e}"),
)  # fmt: skip
SUBJECT = ("model", "fmt", "part", "routing")
COLOURS = {
    OURS: "#1b1b3a", OURS_E4M3: "#6c6cc4", "triton": "#d1495b", "triton-plain": "#edae49",
    "torch": "#66a182",
}  # fmt: skip


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


def draw(path: Path, rows: Sequence[dict], head: dict) -> None:
    """Microseconds against tokens: a panel per subject, a line per peer, and the bound."""
    panels = [*by_subject([row for row in rows if "us" in row])]
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns) or 1
    how = {"layout": "constrained", "figsize": (1 + 4.6 * columns, 1 + 3.4 * lines)}
    with picture(path, lines, columns, **how) as (figure, axes):
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (title, found) in zip(axes.flat, panels, strict=False):
            bound = sorted({(row["tokens"], row["bound_us"]) for row in found})
            axis.plot(*zip(*bound, strict=True), ":", color="grey", label="bound")
            for peer, how_ in dict.fromkeys((row["peer"], row["how"]) for row in found):
                same = [r for r in found if (r["peer"], r["how"]) == (peer, how_)]
                points = sorted((row["tokens"], row["us"]) for row in same)
                style = "-o" if how_ == "graph" else "--x"
                colour, label = COLOURS.get(peer), f"{peer}, {how_}"
                axis.plot(*zip(*points, strict=True), style, color=colour, label=label, ms=4)
            axis.set(xscale="log", yscale="log", xlabel="tokens", ylabel="us")
            axis.set_title(title, fontsize=9)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
        figure.suptitle(f"{head.get('gpu', {}).get('name', 'GPU')}, {head['date']}")
