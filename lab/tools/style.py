"""Style of every picture, and code that writes it.

A picture is 8 inches wide and has 200 dots per inch: shown 800 pixels wide, which is what a page
has, the smallest text (8 points) is 11 pixels high. Colours are those of Okabe and Ito, which stay
apart without colour vision; every line has a shape and a dash of its own beside its colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, DPI = 8.0, 200  # inches, dots per inch
TEXT, SMALL, TITLE = 9, 8, 11  # points
COLOURS = 192  # of a PNG
LINE = 0.19  # inches of a line of the heading
MARGIN = 0.08  # inches at the edges
GREY, PALE = "#666666", "#dddddd"
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
RC = {
    "font.size": TEXT,
    "axes.titlesize": TEXT,
    "axes.labelsize": TEXT,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "svg.hashsalt": "report",  # identifiers in an SVG are drawn by chance otherwise
}
# What a format notes by itself that differs from day to day.
PLAIN = {".svg": "Date", ".pdf": "CreationDate"}


@dataclass(frozen=True)
class Look:
    """Look of a line: colour, shape of its points, dash; ours are filled, the others have white in
    them."""

    colour: str
    shape: str
    dash: str = "-"
    ours: bool = False

    def marks(self, size: float = 6.0) -> dict[str, Any]:
        """Return matplotlib options for points."""
        face = self.colour if self.ours else "white"
        how = {"marker": self.shape, "markersize": size, "markeredgecolor": self.colour}
        return {**how, "color": self.colour, "markerfacecolor": face, "markeredgewidth": 1.4}

    def line(self, size: float = 5.0) -> dict[str, Any]:
        """Return matplotlib options for a line with points."""
        return {**self.marks(size), "linestyle": self.dash, "linewidth": 1.8 if self.ours else 1.2}


# By the names that results have; whatever is compared, the same name looks the same.
LOOKS = {
    **dict.fromkeys(("ours", "fmha", "decode", "moe", "kvcache"), Look(BLUE, "o", "-", True)),
    **dict.fromkeys(("decode pdl", "mma.sync", "moe-steps"), Look(SKY, "p", "-", True)),
    **dict.fromkeys(("decode pdl kv-ready", "moe-e4m3"), Look(SKY, "D", "-", True)),
    **dict.fromkeys(("fa4", "FlashAttention-4", "triton"), Look(VERMILION, "s", "--")),
    **dict.fromkeys(("cudnn", "torch cudnn", "torch"), Look(GREEN, "^", "-.")),
    **dict.fromkeys(("fa2", "torch flash", "triton-plain"), Look(ORANGE, "v", ":")),
    **dict.fromkeys(("flashinfer", "flashinfer xqa", "FROST"), Look(PURPLE, "P", "--")),
    "flashinfer trtllm-gen": Look(PURPLE, "*", "-."),
    "flashinfer fa2": Look(PURPLE, "X", ":"),
    **dict.fromkeys(("fa3", "humming-e4m3"), Look(BLACK, "<", "--")),
    **dict.fromkeys(("cudnn-graph", "marlin"), Look(GREEN, ">", "-.")),
    **dict.fromkeys(("cudnn-graph-e4m3", "deepgemm-e4m3"), Look(GREEN, "X", ":")),
    "humming": Look(BLACK, ">", "-."),
    "humming-ordered": Look(BLACK, "^", ":"),
    "humming-tight": Look(GREY, ">", "-."),
    "humming-ordered-tight": Look(GREY, "^", ":"),
    "humming-ordered-e4m3": Look(BLACK, "v", "-."),
    "flex": Look(GREY, "d", ":"),
    "published": Look(BLACK, "h", ":"),
}
# Names as a reader knows them.
NAMES = {
    "fmha": "ours",
    "decode": "ours",
    "moe": "ours",
    "mma.sync": "ours, mma.sync",
    "decode pdl": "ours, pdl",
    "decode pdl kv-ready": "ours, pdl, keys ready",
    "moe-e4m3": "ours, e4m3",
    "moe-steps": "ours, in steps",
    "fa4": "FlashAttention-4",
    "fa3": "FlashAttention-3",
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "cudnn-graph": "cuDNN, FP8",
    "cudnn-graph-e4m3": "cuDNN, FP8, O in e4m3",
    "torch cudnn": "cuDNN",
    "torch flash": "FlashAttention-2",
    "flex": "flex attention",
    "published": "published by others",
    "flashinfer": "FlashInfer",
    "flashinfer xqa": "FlashInfer, xqa",
    "flashinfer fa2": "FlashInfer, fa2",
    "triton": "Triton",
    "humming": "Humming",
    "humming-ordered": "Humming, rows in order",
    "humming-tight": "Humming, little padding",
    "humming-ordered-tight": "Humming, little padding, rows in order",
    "humming-e4m3": "Humming, e4m3",
    "humming-ordered-e4m3": "Humming, e4m3, rows in order",
    "marlin": "Marlin",
    "deepgemm-e4m3": "DeepGEMM, e4m3",
}
OTHERS = tuple(
    Look(colour, shape, dash)
    for (colour, shape), dash in zip(
        zip((BLACK, ORANGE, GREEN, VERMILION, BLUE, PURPLE) * 2, "h<>osv^DPXd*", strict=True),
        ("-", "--", ":", "-.") * 3,
        strict=True,
    )
)


def look(name: str, number: int = 0) -> Look:
    """Look of a name; of one without a look of its own, such as a config that somebody tries, the
    one with that number."""
    return LOOKS.get(name) or OTHERS[number % len(OTHERS)]


def called(name: str) -> str:
    """The name as a reader knows it."""
    return NAMES.get(name, name)


@contextmanager
def picture(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    *,
    height: float = 4.0,
    title: str = "",
    caption: str = "",
    keys: int = 0,
    source: str = "",
    **how: Any,
) -> Iterator[tuple[Figure, Any]]:
    """Yield (figure, its axes as rows of columns) of matplotlib, and write it to `path` at the
    end.

    height: height in inches.
    title, caption: lines of the heading, not wrapped.
    keys: lines of the heading left free for `legend`.
    source: source of the data, noted in a PNG; `source_of` reads it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context(RC):
        size = {"figsize": (WIDTH, height), "layout": "constrained"}
        figure, axes = pyplot.subplots(rows, columns, squeeze=False, **{**size, **how})
        _head(figure, title, caption, keys)
        try:
            yield figure, axes
            write(figure, path, source)
        finally:
            pyplot.close(figure)


