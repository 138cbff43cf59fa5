"""Attention over many tokens: TFLOP/s by length beside peers, and of the shapes of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS = "fmha"
BY_LENGTH = ("anchor",)  # sets of rows that differ by their length alone
BAR, GAP = 0.155, 0.12  # inches of a bar, and between problems


def draw(path: Path, document: Document, source: str = "", *, roof: float = 0.0) -> None:
    """A panel per mask and head dim, a line per kernel. roof: TFLOP/s of a large product, measured
    on such a GPU; 0 for none."""
    rows = [row for row in document.rows if "us" in row and row.get("rows") in BY_LENGTH]
    masks = sorted({row["causal"] for row in rows})
    dims = sorted({row["head_dim"] for row in rows})
    names = list(dict.fromkeys(row["peer"] for row in rows))
    how = {
        "height": 1.0 + 2.1 * max(1, len(masks)),
        "title": "Attention forward: TFLOP/s by length (higher is better)",
        "caption": _caption(document, rows),
        "keys": 1,
    }
    shape = max(1, len(masks)), max(1, len(dims))
    with style.picture(path, *shape, source=source, sharey=True, **how) as (figure, axes):
        for line, causal in zip(axes, masks, strict=False):
            for axis, dim in zip(line, dims, strict=True):
                chosen = [r for r in rows if (r["causal"], r["head_dim"]) == (causal, dim)]
                _lines(axis, chosen, names)
                words = f"head dim {dim}, {'causal' if causal else 'full'}"
                axis.set_title(words, loc="left", weight="bold", fontsize=style.SMALL)
            line[0].set_ylabel("TFLOP/s")
        for axis in axes[-1]:
            axis.set_xlabel("tokens of a sequence", fontsize=style.SMALL)
        most = max((row["tflops"] for row in rows), default=1.0)
        axes[0][0].set_ylim(0, 1.17 * max(most, roof))
        keys = [style.key(name) for name in names]
        style.legend(figure, [*keys, *_roof(axes, roof)])


def _roof(axes: Any, roof: float) -> list[Any]:
    """A line in every panel, and its key; nothing without one."""
    if not roof:
        return []
    for axis in axes.flat:
        line = axis.axhline(roof, color=style.BLACK, linewidth=1.2, zorder=2)
    line.set_label(f"large product of torch, {roof:.0f}")
    return [line]


def _caption(document: Document, rows: Sequence[Row]) -> str:
    """GPU, heads, dtype, date."""
    dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in rows))
    heads = ", ".join(dict.fromkeys(f"{r['q_heads']} of {r['head_dim']}" for r in rows))
    tokens = ", ".join(dict.fromkeys(str(r["batch"] * r["sq"]) for r in rows))
    return (
        f"Measured on one {document.gpu}, {document.date}: {dtypes}, {heads or 'no'} heads, "
        f"{tokens or 'no'} tokens in all.\nAll took turns in one run, nothing in L2; causal "
        "counted at half. The figures are those of ours"
    )


def _lines(axis: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    lengths = sorted({row["skv"] for row in rows})
    places = {length: at for at, length in enumerate(lengths)}
    for number, name in enumerate(names):
        mine = sorted((places[r["skv"]], r["tflops"]) for r in rows if r["peer"] == name)
        if not mine:
            continue
        here = style.look(name, number)
        axis.plot(*zip(*mine, strict=True), **here.line(), zorder=4 if here.ours else 3)
        for at, rate in mine if here.ours else ():
            place = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "zorder": 5}
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
            words = {"fontsize": style.SMALL, "weight": "bold", "bbox": box}
            axis.annotate(f"{rate:.0f}", (at, rate), **words, **place)
    axis.set_xticks(range(len(lengths)), style.named(lengths))
    axis.set_xlim(-0.35, len(lengths) - 0.65)
    style.grid(axis, "y")


# -- shapes of models -----------------------------------------------------------------------------


def draw_any(path: Path, document: Document) -> None:
    """Lines where lengths are all that differs, else bars of every problem."""
    timed = [row for row in document.rows if "us" in row]
    alike = all(row.get("rows") in BY_LENGTH for row in timed)
    (draw if timed and alike else draw_bars)(path, document)


def draw_models(path: Path, document: Document, source: str = "") -> None:
    """Bars of what is not in the picture by length."""
    rows = [row for row in document.rows if row.get("rows") not in BY_LENGTH]
    draw_bars(path, replace(document, rows=rows), source)


def draw_bars(path: Path, document: Document, source: str = "") -> None:
    """A group of bars per problem, one bar per kernel."""
    rows = [row for row in document.rows if "us" in row]
    problems: dict[str, list[Row]] = {}
    for row in rows:
        problems.setdefault(title_of(row), []).append(row)
    names = list(dict.fromkeys(row["peer"] for row in rows))
    dtypes = ", ".join(dict.fromkeys(_dtypes(row) for row in rows))
    how = {
        "height": 1.3 + sum(max(BAR * len(found) + GAP, 2.3 * BAR) for found in problems.values()),
        "title": "Attention forward, shapes of models: TFLOP/s (longer is better)",
        "caption": f"Measured on one {document.gpu}, {document.date}: {dtypes}.\nAll took turns in "
        "one run, nothing in L2; entries x tokens, query / KV heads of their dimension",
        "keys": 1,
    }
    with style.picture(path, source=source, **how) as (figure, ((axis,),)):
        _bars(axis, problems)
        axis.set_xlabel("TFLOP/s", fontsize=style.SMALL)
        style.legend(figure, [style.key(name, line=False) for name in names])


def title_of(row: Row) -> str:
    """Of a problem: its shape and mask."""
    dims = str(row["head_dim"])
    dims += f", {row['v_dim']}" if row["v_dim"] != row["head_dim"] else ""
    mask = "causal" if row["causal"] else "full"
    if row["window"] is not None:
        mask = f"window {row['window'] + 1}"
    more = ", sinks" * row["sinks"] + ", K is V" * row["k_is_v"]
    (words,) = style.named([row["skv"]])
    heads = f"{row['q_heads']}/{row['kv_heads']} of {dims}"
    return f"{row['batch']} x {words}, {heads}\n{mask}{more}"


def _dtypes(row: Row) -> str:
    """Of q, and of k and v where it is another."""
    kv_dtype = row.get("kv_dtype")
    return f"{row['dtype']} with {kv_dtype} keys" if kv_dtype else row["dtype"]


def _bars(axis: Axes, problems: dict[str, list[Row]]) -> None:
    at, ticks = 0.0, []
    most = max((row["tflops"] for found in problems.values() for row in found), default=1.0)
    for found in problems.values():
        first = at
        mixed = len({_dtypes(row) for row in found}) > 1
        for number, row in enumerate(sorted(found, key=lambda row: row["peer"] != OURS)):
            here = style.look(row["peer"], number)
            bar: dict[str, Any] = {"color": here.colour, "alpha": 1.0 if here.ours else 0.45}
            axis.barh(at, row["tflops"], BAR * 0.8, **bar)
            axis.plot([row["tflops"]], [at], **here.marks(5))
            weight = "bold" if here.ours else "normal"
            place = (row["tflops"] + 0.012 * most, at)
            words = f"{row['tflops']:.0f}" + f"  {_dtypes(row)}" * mixed
            axis.text(*place, words, va="center", fontsize=7.5, weight=weight)
            at += BAR
        ticks.append((first + at - BAR) / 2)
        at += max(GAP, 2.3 * BAR - (at - first))  # two lines of text have room
    axis.set_yticks(ticks, list(problems), linespacing=1.05)
    axis.set_ylim(at, -BAR)
    axis.set_xlim(0, 1.18 * most)
    axis.tick_params(axis="y", length=0)
    style.grid(axis, "x")
