"""The cycle model beside measurements: how far off it is, row by row, with its range."""

from __future__ import annotations

from pathlib import Path

from lab.report.documents import Document, Row
from lab.tools import style

ROW = 0.2  # inches of a row
BAND = 0.10  # of the real time, shaded


def draw(path: Path, document: Document, source: str = "") -> None:
    """A row per launch: modelled over measured cycles."""
    rows = [row for row in document.of("cycles") if "modelled" in row]
    how = {
        "height": 1.3 + ROW * len(rows),
        "title": "Attention on Hopper: MODELLED over measured cycles",
        "caption": f"Measured by ncu on one {document.gpu}, {document.date}, bf16, 16k tokens in "
        "all, heads x head_dim = 2,048; modelled by cycles.py.\nDot: nominal parameters; bar: "
        "range over other sets. 1: the model is right; left of it it is too fast",
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
    """With its mask; pairs of CTAs beside single ones."""
    flags = row.get("flags", "")
    mask = "causal" if "--causal" in flags else "full"
    return f"{row['name']}, {mask}" + ", pairs" * ("--ctas 2" in flags)
