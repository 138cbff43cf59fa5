"""Tables of attention beside its peers: for a terminal, for a page.

Rows are those of `bench.py fmha`: of a problem and a peer, with "us" and so on, or why it was
"refused".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lab.bench.fmha_peers import OURS
from lab.tools.tables import Table
from lab.tools.tables import markdown as markdown_of

TIMES = (
    ("problem", "{problem}"), ("peer", "{peer}"), ("us", "{us:.1f}"), ("TFLOP/s", "{tflops:.0f}"),
    ("of best peer", "{of_best:.2f}"), ("spread", "{spread:.1%}"), ("SM MHz", "{sm_mhz:.0f}"),
    ("W", "{watts:.0f}"), ("max difference", "{max_difference:.1e}"),
)  # fmt: skip
PROBLEMS = (
    ("rows", "{rows}"), ("problem", "{problem}"),
    ("TFLOP", lambda row: f"{row['flop'] * 1e-12:.3f}"),
)  # fmt: skip


def ranked(rows: list[dict]) -> list[dict]:
    """The rows of one problem, those with a time also with `of_best`: the speed over that of the
    fastest peer other than ours."""
    best = max((row["tflops"] for row in rows if "us" in row and row["peer"] != OURS), default=None)
    for row in rows:
        if "us" in row and best:
            row["of_best"] = row["tflops"] / best
    return rows


def by_problem(rows: Sequence[dict]) -> Iterator[tuple[dict, dict[str, dict]]]:
    """(one row of it, its rows by peer) of each problem."""
    for _, group in itertools.groupby(rows, key=lambda row: (row["rows"], row["problem"])):
        found = {row["peer"]: row for row in group}
        yield next(iter(found.values())), found


def footnotes(rows: Sequence[dict]) -> dict[str, int]:
    """Why there are no times -> its number, each reason of a peer once."""
    found = dict.fromkeys(_reason(row) for row in rows if "refused" in row)
    return {reason: number for number, reason in enumerate(found, start=1)}


def noted(row: dict, notes: dict[str, int]) -> dict:
    """A copy of the row, with the number of its footnote in place of a reason."""
    return row | ({"refused": f"[{notes[_reason(row)]}]"} if "refused" in row else {})


def _reason(row: dict) -> str:
    return f"{row['peer']}: {row['refused']}"


def summary(rows: Sequence[dict], mark: str = "{} *") -> Table:
    """A line per problem: TFLOP/s of each peer, the fastest marked, and our speed over that of the
    fastest other one."""
    names, notes, lines = dict.fromkeys(row["peer"] for row in rows), footnotes(rows), []
    for one, found in by_problem(rows):
        best = max((row["tflops"] for row in found.values() if "us" in row), default=None)
        cells = []
        for row in (noted(found.get(name, {}), notes) for name in names):
            rate = f"{row['tflops']:.0f}" if "us" in row else row.get("refused", "-")
            cells.append(mark.format(rate) if row.get("tflops", 0) == best else rate)
        ratio = found.get(OURS, {}).get("of_best")
        lines.append([one["problem"], *cells, "-" if ratio is None else f"{ratio:.2f}"])
    return "TFLOP/s", ["problem", *names, f"{OURS} / best peer"], lines


def markdown(rows: Sequence[dict]) -> str:
    """The same for a page, with its footnotes."""
    _, heads, lines = summary(rows, "**{}**")
    notes = [f"[{number}] {reason}" for reason, number in footnotes(rows).items()]
    return "\n\n".join([markdown_of(heads, lines), *notes])
