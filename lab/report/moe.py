"""Layers of experts: the roofline, and how near to it each kernel comes, by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUBJECT = ("model", "fmt", "part", "routing")
HOW = "graph"  # of how they were called: in a CUDA graph


def draw(path: Path, document: Document, source: str = "") -> None:
    """A row per model, format, part and routing: the roofline, and beside it its share."""
    rows = [row for row in document.of("layer") if "us" in row]
    rows = [row for row in rows if row["how"] == HOW] or rows
    subjects = list(dict.fromkeys(tuple(row[name] for name in SUBJECT) for row in rows))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    how = {
        "height": 1.1 + 2.45 * max(1, len(subjects)),
        "title": "A layer of experts: roofline, and the share that is reached",
        "caption": _caption(document, subjects, "; e4m3 may exceed it" * ("moe-e4m3" in names)),
        "keys": 1,
    }
    shape = max(1, len(subjects)), 2
    with style.picture(path, *shape, source=source, **how) as (figure, axes):
        for (left, right), subject in zip(axes, subjects, strict=False):
            chosen = [row for row in rows if tuple(row[name] for name in SUBJECT) == subject]
            _roofline(left, chosen, names, document.head)
            _shares(right, chosen, names)
            words = f"{subject[0]}, {subject[1]}, {subject[3]} routing"
            for axis in (left, right):
                axis.set_title(words, loc="left", weight="bold", fontsize=style.SMALL)
        for axis, words in zip(axes[-1], ("FLOP per byte of memory", "tokens"), strict=True):
            axis.set_xlabel(words, fontsize=style.SMALL)
        style.legend(figure, [style.key(name) for name in names])


def _caption(document: Document, subjects: Sequence[tuple[str, ...]], more: str) -> str:
    """GPU, dtypes, date; more: of the roof."""
    head = document.head
    formats = ", ".join(dict.fromkeys(subject[1] for subject in subjects))
    roof = f"{head.get('read_tbs', 0):.2f} TB/s, {head.get('tensor_tflops', 0):.0f} TFLOP/s in bf16"
    return (
        f"Measured on one {document.gpu}, {document.date}: activations bf16, weights {formats}, "
        f"CUDA graphs, nothing in L2.\nThe roof (black) was also measured: {roof}{more}. Numbers: "
        "tokens, and our shares"
    )


def _roofline(axis: Axes, rows: Sequence[Row], names: Sequence[str], head: Row) -> None:
    reach = [row["flop"] / row["nbytes"] for row in rows] or [1.0]
    if "read_tbs" in head:
        peak, memory = head["tensor_tflops"], head["read_tbs"]
        at = [min(reach) / 2, peak / memory, max(reach) * 2]
        roof = [min(peak, memory * x) for x in at]
        axis.plot(at, roof, color=style.BLACK, linewidth=1.6)
    for number, name in enumerate(names):
        mine = sorted(
            (row["tokens"], row["flop"] / row["nbytes"], row["tflops"])
            for row in rows if row["peer"] == name
        )  # fmt: skip
        if not mine:
            continue
        here = style.look(name, number)
        axis.plot([x for _, x, _ in mine], [y for *_, y in mine], **here.line())
        for tokens, x, y in mine[:: max(1, len(mine) - 1)] if name == names[0] else ():
            first = tokens == mine[0][0]  # left below, the last to the right: away from the roof
            place = {"textcoords": "offset points", "va": "center"}
            place |= {"xytext": (-6, -5) if first else (7, 0), "ha": "right" if first else "left"}
            (words,) = style.named([tokens])
            axis.annotate(words, (x, y), fontsize=style.SMALL, **place)
    axis.set(xscale="log", yscale="log")
    axis.set_ylabel("TFLOP/s", fontsize=style.SMALL)
    style.grid(axis)


def _shares(axis: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    counts = sorted({row["tokens"] for row in rows})
    places = {count: at for at, count in enumerate(counts)}
    axis.axhline(1.0, color=style.BLACK, linewidth=1.6)
    for number, name in enumerate(names):
        mine = sorted(
            (places[row["tokens"]], row["bound_us"] / row["us"])
            for row in rows if row["peer"] == name
        )  # fmt: skip
        if not mine:
            continue
        axis.plot(*zip(*mine, strict=True), **style.look(name, number).line())
        for at, share in mine if name == names[0] else ():
            place = {"textcoords": "offset points", "xytext": (0, -12), "ha": "center"}
            axis.annotate(f"{share:.2f}", (at, share), fontsize=7.5, weight="bold", **place)
    axis.set_xticks(range(len(counts)), style.named(counts))
    axis.set_ylim(0, None)
    axis.margins(y=0.1)
    axis.set_ylabel("share of the roof", fontsize=style.SMALL)
    style.grid(axis, "y")


# -- on a B200, modelled --------------------------------------------------------------------------


def draw_modelled(path: Path, document: Document, source: str = "") -> None:
    """A panel per model: the time of a layer over the fastest published, with its range."""
    rows = document.data["rows"]
    models = list(dict.fromkeys((row["model"], row["formats"]) for row in rows))
    how = {
        "height": 3.6,
        "title": f"A layer of experts on a {document.data['gpu']}: MODELLED, not measured",
        "caption": f"Date {document.date}. Dot: nominal parameters; bar: range over two or three "
        "other sets within their bounds. The line at 1 is the fastest\nthat is published "
        "(published_moe_rivals.csv: B200, CUDA graphs, L2 not flushed, clocks not named)",
    }
    shape = 1, max(1, len(models))
    with style.picture(path, *shape, source=source, sharey=True, **how) as (_, axes):
        for axis, (model, formats) in zip(axes[0], models, strict=False):
            chosen = [r for r in rows if (r["model"], r["formats"]) == (model, formats)]
            _ratios(axis, chosen)
            words = f"{model}, {formats}"
            axis.set_title(words, loc="left", weight="bold", fontsize=style.SMALL)
            axis.set_xlabel("tokens", fontsize=style.SMALL)
        axes[0][0].set_ylabel("published / modelled time\n(above 1: ours is faster)",
                              fontsize=style.SMALL)  # fmt: skip


def _ratios(axis: Axes, rows: Sequence[Row]) -> None:
    axis.axhline(1.0, color=style.BLACK, linewidth=1.6)
    here = style.look("ours")
    rows = [row for row in rows if row.get("rival_us")]
    for at, row in enumerate(rows):
        ends = [row["rival_us"] / row["high_us"], row["rival_us"] / row["low_us"]]
        how = {"linewidth": 7, "alpha": 0.45, "solid_capstyle": "butt"}
        axis.plot([at, at], ends, color=here.colour, **how)
        ratio = row["rival_us"] / row["us"]
        axis.plot([at], [ratio], **here.marks())
        place = {"textcoords": "offset points", "xytext": (0, 3), "ha": "center"}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
        words = {"fontsize": style.SMALL, "weight": "bold", "bbox": box}
        axis.annotate(f"{ratio:.2f}", (at, max(ends)), **words, **place)
    axis.set_xticks(range(len(rows)), style.named(row["tokens"] for row in rows))
    axis.set_xlim(-0.5, len(rows) - 0.5)
    style.grid(axis, "y")
