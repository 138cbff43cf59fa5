"""The map of the repository: packages above what they import."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lab.house.graph import House, house, layers
from lab.house.imports import LAUNCHER
from lab.tools import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DUTIES = {
    "ptxemu": "emulates PTX on a CPU",
    "cycle_model": "time on a GPU, modelled",
    "kernelkit": "plans, compiler, launch",
    "kvcache": "a paged KV cache",
    "gqa_lowlatency": "decoding a few tokens",
    "fmha": "attention, many tokens",
    "moe": "layers of experts",
    "q8_0": "matrices in GGUF's Q8_0",
    "lab": "what the scripts do",
    "mla": "sparse attention",
    "blackwell_engines": "for models and engines",
}
BOX, APART = (1.04, 0.5), 1.12  # of a package; from one to the next in a layer
NAME, DUTY = 6.5, 6.0  # sizes of the text in it
ABOVE = "Scripts, examples and tests stand above all of it"


def draw(path: Path, found: House, source: str = "") -> None:
    """A box per package, an arrow to each that it needs and no other one brings along."""
    rows = layers(found.packages)
    places = {
        node: (APART * (1 + (len(row) < 3)) * (index - (len(row) - 1) / 2), float(height))
        for height, row in enumerate(rows)
        for index, node in enumerate(row)
    }
    how = {
        "height": 0.8 + 1.05 * len(rows),
        "title": "The repository: packages above what they import",
        "caption": f"From the imports of {len(found.files)} files; in brackets how many a package "
        f"has. An arrow that follows from others is left out.\nDashed: {LAUNCHER} alone, where a "
        f"launch is emulated. {ABOVE}",
    }
    with style.picture(path, source=source, **how) as (_, ((axis,),)):
        for package, targets in direct(found.packages).items():
            for target in sorted(targets):
                _arrow(axis, places[package], places[target], "-")
        if {"ptxemu", LAUNCHER.parts[0]} <= places.keys():
            _arrow(axis, places[LAUNCHER.parts[0]], places["ptxemu"], (0, (4, 3)))
        for node, place in places.items():
            count = sum(1 for file in found.files if file.parts[0] == node)
            _box(axis, node, count, place)
        reach = max(abs(x) for x, _ in places.values()) + 0.6
        axis.set(xlim=(-reach, reach), ylim=(-0.4, len(rows) - 0.6))
        axis.axis("off")


def source(found: House | None = None) -> str:
    """Hash of what the map shows: packages and arrows. Numbers of files may lag behind."""
    packages = {name: sorted(targets) for name, targets in (found or house()).packages.items()}
    return "imports:" + hashlib.sha256(repr(packages).encode()).hexdigest()[:16]


def direct(packages: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Arrows without those that others add up to."""

    def below(package: str) -> set[str]:
        found = set(packages[package])
        for target in packages[package]:
            found |= below(target)
        return found

    return {
        package: targets - {far for target in targets for far in below(target)}
        for package, targets in packages.items()
    }


def _arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], dash: object) -> None:
    """Draw an arrow from box to box: downwards or sideways."""
    (x, y), (x2, y2) = start, end
    high, wide = BOX[1] / 2, BOX[0] / 2
    if y == y2:
        side = wide if x2 > x else -wide
        start, end = (x + side, y), (x2 - side, y2)
    else:
        start, end = (x, y - high), (x2, y2 + high)
    how = {"arrowstyle": "-|>", "color": style.GREY, "linestyle": dash, "linewidth": 1.4}
    axis.annotate("", end, start, arrowprops={**how, "shrinkA": 0, "shrinkB": 0})


def _box(axis: Axes, node: str, count: int, place: tuple[float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y = place
    how = {"boxstyle": "round,pad=0,rounding_size=0.06", "facecolor": "#eaf3fa"}
    corner = (x - BOX[0] / 2, y - BOX[1] / 2)
    axis.add_patch(FancyBboxPatch(corner, *BOX, edgecolor=style.BLUE, linewidth=1.2, **how))
    text = {"ha": "center", "va": "center"}
    axis.text(x, y + 0.1, f"{node} ({count})", fontsize=NAME, weight="bold", **text)
    axis.text(x, y - 0.1, DUTIES.get(node, ""), fontsize=DUTY, **text)
