"""Pictures of steps over rows, of measured choices, of a bring-up, and of two runs beside each
other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.report.documents import Document, Row
from lab.tools import style
from lab.tools.bringup_words import GROUPS, NOT_RUN, SKIPPED

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ROW = 0.2  # inches of a row
BAND = 0.10  # of the real time, shaded


def draw_beside(path: Path, document: Document, source: str = "") -> None:
    """A row per launch: modelled over measured cycles."""
    rows = [row for row in document.of("cycles") if "modelled" in row]
    how = {
        "height": 1.3 + ROW * len(rows),
        "title": "Attention on Hopper: MODELLED over measured cycles",
        "caption": f"Measured by ncu on one {document.gpu}, {document.date}, bf16, 16k tokens in "
        "all, heads x head_dim = 2,048; modelled by cycles.py.\nDot: nominal parameters; bar: "
        "range over other sets. 1: the model is right; below 1 it is too fast",
    }
    with style.picture(path, source=source, **how) as (_, ((axis,),)):
        axis.axvspan(1 - BAND, 1 + BAND, color=style.PALE, alpha=0.5, linewidth=0)
        axis.axvline(1.0, color=style.BLACK, linewidth=1.2)
        here = style.look("ours")
        for at, row in enumerate(rows):
            nominal, low, high = (cycles / row["cycles"] for cycles in row["modelled"])
            bar = {"linewidth": 6, "alpha": 0.45, "solid_capstyle": "butt"}
            axis.plot([low, high], [at, at], color=here.colour, **bar)
            axis.plot([nominal], [at], **here.marks(5.5))
        axis.set_yticks(range(len(rows)), [_name(row) for row in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlabel("modelled / measured; within 10 % shaded", fontsize=style.SMALL)
        axis.tick_params(axis="y", length=0)
        style.grid(axis, "x")


def _name(row: Row) -> str:
    """Return the row's name with its mask, and whether CTAs form pairs."""
    flags = row.get("flags", "")
    mask = "causal" if "--causal" in flags else "full"
    return f"{row['name']}, {mask}" + ", pairs" * ("--ctas 2" in flags)


COLUMNS = 2
KEY = 0.155  # inches of a name in a key