def _head(figure: Figure, title: str, caption: str, keys: int) -> None:
    """The title, below it the caption, and the place of the keys."""
    width, height = figure.get_size_inches()
    lines = caption.split("\n") if caption else []
    used = MARGIN + (1.3 * LINE if title else 0) + 0.9 * LINE * len(lines)
    figure.text(MARGIN / width, 1 - MARGIN / height, title, fontsize=TITLE, weight="bold", va="top")
    below = {"fontsize": SMALL, "color": GREY, "va": "top", "linespacing": 1.3}
    at = 1 - (MARGIN + (1.3 * LINE if title else 0)) / height
    figure.text(MARGIN / width, at, caption, **below)
    figure.keys_at = 1 - used / height  # type: ignore[attr-defined]
    used += 1.15 * LINE * keys + MARGIN
    room = (MARGIN / width, MARGIN / height, 1 - 2 * MARGIN / width, 1 - (used + MARGIN) / height)
    engine = figure.get_layout_engine()
    if engine is not None and (title or keys):
        engine.set(rect=room)


def legend(figure: Figure, handles: Sequence[Any], columns: int = 0) -> None:
    """Keys below the heading, from the left."""
    width, _ = figure.get_size_inches()
    how = {"loc": "upper left", "frameon": False, "handletextpad": 0.4, "columnspacing": 1.2}
    at = (MARGIN / width, figure.keys_at)  # type: ignore[attr-defined]
    place = {"bbox_to_anchor": at, "borderaxespad": 0, "borderpad": 0.1, "labelspacing": 0.3}
    figure.legend(handles=list(handles), ncols=columns or len(handles), **how, **place)


def key(name: str, words: str = "", *, line: bool = True, number: int = 0) -> Any:
    """Key of a legend."""
    from matplotlib.lines import Line2D

    style = look(name, number)
    how = style.line() if line else {**style.marks(), "linestyle": ""}
    return Line2D([], [], label=words or called(name), **how)


def grid(axis: Axes, which: str = "both") -> None:
    """Pale lines behind everything."""
    axis.grid(axis=which)  # type: ignore[arg-type]
    axis.tick_params(length=2, color=GREY)


def write(figure: Figure, path: Path, source: str = "") -> None:
    """Write the figure; the bytes are reproducible with the same version of matplotlib."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".png":
        figure.savefig(path, metadata={PLAIN[path.suffix]: None} if path.suffix in PLAIN else {})
        return
    from PIL import Image, PngImagePlugin

    figure.savefig(dots := BytesIO(), dpi=DPI, format="png")
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Source", source)
    # As many colours as these pictures have, edges of letters included, in a third of the bytes.
    few = Image.open(dots).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True, pnginfo=notes)


def source_of(path: Path) -> str:
    """Return the source that `picture` noted in a PNG; empty for other pictures."""
    from PIL import Image

    with Image.open(path) as found:
        return str(found.info.get("Source", ""))


def named(numbers: Iterable[int]) -> list[str]:
    """Labels of ticks: 1k, 16k; others in figures."""
    return [f"{n // 1024}k" if n and n % 1024 == 0 else str(n) for n in numbers]
