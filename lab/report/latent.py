"""Picture of attention to latent keys: time next to FlashMLA's, a bar for each problem."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, PEER = "mla", "flashmla"
BAR, GAP = 0.22, 0.12  # inches


def draw(path: Path, document: Document, source: str = "") -> None:
    """Bars of our time over FlashMLA's, warm, in the order of the file; sets lie apart."""
    pairs = paired(document.rows)
    sets = len({row["rows"] for row, _ in pairs})
    how = {
        "height": 1.3 + BAR * len(pairs) + GAP * sets,
        "title": "Attention to latent keys: time over FlashMLA's (shorter is better)",
        "caption": f"Measured on one {document.gpu}, {document.date}, keys in L2 where they fit.\n"
        "Both alternated in one run; labels: query entries x keys; numbers: ours and FlashMLA's us",
    }
    with style.picture(path, source=source, **how) as (_, ((axis,),)):
        _bars(axis, pairs)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xlabel("of FlashMLA's time", fontsize=style.SMALL)


def paired(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return (our row, FlashMLA's) of each problem that both ran."""
    timed = {(row["problem"], row["peer"]): row for row in rows if "warm_us" in row}
    return [
        (row, timed[problem, PEER])
        for (problem, peer), row in timed.items()
        if peer == OURS and (problem, PEER) in timed
    ]


def _bars(axis: Axes, pairs: Sequence[tuple[Row, Row]]) -> None:
    at, ticks, last = 0.0, [], ""
    for row, peer in pairs:
        at += GAP if last and row["rows"] != last else 0.0
        share, last = row["warm_us"] / peer["warm_us"], row["rows"]
        here = style.look(OURS, 0)
        axis.barh(at, share, BAR * 0.8, color=here.colour)
        words = f"{share:.2f}   {row['warm_us']:.1f}, {peer['warm_us']:.1f}"
        axis.text(max(share, 1.0) + 0.03, at, words, va="center", fontsize=7)
        ticks.append(at)
        at += BAR
    axis.set_yticks(ticks, [row["problem"] for row, _ in pairs], fontsize=7)
    axis.set_ylim(at, -BAR)
    axis.set_xlim(0, 1.45)
    axis.tick_params(axis="y", length=0)
    style.grid(axis, "x")
