"""Tables and pictures of attention beside its peers: for a terminal, for a page, with matplotlib.

Rows are those of `bench.py fmha`: of a problem and a peer, with "us" and so on, or why it was
"refused".
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.bench.fmha_peers import OURS
from workbench.bench.fmha_rows import Problem
from workbench.flags.groups import spelt
from workbench.tables import Table, picture
from workbench.tables import markdown as markdown_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIMES = (
    ("problem", "{problem}"), ("peer", "{peer}"), ("us", "{us:.1f}"), ("TFLOP/s", "{tflops:.0f}"),
    ("of best peer", "{of_best:.2f}"), ("spread", "{spread:.1%}"), ("SM MHz", "{sm_mhz:.0f}"),
    ("W", "{watts:.0f}"), ("max difference", "{max_difference:.1e}"),
)  # fmt: skip
PROBLEMS = (
    ("rows", "{rows}"), ("problem", "{problem}"),
    ("TFLOP", lambda row: f"{row['flop'] * 1e-12:.3f}"),
)  # fmt: skip
COLUMNS = 3  # of panels: the head dims of the first set
# fmha dark, the others told apart by lightness, too
COLOURS = {OURS: "#1b1b3a", "mma.sync": "#5b5b9a", "fa4": "#d1495b", "cudnn": "#66a182",
           "fa2": "#edae49", "flashinfer": "#8d99ae"}  # fmt: skip


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


# -- picture --------------------------------------------------------------------------------------


def draw(path: Path, rows: Sequence[dict], head: dict) -> None:
    """TFLOP/s by length, bars of each peer: a panel per set, mask, head dim and heads."""
    from matplotlib.patches import Patch

    panels = panels_of(rows)
    names = [*dict.fromkeys(row["peer"] for row in rows if "us" in row)]
    lines, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    how = {"layout": "constrained", "figsize": (1 + 4.6 * columns, 1.2 + 2.9 * lines)}
    with picture(path, lines, columns, **how) as (figure, axes):
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        for axis, (name, problems) in zip(axes.flat, panels.items(), strict=False):
            _bars(axis, problems, names)
            axis.set_title(name, fontsize=9)
        gpu, dtypes = head.get("gpu", {}).get("name", "GPU"), dict.fromkeys(map(_dtypes, rows))
        figure.suptitle(f"Attention forward on one {gpu}, {'; '.join(dtypes)}, {head['date']}")
        bars = [Patch(color=COLOURS[name]) for name in names]
        figure.legend(bars, names, loc="outside lower center", ncols=max(1, len(names)))


def panels_of(rows: Sequence[dict]) -> dict[str, list[dict[str, dict]]]:
    """Title of a panel -> its problems, each as rows by peer; head dims beside each other."""
    found: dict[tuple[str, str, str], list[dict[str, dict]]] = {}
    for one, peers in by_problem(rows):
        fields = Problem.__dataclass_fields__.keys() & one.keys()
        problem = Problem(**{name: one[name] for name in fields})
        heads = f"{problem.q_heads}/{problem.kv_heads} heads of {problem.dims}"
        found.setdefault((one["rows"], problem.sight, heads), []).append(peers)
    order = {key: [*dict.fromkeys(key[:2] for key in found)].index(key[:2]) for key in found}
    return {f"{name}: {heads}, {sight}": found[name, sight, heads]
            for name, sight, heads in sorted(found, key=order.__getitem__)}  # fmt: skip


def _latent(row: dict) -> str:
    return ", K is V" if row.get("k_is_v") else ""


def _dtypes(row: dict) -> str:
    """Of q, and of k and v where it is another."""
    kv_dtype = row.get("kv_dtype")
    return f"{row['dtype']} and {kv_dtype}" if kv_dtype else row["dtype"]


def _bars(axis: Axes, problems: Sequence[dict[str, dict]], names: Sequence[str]) -> None:
    """A group of bars per problem."""
    width = 0.84 / max(1, len(names))
    for at, found in enumerate(problems):
        timed = [name for name in names if "us" in found.get(name, {})]
        for k, name in enumerate(timed):
            place, rate = at + (k - (len(timed) - 1) / 2) * width, found[name]["tflops"]
            bar = axis.bar(place, rate, 0.92 * width, color=COLOURS[name])
            axis.bar_label(bar, fmt="%.0f", fontsize=7, rotation=90, padding=2)
    sizes = [next(iter(found.values())) for found in problems]
    words = [f"{row['batch']} x {spelt(row['skv'])}{_latent(row)}" for row in sizes]
    if len(set(map(_dtypes, sizes))) > 1:
        words = [f"{word}\n{_dtypes(row)}" for word, row in zip(words, sizes, strict=True)]
    axis.set_xticks(range(len(problems)), words)
    axis.set(xlabel="entries x keys", ylabel="TFLOP/s", xlim=(-0.6, len(problems) - 0.4))
    axis.margins(y=0.2)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
