"""gpt-oss: what the parts of a step take, beside the least that they could take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.report.documents import Document, Row
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 3
PHASES = {"decode": "decoding", "prefill": "prompt"}


def draw(path: Path, document: Document, source: str = "") -> None:
    """A panel per run: a bar per part, and a mark where its floor is."""
    panels = panels_of(document)
    lines = -(-len(panels) // COLUMNS) or 1
    how = {
        "height": 1.25 + 1.72 * lines,
        "title": "gpt-oss: parts of a step beside their floors (shorter is better)",
        "caption": f"Measured on {document.gpu}, {document.date}: bf16, experts mxfp4, "
        "64 query and 8 KV heads of 64.\nFloor, calculated: bytes and products at the speed of a "
        "large read and a large product of that GPU. Each panel has its own scale",
        "keys": 1,
    }
    with style.picture(path, lines, COLUMNS, source=source, **how) as (figure, axes):
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for number, (axis, (title, parts)) in enumerate(zip(axes.flat, panels, strict=False)):
            _panel(axis, parts, named=number % COLUMNS == 0)
            axis.set_title(title, loc="left", weight="bold", fontsize=style.SMALL)
        style.legend(figure, _keys())


def panels_of(document: Document) -> list[tuple[str, list[Row]]]:
    """(run and phase in words, its parts) of each that has floors, decoding first."""
    found = []
    for phase, words in PHASES.items():
        for run in document.data["runs"]:
            kernels = run.get("kernels", {}).get(phase, {})
            parts = kernels.get("parts", ())
            if any(part["floor_us"] for part in parts):
                more = ", two GPUs" if "both GPUs" in run["what"] else ""
                more += f", {kernels['of'].partition(',')[0]}" if "of" in kernels else ""
                found.append((_title(run["options"], words) + more, [*parts]))
    return found


def _title(options: Row, phase: str) -> str:
    (length,) = style.named([options["prompt_len"]])
    return f"{options['model']}, {phase}\n{options['batch']} x {length} tokens"


def _keys() -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    floor = {"color": style.BLACK, "marker": "|", "markersize": 10, "markeredgewidth": 2.2}
    return [
        Patch(facecolor=style.SKY, edgecolor=style.BLUE, label="kernels of the part, ms a step"),
        Line2D([], [], linestyle="", label="floor, and how many times it that is", **floor),
    ]


def _panel(axis: Axes, parts: Sequence[Row], *, named: bool) -> None:
    most = max(part["us"] for part in parts) / 1000
    for at, part in enumerate(parts):
        ms, floor = part["us"] / 1000, (part["floor_us"] or 0) / 1000
        axis.barh(at, ms, 0.72, facecolor=style.SKY, edgecolor=style.BLUE)
        words = f"{ms:.3g}"
        if floor:
            axis.plot([floor, floor], [at - 0.45, at + 0.45], color=style.BLACK, linewidth=2.2)
            words += f"  ({ms / floor:.1f} x)"
        axis.text(ms + 0.02 * most, at, words, va="center", fontsize=style.SMALL)
    axis.set_yticks(range(len(parts)), [part["part"] if named else "" for part in parts])
    axis.set_ylim(len(parts) - 0.4, -0.6)
    axis.set_xlim(0, 1.45 * most)
    axis.locator_params(axis="x", nbins=4)
    axis.tick_params(axis="y", length=0)
    style.grid(axis, "x")