def draw_steps(path: Path, document: Document, source: str = "") -> None:
    """A panel per step, a line per variant."""
    rows = ours(document.of("step"))
    steps = list(dict.fromkeys(row["step"] for row in rows))
    lines = -(-len(steps) // COLUMNS) or 1
    names = {step: list(dict.fromkeys(r["name"] for r in rows if r["step"] == step))
             for step in steps}  # fmt: skip
    most = max(map(len, names.values()), default=0)
    how = {
        "height": 0.85 + lines * (1.9 + KEY * most),
        "title": "Steps that move memory: speed relative to a copy (higher is better)",
        "caption": f"Measured on one {document.gpu}, {document.date}: dtypes and heads as "
        "named, else bf16.\n1.0: as fast as a copy of as many bytes. With few rows the time is "
        "that of a launch",
    }
    with style.picture(path, lines, COLUMNS, source=source, **how) as (_, axes):
        for axis in axes.flat[len(steps) :]:
            axis.set_axis_off()
        for axis, step in zip(axes.flat, steps, strict=False):
            _panel(axis, [row for row in rows if row["step"] == step], names[step])
            axis.set_title(step, loc="left", weight="bold", fontsize=style.SMALL)


def ours(rows: Sequence[Row]) -> list[Row]:
    """Rows of the first peer of each problem, which is ours."""
    first: dict[tuple[str, str], str] = {}
    for row in rows:
        first.setdefault((row["step"], row["name"]), row["peer"])
    return [row for row in rows
            if "share" in row and row["peer"] == first[row["step"], row["name"]]]  # fmt: skip


def _panel(axis: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    counts = sorted({row["tokens"] for row in rows})
    places = {count: at for at, count in enumerate(counts)}
    axis.axhline(1.0, color=style.BLACK, linewidth=1.2)
    for number, name in enumerate(names):
        mine = sorted((places[r["tokens"]], r["share"]) for r in rows if r["name"] == name)
        axis.plot(*zip(*mine, strict=True), **style.OTHERS[number].line(), label=name)
    axis.set_xticks(range(len(counts)), style.named(counts))
    axis.set_xlabel("rows", fontsize=style.SMALL)
    axis.set_ylim(0, None)
    style.grid(axis, "y")
    place = {"loc": "upper left", "bbox_to_anchor": (-0.08, -0.22), "frameon": False}
    axis.legend(**place, borderaxespad=0, labelspacing=0.2, fontsize=style.SMALL)


RULES = style.Look(style.VERMILION, "o")
RACE = style.Look(style.BLUE, "^", ours=True)
STEP = 0.28  # between the points of both in one line
BAR = 1.03  # what the race should be within


def draw_tuner(path: Path, document: Document, source: str = "") -> None:
    """A line per operator and draw of shapes: a point per shape for the rules, one for the race."""
    from matplotlib.lines import Line2D

    lines = lines_of(document)
    how = {
        "height": 1.35 + 0.42 * len(lines),
        "title": "Time relative to the fastest candidate, for random shapes",
        "caption": f"Measured on {document.gpu}, {document.date}: cold L2, CUDA graphs; every "
        "candidate sampled to the end",
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
        words = {"choice of the rules": RULES, "choice of the tuner": RACE}
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


# Verdict -> letter and colours of its cell; bad ones are dark.
CELLS = {
    "passed": ("", style.SKY, style.BLUE),
    "refused": ("r", "white", style.BLUE),
    SKIPPED: ("", style.PALE, style.GREY),
    NOT_RUN: ("", "white", style.PALE),
    "wrong": ("W", style.VERMILION, style.BLACK),
    "hung": ("H", style.VERMILION, style.BLACK),
    "died": ("D", style.VERMILION, style.BLACK),
}
WORDS = {"refused": "refused (r)", "wrong": "wrong (W)", "hung": "hung (H)", "died": "died (D)"}


def summary_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """41 steps passed, 2 hung."""
    counts = Counter(row["verdict"] for row in steps)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{len(steps)} steps: {words}."


def draw_bringup(path: Path, document: Mapping[str, Any], source: str = "") -> None:
    """A row per group, a cell per step."""
    from matplotlib.patches import Patch, Rectangle

    groups = [(group, [row for row in document["steps"] if row["group"] == group])
              for group in GROUPS]  # fmt: skip
    groups = [(group, rows) for group, rows in groups if rows]
    most = max(len(rows) for _, rows in groups)
    how = {
        "height": 1.35 + 0.34 * len(groups),
        "title": f"Bring-up of {document['gpu']['name']}, {document['arch']}, {document['date']}",
        "caption": summary_of(document["steps"]) + " One cell per step, small ones first",
        "keys": 1,
        "source": source,
    }
    with style.picture(path, **how) as (figure, axes):
        axis = axes[0][0]
        for line, (_, rows) in enumerate(groups):
            for place, row in enumerate(rows):
                letter, face, edge = CELLS[row["verdict"]]
                axis.add_patch(Rectangle((place + 0.08, line + 0.1), 0.84, 0.8, facecolor=face,
                                         edgecolor=edge))  # fmt: skip
                axis.text(place + 0.5, line + 0.5, letter, ha="center", va="center",
                          fontsize=style.SMALL)  # fmt: skip
        axis.set_xlim(0, most)
        axis.set_ylim(len(groups), 0)
        axis.set_yticks([line + 0.5 for line in range(len(groups))], [name for name, _ in groups])
        axis.set_xticks([])
        axis.tick_params(length=0)
        for side in axis.spines.values():
            side.set_visible(False)
        seen = {row["verdict"] for row in document["steps"]}
        style.legend(figure, [
            Patch(facecolor=face, edgecolor=edge, label=WORDS.get(verdict, verdict))
            for verdict, (_, face, edge) in CELLS.items() if verdict in seen
        ])  # fmt: skip
