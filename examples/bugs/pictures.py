"""Pictures of ptxemu's reports on five bugs; `python examples/bugs/pictures.py` rewrites them.

Each bug is `column_sums.py` with one line changed. The reports are printed by the commands.
Addresses of this process are replaced, so that the pictures are reproducible.
"""

from __future__ import annotations

import html
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "docs" / "ptxemu" / "bugs"
KERNEL = (HERE / "column_sums.py").read_text(encoding="utf-8")
COLUMNS = 116  # characters of a line
LINES = 34  # of a picture
STYLES = {
    "-": "red",
    "+": "green",
    "$": "bold",
    "error:": "bold red",
    "stopped:": "bold red",
    "first difference:": "bold red",
    "cycle:": "bold",
    "chain:": "bold",
    "likely cause:": "bold yellow",
    "missing:": "bold yellow",
    "at ": "cyan",
}


@dataclass(frozen=True)
class Bug:
    """A one-line change of a kernel, and the command that finds it.

    Attributes:
        name: Name of the kernel's file, without ".py".
        line: The line of the kernel that is replaced.
        instead: Its replacement; "" removes the line.
        command: Subcommand of ptxemu that finds the bug.
    """

    name: str
    line: str
    instead: str = ""
    command: str = "check"

    @property
    def words(self) -> list[str]:
        """Words of the command line after `python -m ptxemu`."""
        return [word.format(self.name) for word in self.command.split()] + [f"{self.name}.py"]

    @property
    def source(self) -> str:
        assert KERNEL.count(self.line) == 1, self.line
        whole = re.compile(rf"^ *{re.escape(self.line)}\n", re.MULTILINE)
        found = whole.search(KERNEL)
        assert found, self.line
        changed = found[0].replace(self.line, self.instead) if self.instead else ""
        return whole.sub(lambda _: changed, KERNEL)


BUGS = (
    Bug("missing_wait", "cute.arch.mbarrier_wait(full + stage, phase)"),
    Bug(
        "wrong_tx_bytes",
        "cute.arch.mbarrier_arrive_and_expect_tx(full + stage, TILE_BYTES)",
        "cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * TILE_BYTES)",
    ),
    Bug("missing_release", "cute.arch.mbarrier_arrive(empty + stage)"),
    Bug(
        "wrong_tile_index",
        "cute.copy(atom, source[None, tile], to[None, stage], tma_bar_ptr=full + stage)",
        "cute.copy(atom, source[None, tile + 1], to[None, stage], tma_bar_ptr=full + stage)",
        "compare --reference {}.py:reference",
    ),
    Bug("overrun", "y[tile, lane] = total", "y[tile + 1, lane] = total"),
)


def reports() -> Iterator[tuple[Bug, str]]:
    """Yield each bug with the output of the command.

    The DSL must not be imported before, since its import decides on line information.
    """
    from ptxemu.__main__ import main

    os.environ["PTXEMU_KEEP"] = "kept"
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # paths in a report are short from here
        try:
            for bug in BUGS:
                Path(f"{bug.name}.py").write_text(bug.source, encoding="utf-8")
                out = StringIO()
                quiet = redirect_stderr(StringIO())
                with redirect_stdout(out), quiet, suppress(SystemExit):
                    main(bug.words)
                yield bug, _anywhere(out.getvalue())
        finally:
            os.chdir(before)


def lines_of(bug: Bug, report: str) -> list[str]:
    """Return the picture's text: the change, the command, and as much of the report as fits."""
    lines = [*_all_lines(bug, report)]
    more = len(lines) - LINES
    return [*lines[:LINES], f"... and {more} lines more"] if more > 1 else lines


def _all_lines(bug: Bug, report: str) -> Iterator[str]:
    yield f"- {bug.line}"
    if bug.instead:
        yield f"+ {bug.instead}"
    yield ""
    yield f"$ python -m ptxemu {' '.join(bug.words)}"
    for line in report.strip().splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        yield from textwrap.wrap(line, COLUMNS, subsequent_indent=indent) or [""]


def text_of(picture: str) -> str:
    """The words of a picture below its title, without white space."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", picture, re.DOTALL)[1:]
    return "".join(html.unescape("".join(found)).split())


def picture(bug: Bug, lines: list[str]) -> str:
    """Return an SVG of a terminal window that looks alike on light and dark pages."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=StringIO(), legacy_windows=False)
    for line in lines:
        style = next((s for start, s in STYLES.items() if line.strip().startswith(start)), "")
        console.print(Text(line, style), soft_wrap=True)
    title = bug.name.replace("_", " ")
    return console.export_svg(title=title, unique_id=bug.name.replace("_", "-"))


def _anywhere(report: str) -> str:
    """Addresses of a process count from the first one on."""
    found = re.findall(r"0x[0-9a-f]{9,}", report)
    low = int(found[0], 16) if found else 0
    return re.sub(r"0x[0-9a-f]{9,}", lambda m: f"{0x7F0000000000 + int(m[0], 16) - low:#x}", report)


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for bug, report in reports():
        path = FOLDER / f"{bug.name}.svg"
        path.write_text(picture(bug, lines_of(bug, report)), encoding="utf-8")
        print(f"wrote {path.relative_to(HERE.parents[1])}")


if __name__ == "__main__":
    sys.exit(main())
