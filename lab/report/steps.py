"""Steps that move memory: their share of the speed of a copy of as many bytes, by rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2
KEY = 0.155  # inches of a name in a key


def draw(path: Path, document: Document, source: str = "") -> None:
    """A panel per step, a line per variant."""
    rows = ours(document.of("step"))
    steps = list(dict.fromkeys(row["step"] for row in rows))
    lines = -(-len(steps) // COLUMNS) or 1
    names = {step: list(dict.fromkeys(r["name"] for r in rows if r["step"] == step))
             for step in steps}  # fmt: skip
    most = max(map(len, names.values()), default=0)
    how = {
        "height": 0.85 + lines * (1.9 + KEY * most),
        "title": "Steps that move memory: share of the speed of a copy (higher is better)",
        "caption": f"Measured on one {document.gpu}, {document.date}: dtypes and heads as the "
        "names say, else bf16.\n1.0: a copy of as many bytes takes as long. With few rows it is "
        "the launch that is measured",
    }
    with style.picture(path, lines, COLUMNS, source=source, **how) as (_, axes):
        for axis in axes.flat[len(steps) :]:
            axis.set_axis_off()
        for axis, step in zip(axes.flat, steps, strict=False):
            _panel(axis, [row for row in rows if row["step"] == step], names[step])
            axis.set_title(step, loc="left", weight="bold", fontsize=style.SMALL)


def ours(rows: Sequence[Row]) -> list[Row]:
    """Those of the first peer of each problem, which is ours."""
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
