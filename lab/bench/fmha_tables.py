"""The tables of `bench.py fmha`: times beside peers, and what ptxas made of our softmax loops."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fmha import AttentionConfig
from fmha.config import HEAD_DIMS
from fmha.plan import make_plan
from lab.bench.fmha_peers import OURS
from lab.flags.bench import MASKS, OWN_DIMS
from lab.problems.fmha import span, subject_of
from lab.sass.kernel import Cell
from lab.sass.softmax import SOFTMAX_KINDS, static
from lab.tools.common import describe
from lab.tools.style import picture
from lab.tools.tables import Row, Table
from lab.tools.tables import markdown as markdown_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


TIMES = (
    ("peer", "{peer}"), ("us", "{us:.1f}"), ("TFLOP/s", "{tflops:.0f}"),
    ("of best peer", "{of_best:.2f}"), ("spread", "{spread:.1%}"), ("SM MHz", "{sm_mhz:.0f}"),
    ("W", "{watts:.0f}"), ("max difference", "{max_difference:.1e}"),
    ("off exact rows", "{exact_error:.1%}"), ("on average", "{mean_error:.2%}"),
    ("shrunk by", "{shrink:.2%}"),
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
    """Return the summary table as Markdown, with its footnotes."""
    _, heads, lines = summary(rows, "**{}**")
    notes = [f"[{number}] {reason}" for reason, number in footnotes(rows).items()]
    return "\n\n".join([markdown_of(heads, lines), *notes])


KINDS = {  # of the static table: heading -> kinds of SOFTMAX_KINDS
    "MUFU": ("MUFU.EX2", "MUFU other"),
    "packed": ("FFMA2", "FADD2", "FMUL2"),
    "F2FP": ("F2FP",),
    "FMNMX": ("FMNMX",),
    "mask": ("mask",),
}
KINDS["rest"] = (*set(SOFTMAX_KINDS).difference(*KINDS.values()),)


def grid(options: argparse.Namespace) -> Iterator[Cell]:
    """Cells of the static table: head dims x masks."""
    same = {"dtype": options.dtype or "bf16", "schedule": options.schedule}
    for head_dim, mask in itertools.product(options.head_dim or OWN_DIMS, options.mask or MASKS):
        v_dim = dict(HEAD_DIMS)[head_dim]
        dims = {"head_dim": head_dim, "v_head_dim": 0 if v_dim == head_dim else v_dim}
        config = AttentionConfig(**dims, **same, **MASKS[mask])
        named = {"mask": mask, "name": describe(config), "config": dataclasses.asdict(config)}
        yield named, partial(figures, config, options.arch)


def figures(config: AttentionConfig, arch: str, folder: Path) -> dict:
    """Return the figures that `sass.softmax.static` reads from the cubin of a config."""
    make_plan(config, arch)
    _, cubin, _ = subject_of(config, arch).write(folder)
    return static(cubin).as_dict()


def lines_of(rows: list[dict]) -> Iterator[dict]:
    """A line per softmax loop, or for a config that is refused."""
    for row in rows:
        for loop in row.get("loops", ({},)):
            yield row | loop


def of_kinds(kinds: Sequence[str], line: Row) -> str:
    return f"{sum(line['kinds'][kind] for kind in kinds):g}"


# Positions are shares of the loop's body.
STATIC = (
    ("config", "{name}"), ("regs", "{registers}"), ("stack", "{stack}"), ("spills", "{spills}"),
    ("loop", lambda line: "masked" if line["masked"] else "unmasked"), ("SASS", "{total:g}"),
    *((head, partial(of_kinds, kinds)) for head, kinds in KINDS.items()),
    ("O fix", "{correction}"), ("stats at", lambda line: span(line["publishes"]["statistics"])),
    ("P at", lambda line: span(line["publishes"]["p"])),
    ("P ready", lambda line: span(line["publishes"]["ready"])),
)  # fmt: skip


def draw(path: Path, rows: list[dict]) -> None:
    """A picture: the SASS of every loop by kind."""
    rows = [row for row in rows if "refused" not in row]
    height = 2 + 0.28 * sum(len(row["loops"]) for row in rows)
    with picture(path, figsize=(13, height)) as (_, axes):
        if rows:
            draw_static(axes[0][0], rows)
            axes[0][0].invert_yaxis()


def draw_static(axis: Axes, rows: list[dict]) -> None:
    """A stacked bar per softmax loop."""
    from matplotlib import colormaps

    loops = [(row["name"], loop) for row in rows for loop in row["loops"]]
    names = [f"{name}, {'masked' if loop['masked'] else 'unmasked'}" for name, loop in loops]
    left = [0.0] * len(loops)
    colours = iter(colormaps["tab20"].colors)
    for kind in loops[0][1]["kinds"]:
        widths = [loop["kinds"][kind] for _, loop in loops]
        if any(widths):
            colour = next(colours)
            axis.barh(range(len(loops)), widths, left=left, height=0.8, color=colour, label=kind)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axis.set_yticks(range(len(loops)), names, fontsize=7)
    axis.set_xlabel("SASS instructions per warp and tile, correction excluded")
    axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
