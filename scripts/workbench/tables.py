"""Tables on a terminal and for a page, and pictures."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Table = tuple[str, list[str], list[list[str]]]  # title, heads, rows
WIDTH = 160  # where the output is no terminal


def show(title: str, heads: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """On the terminal, with rich where it is installed."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        columns = zip(heads, *cells, strict=True)
        widths = [max(map(len, column)) for column in columns]
        print(title)
        for line in (heads, *cells):
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = RichTable(title=Text(title), box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for k, head in enumerate(heads):
        table.add_column(head, justify="right" if k > 0 else "left", no_wrap=True)
    for line in cells:
        table.add_row(*map(Text, line))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def markdown(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """For a page."""
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **how: Any) -> Iterator[tuple[Any, Any]]:
    """(figure, its axes as rows of columns) of matplotlib, which is written at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, **how)
    yield figure, axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
