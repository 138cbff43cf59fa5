"""A bring-up at a glance: a cell per step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.tools import style
from lab.tools.bringup_words import GROUPS, NOT_RUN, SKIPPED

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


def draw(path: Path, document: Mapping[str, Any], source: str = "") -> None:
    """A row per group, a cell per step."""
    from matplotlib.patches import Patch, Rectangle

    groups = [(group, [row for row in document["steps"] if row["group"] == group])
              for group in GROUPS]  # fmt: skip
    groups = [(group, rows) for group, rows in groups if rows]
    most = max(len(rows) for _, rows in groups)
    how = {
        "height": 1.35 + 0.34 * len(groups),
        "title": f"Bring-up of {document['gpu']['name']}, {document['arch']}, {document['date']}",
        "caption": summary_of(document["steps"]) + " A cell per step, small ones first",
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
