"""The picture of a timeline: a row per warp, TMA and tensor core of a CTA, coloured by activity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lab.tools import style
from ptxemu.trace import Span, Trace

# Waiting is in the background.
COLOURS = {
    "compute": style.BLUE,
    "tma": style.ORANGE,
    "mma": style.GREEN,
    "copy": style.PURPLE,
    "sync": style.SKY,
    "wait": style.PALE,
}
DARK = ("compute", "mma")  # what has white letters
OTHER = "#B0A080"
LABELS = {"compute": "computing", "tma": "TMA", "mma": "tensor core", "wait": "waiting"}
ROW_HEIGHT = 0.74
CHARACTERS = 108  # of a span's name that fit into the width of the picture


def draw(
    trace: Trace,
    path: str | Path,
    *,
    title: str,
    cta: int | None = None,
    roles: Mapping[str, str] | None = None,
) -> None:
    """Write a PNG of one CTA (the first by default).

    roles: agent -> role, such as {'warp 4': 'mma'}; rows of one role stand together.
    Raises ValueError for a trace without spans of that CTA.
    """
    cta = trace.ctas()[0] if cta is None and trace.spans else cta
    spans = [span for span in trace.spans if span.cta == cta]
    if not spans:
        raise ValueError(f"no spans of CTA {cta}; CTAs with spans: {trace.ctas()}")
    agents = trace.agents(cta)
    how = {"height": 1.35 + 0.215 * len(agents), "title": "Timeline of one CTA", "keys": 1}
    with style.picture(Path(path), caption=title, **how) as (figure, ((axes,),)):
        _draw_rows(axes, spans, agents)
        _label_rows(axes, agents, roles or {})
        _dress(axes, trace.time)
        _keys(figure, {span.category for span in spans})


def _draw_rows(axes: Axes, spans: list[Span], agents: list[str]) -> None:
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    for row, agent in enumerate(agents):
        own = _joined([span for span in spans if span.agent == agent])
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in own],
            (row - ROW_HEIGHT / 2, ROW_HEIGHT),
            facecolors=[COLOURS.get(span.category, OTHER) for span in own],
            edgecolor="white",
            linewidth=0.4,
        )
        for span in own:
            name = span.name.removeprefix("wait ")  # the colour says that it waits
            if len(name) <= CHARACTERS * (span.end - span.start) / (end - start):
                colour = "white" if span.category in DARK else style.BLACK
                how = {"color": colour, "fontsize": 7}
                middle = (span.start + span.end) / 2
                axes.text(middle, row, name, ha="center", va="center", clip_on=True, **how)
    axes.set_xlim(start, end)
    axes.set_ylim(len(agents) - 0.4, -0.6)


def _joined(spans: list[Span]) -> list[Span]:
    """Neighbours without a gap that do the same, such as the MMAs of one product, as one span."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        last = joined[-1] if joined else None
        same = last and (last.name, last.category) == (span.name, span.category)
        if same and span.start <= last.end:
            joined[-1] = replace(last, end=max(last.end, span.end))
        else:
            joined.append(span)
    return joined


def _label_rows(axes: Axes, agents: list[str], roles: Mapping[str, str]) -> None:
    """Agents at the left; the name of a role once, bold, left of its rows; a line between roles."""
    axes.set_yticks(range(len(agents)), agents)
    groups = [roles.get(agent, "") for agent in agents]
    first = 0
    for row in range(1, len(groups) + 1):
        if row < len(groups) and groups[row] == groups[first]:
            continue
        middle = (first + row - 1) / 2
        how = {"ha": "right", "va": "center", "fontsize": 9, "fontweight": "bold"}
        axes.text(-0.095, middle, groups[first], transform=axes.get_yaxis_transform(), **how)
        if row < len(groups):
            axes.axhline(row - 0.5, color="#999999", linewidth=0.6)
        first = row


def _dress(axes: Axes, time: str) -> None:
    axes.set_xlabel(time, fontsize=style.SMALL)
    axes.tick_params(axis="x", length=2)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _keys(figure: Figure, categories: set[str]) -> None:
    known = [name for name in COLOURS if name in categories]
    handles = [Patch(facecolor=COLOURS[name], label=LABELS.get(name, name)) for name in known]
    handles += [Patch(facecolor=OTHER, label=name) for name in sorted(categories - set(known))]
    style.legend(figure, handles)
