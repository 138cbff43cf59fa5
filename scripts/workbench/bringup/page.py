"""The document of a bring-up as a file, and as a page with pictures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.bringup.bundle import name_of
from workbench.bringup.session import BAD, NOT_RUN, SKIPPED
from workbench.bringup.steps import GROUPS
from workbench.report import decode, prefill, style
from workbench.report.documents import Document, read
from workbench.report.figures import tables_of

TEMPLATE = Path(__file__).with_name("page.html")
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
# Step -> what draws its figures.
DRAWN: dict[str, Callable[[Path, Document], None]] = {
    **dict.fromkeys(("speed.gqa", "speed.gqa-peers"), decode.draw),
    **dict.fromkeys(("speed.fmha", "speed.fmha-peers"), prefill.draw_any),
}


def save(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write both, and the pictures; the paths of the document and of the page."""
    name = name_of({**document})
    file, page = folder / f"{name}.json", folder / f"{name}.html"
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    overview(folder / "overview.png", document)
    pictures = {group: pictures_of(group, document["steps"], folder) for group in GROUPS}
    page.write_text(html(document, pictures, folder), encoding="utf-8")
    return [file, page]


def html(document: Mapping[str, Any], pictures: Mapping[str, Sequence[str]], folder: Path) -> str:
    """The page."""
    from jinja2 import Environment

    steps = document["steps"]
    groups = [(group, words, [row for row in steps if row["group"] == group])
              for group, words in GROUPS.items()]  # fmt: skip
    figures = {group: [*_tables(rows, folder)] for group, _, rows in groups}
    environment = Environment(autoescape=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        head=document, summary=summary_of(steps), groups=groups, pictures=pictures,
        figures=figures, bad=BAD,
    )  # fmt: skip


def summary_of(steps: Sequence[Mapping[str, Any]]) -> str:
    """41 steps passed, 2 hung."""
    counts = Counter(row["verdict"] for row in steps)
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{len(steps)} steps: {words}."


def pictures_of(group: str, steps: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Draw what can be drawn of a group, and name it with what its steps have drawn themselves."""
    found = []
    for row in steps:
        if row["group"] != group or row["verdict"] != "passed":
            continue
        path = folder / f"{row['name']}.png"
        if row["name"] in DRAWN:
            document = _document(row["name"], folder)
            if document is None:
                continue
            DRAWN[row["name"]](path, document)
        if path.exists():
            found.append(path.name)
    return found


def _tables(rows: Sequence[Mapping[str, Any]], folder: Path) -> Any:
    for row in rows:
        document = _document(row["name"], folder)
        if document is not None and row["figures"] is not None:
            yield row["name"], tables_of(document)


def _document(name: str, folder: Path) -> Document | None:
    """Of a step's figures; None without, or where they are of no kind that is known."""
    try:
        return read(f"{name}.json", folder)
    except (OSError, ValueError, AttributeError):
        return None


def overview(path: Path, document: Mapping[str, Any]) -> None:
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
