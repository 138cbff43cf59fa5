"""Decode: how far each kernel is above the time that reading its keys and values takes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PUBLISHED = "published"  # as a peer: the fastest that others measured
FAR = 2.0  # above so many times the median of a panel its axis ends
ROW = 0.165  # inches of a kernel


def draw(
    path: Path, document: Document, source: str = "", *, published: Sequence[Row] = ()
) -> None:
    """A panel per batch and number of keys, a row per kernel: its cold time over the floor.

    published: gpu, batch, keys, us and source of others' figures; the fastest of the same GPU has a
    row of its own.
    """
    rows = [row for row in document.rows if "cold_us" in row]
    rows += fastest(rows, [row for row in published if row["gpu"] in document.gpu])
    batches, lengths = (sorted({row[name] for row in rows}) for name in ("batch", "kv_len"))
    names = list(dict.fromkeys(row["peer"] for row in rows))
    how = {
        "height": 1.15 + len(batches) * (0.62 + ROW * len(names)),
        "title": "Decode attention: time over the floor (shorter is better)",
        "caption": caption(document, rows),
    }
    shape = max(1, len(batches)), max(1, len(lengths))
    with style.picture(path, *shape, source=source, sharey="row", **how) as (_, axes):
        for line, batch in zip(axes, batches, strict=False):
            for axis, length in zip(line, lengths, strict=True):
                chosen = [r for r in rows if (r["batch"], r["kv_len"]) == (batch, length)]
                _panel(axis, {row["peer"]: row for row in chosen}, names)
                floor = f", floor {us(chosen[0]['floor_us'])} us" if chosen else ""
                (words,) = style.named([length])
                title = {"loc": "left", "fontsize": style.SMALL, "weight": "bold"}
                axis.set_title(f"batch {batch}, {words} keys{floor}", **title)
        for axis in axes[-1]:
            axis.set_xlabel("time / floor", fontsize=style.SMALL)


def fastest(rows: Sequence[Row], published: Sequence[Row]) -> list[Row]:
    """A row of PUBLISHED for each problem of `rows` that somebody published a time of."""
    found = []
    floors = {(row["batch"], row["kv_len"]): row["floor_us"] for row in rows}
    for (batch, keys), floor in floors.items():
        same = [r for r in published if (int(r["batch"]), int(r["keys"])) == (batch, keys)]
        if same:
            best = min(same, key=lambda row: float(row["us"]))
            words = {"peer": PUBLISHED, "cold_us": float(best["us"]), "by": best["source"]}
            found.append({"batch": batch, "kv_len": keys, "floor_us": floor, **words})
    return found


def caption(document: Document, rows: Sequence[Row]) -> str:
    """GPU, heads, dtype, date."""
    of = rows[0] if rows else {}
    heads = f"{of.get('q_heads')} query heads, {of.get('kv_heads')} KV heads of "
    words = f"Measured on one {document.gpu}, {document.date}: {heads}{of.get('head_dim')}, "
    words += f"{of.get('dtype')}, one new token, nothing in L2.\nFloor (the line at 1): reading as "
    words += "many bytes. Figures: microseconds. Every panel has a scale of its own"
    if any(row["peer"] == PUBLISHED for row in rows):
        words += ".\nBlack: the fastest that others published for such a GPU "
        words += "(published_decode_rivals.csv), without flushing L2"
    return words


def _panel(axis: Axes, found: dict[str, Row], names: Sequence[str]) -> None:
    ratios = {name: row["cold_us"] / row["floor_us"] for name, row in found.items()}
    near = [ratio for ratio in ratios.values() if ratio <= FAR * median(ratios.values())] or [1.0]
    low, high = min(1.0, *near), max(1.0, *near)
    span = max(high - low, 0.05)
    axis.axvline(1.0, color=style.BLACK, linewidth=1.2)
    for at, name in enumerate(names):
        if name not in ratios:
            words = "none known" if name == PUBLISHED else "not measured"
            how = {"color": style.GREY, "va": "center", "fontsize": style.SMALL}
            axis.text(1.0 + 0.02 * span, at, words, **how)
            continue
        here = style.look(name, at)
        right = min(ratios[name], high)
        far = ratios[name] > high
        axis.plot([1.0, right], [at, at], color=here.colour, linewidth=2 if here.ours else 1.2)
        marks: dict[str, Any] = here.marks(5.5) | ({"marker": ">"} if far else {})
        axis.plot([right], [at], **marks)
        words = us(found[name]["cold_us"]) + (f" ({ratios[name]:.0f} x)" if far else "")
        words += f" {found[name]['by'].partition(' ')[0]}" if "by" in found[name] else ""
        weight = "bold" if here.ours else "normal"
        place = (max(right, 1.0) + 0.045 * span, at)
        axis.text(*place, words, va="center", fontsize=style.SMALL, weight=weight)
    axis.set_xlim(low - 0.07 * span, high + 0.34 * span)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.set_yticks(range(len(names)), [style.called(name) for name in names])
    axis.locator_params(axis="x", nbins=4)
    style.grid(axis, "x")


def us(microseconds: float) -> str:
    """Three digits."""
    return f"{microseconds:.{2 if microseconds < 10 else 1 if microseconds < 100 else 0}f}"
