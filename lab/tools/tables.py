"""Tables on a terminal and for a page."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

Table = tuple[str, list[str], list[list[str]]]  # title, heads, rows
Row = Mapping[str, Any]
# heading, and what stands under it: a format of the row's names, '{us:.2f}', or a function of it
Column = tuple[str, str | Callable[[Row], str]]
WIDTH = 160  # where the output is no terminal
REASON = 80  # characters of why a row has no figures
COLOURS = {"ok": "green", "OUT": "red"}


def table(title: str, columns: Sequence[Column], rows: Iterable[Row]) -> Table:
    """A line per row: '-' for what it lacks, and at the end of one that is `refused`, why."""
    return title, [head for head, _ in columns], [_line(columns, row) for row in rows]


def _line(columns: Sequence[Column], row: Row) -> list[str]:
    cells = []
    for _, cell in columns:
        try:
            cells.append(cell(row) if callable(cell) else cell.format_map(row))
        except KeyError:
            cells.append("-")
    return [*cells[:-1], row["refused"][:REASON]] if "refused" in row else cells


def show(
    title: str,
    heads: Sequence[str],
    cells: Sequence[Sequence[str | Text]],
    console: Console | None = None,
    width: int = WIDTH,
) -> None:
    """On the terminal, with rich where it is installed; on a console that is given, as narrow as
    can be. width: where the output is no terminal."""
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
    how = {"padding": (0, 1) if console is None else 0, "pad_edge": False}
    made = RichTable(title=Text(title), box=SIMPLE_HEAD, title_justify="left", **how)
    folding = {len(heads) - 1} if console is None else {0}  # the reason, or the case
    for k, head in enumerate(heads):
        made.add_column(head, justify="right" if k else "left", no_wrap=k not in folding)
    for line in cells:
        made.add_row(*(Text(c, COLOURS.get(c, "")) if isinstance(c, str) else c for c in line))
    console = console or Console(width=None if sys.stdout.isatty() else width)
    console.print(made)


def markdown(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return the table as Markdown."""
    lines = [heads, ["---"] * len(heads), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
