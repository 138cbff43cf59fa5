"""The tuner: what the rules choose, and what a race finds, beside the fastest of all candidates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lab.report.documents import Document, Row
from lab.tools import style

RULES = style.Look(style.VERMILION, "o")
RACE = style.Look(style.BLUE, "^", ours=True)
STEP = 0.28  # between the points of both in one line
BAR = 1.03  # what the race should be within


def draw(path: Path, document: Document, source: str = "") -> None:
    """A line per operator and draw of shapes: a point per shape for the rules, one for the race."""
    from matplotlib.lines import Line2D

    lines = lines_of(document)
    how = {
        "height": 1.35 + 0.42 * len(lines),
        "title": "Time over that of the fastest candidate, shapes drawn at random",
        "caption": f"Measured on {document.gpu}, {document.date}: cold L2, CUDA graphs; every "
        "candidate was sampled to the end",
        "keys": 1,
    }
    with style.picture(path, source=source, **how) as (figure, axes):
        axis = axes[0][0]
        for at, (_, rows) in enumerate(lines):
            for name, place, look in (("rules_us", -1, RULES), ("us", 1, RACE)):
                times = [row[name] / row["fastest_us"] for row in rows]
                heights = [at + place * STEP / 2] * len(rows)
                axis.plot(times, heights, linestyle="", **look.marks(5))
        axis.axvline(BAR, color=style.GREY, linewidth=1, linestyle=":")
        axis.set_xscale("log")
        ticks = (1, 1.1, 1.2, 1.5, 2, 3)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_yticks(range(len(lines)), [name for name, _ in lines])
        axis.set_ylim(len(lines) - 0.5, -0.5)
        axis.grid(axis="x")
        axis.set_xlabel("1 is the fastest; dotted: 3 % slower")
        words = {"what the rules choose": RULES, "what the tuner keeps": RACE}
        style.legend(figure, [
            Line2D([], [], label=name, linestyle="", **look.marks(5))
            for name, look in words.items()
        ])  # fmt: skip


def lines_of(document: Document) -> list[tuple[str, Sequence[Row]]]:
    """(operator, and which rules; its shapes), in the order of the file."""

    def line(row: Row) -> tuple[str, str]:
        return row["operator"], row["rules"]

    found = []
    for (operator, rules), rows in groupby(document.rows, line):
        words = "" if "before" not in rules else "\nolder rules"
        found.append((operator + words, [*rows]))
    return found
