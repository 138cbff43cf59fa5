"""Attention on a B200, modelled: TFLOP/s with their ranges, beside what others published."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE = 0.125  # inches of a kernel
# Published points: shape by the kernel, filled for a B200, with white in them for other GPUs.
DOUBTED = {("FROST", "hd64-causal"), ("FROST", "gpt-oss-causal-8k")}
"""More than exponentials at one in eight cycles allow: the sample must be wrong."""
SHAPES = {"FlashAttention-4": "s", "cuDNN": "^", "trtllm-gen": "*", "FROST": "P"}


def draw(path: Path, document: Document, source: str = "") -> None:
    """A group per shape: a dot and a range per kernel, below them what is published."""
    rows = [row for row in document.data["rows"] if _timed(row)]
    names = list(dict.fromkeys(name for row in rows for name in _timed(row)))
    lines = sum(len(_timed(row)) + 1.9 for row in rows)
    sets = document.data.get("perturbed", 0)
    gpu = document.data.get("gpu", "GPU")
    how = {
        "height": 1.7 + LINE * lines,
        "title": f"Attention forward on a {gpu}: MODELLED, not measured",
        "caption": f"bf16, date {document.date}. Dot: nominal parameters; bar: range over {sets} "
        "other sets of parameters. Below them in black what others\npublished: filled on a B200, "
        "white inside on a GB200 or on a GPU that is not stated. Right is better",
        "keys": 2,
    }
    with style.picture(path, source=source, **how) as (figure, ((axis,),)):
        at, ticks = 0.0, []
        for row in rows:
            end = _group(axis, at, row)
            ticks.append((at + end - 1.4) / 2)
            axis.axhline(end - 0.45, color=style.PALE, linewidth=0.8)
            at = end + 0.5
        axis.set_yticks(ticks, [f"{row['row']}\n{_sizes(row['flags'])}" for row in rows])
        axis.set_ylim(at - 0.9, -0.8)
        axis.set_xlim(0, 1.06 * axis.get_xlim()[1])
        axis.tick_params(axis="y", length=0)
        axis.set_xlabel("TFLOP/s", fontsize=style.SMALL)
        style.grid(axis, "x")
        found = {_kernel(p["rival"]) for row in rows for p in row["published"]}
        style.legend(figure, *_keys(names, sorted(found)))


def _timed(row: Row) -> dict[str, Row]:
    return {name: found for name, found in row["kernels"].items() if "us" in found}


def _group(axis: Axes, at: float, row: Row) -> float:
    """Draws one; returns where it ends."""
    flop = 0.0
    for number, (name, found) in enumerate(_timed(row).items()):
        here = style.look(name, number)
        flop = found["tflops"] * found["us"]
        ends = [flop / found["high_us"], flop / found["low_us"]]
        how = {"linewidth": 5 if here.ours else 3.5, "alpha": 0.5, "solid_capstyle": "butt"}
        axis.plot(ends, [at, at], color=here.colour, **how)
        axis.plot([found["tflops"]], [at], **here.marks(5.5))
        doubted = (name, row["row"]) in DOUBTED
        if here.ours or doubted:
            words = "sample must be wrong" if doubted else f"{found['tflops']:.0f}"
            place = {"textcoords": "offset points", "xytext": (6, 0), "va": "center"}
            axis.annotate(words, (ends[1], at), fontsize=style.SMALL, weight="bold", **place)
        at += 1
    for point in row["published"]:
        face = style.BLACK if point["gpu"] == "B200" else "white"
        how = {"marker": SHAPES.get(_kernel(point["rival"]), "x"), "color": style.BLACK}
        axis.plot([flop / point["us"]], [at], markerfacecolor=face, markersize=5.5, **how)
    return at + 1.4


def _kernel(rival: str) -> str:
    """'FlashAttention-4' of 'FlashAttention-4 C': the table is no other kernel."""
    return next((name for name in SHAPES if rival.startswith(name)), rival)


def _sizes(flags: str) -> str:
    """'4 x 8k, 32/32 heads' of the flags of a case."""
    names = ("batch", "q-len", "q-heads", "kv-heads")
    found = {name: re.search(rf"--{name} (\S+)", flags) for name in names}
    batch, tokens, heads, kv_heads = (each[1] if each else "?" for each in found.values())
    return f"{batch} x {tokens}, {heads}/{kv_heads} heads"


def _keys(names: Sequence[str], published: Sequence[str]) -> tuple[list[Any], int]:
    """The modelled in the first row of the legend, the published in the second; and how many
    columns that takes, which are filled one by one."""
    from matplotlib.lines import Line2D

    width = max(3, len(names), len(published))
    first: list[Any] = [style.key(name, f"{style.called(name)}, modelled", line=False)
                        for name in names]  # fmt: skip
    black = {"color": style.BLACK, "linestyle": "", "markersize": 5.5}
    second: list[Any] = [
        Line2D([], [], marker=SHAPES.get(name, "x"), label=f"{name}, published", **black)
        for name in published
    ]
    blank = Line2D([], [], linestyle="", label="")
    rows = [[*line, *[blank] * (width - len(line))] for line in (first, second)]
    return [handle for column in zip(*rows, strict=True) for handle in column], width
