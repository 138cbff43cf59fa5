"""Tables and pictures of the steps of a MoE layer: for a terminal, for a README, with matplotlib.

Rows are those of `bench.py moe`: of a problem and a peer, "us" and so on or why it was "refused".
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from workbench.bench.gqa_tables import Table

COPY = "copy"  # the peer that moves as many bytes and does nothing else


def step_table(rows: Sequence[dict]) -> Table:
    """Of the rows of one problem: a line per peer."""
    first = rows[0]
    heads = ["peer", "us", "TB/s", "of a copy", "spread", ""]
    cells = []
    for row in rows:
        if "refused" in row:
            cells.append([row["peer"], "-", "", "", "", row["refused"][:80]])
            continue
        cells.append(
            [
                row["peer"],
                *(f"{row['us']:.2f}", f"{row['tbs']:.3f}", f"{row['share']:.2f}"),
                f"{row['spread']:.1%}",
                "" if row["cold"] else "warm",
            ]
        )
    size = f"{first['nbytes'] / 1e6:.3g} MB"
    return f"{first['step']}: {first['name']}, {_tokens(first['tokens'])}, {size}", heads, cells


def by_problem(rows: Sequence[dict]) -> list[list[dict]]:
    """Rows of a problem together."""
    groups = itertools.groupby(rows, key=lambda row: (row["step"], row["name"], row["tokens"]))
    return [list(group) for _, group in groups]


def markdown(rows: Sequence[dict]) -> str:
    """A line per variant: microseconds of `moe` for every number of tokens, the share of a copy
    with the most, and torch's microseconds there."""
    tokens = sorted({row["tokens"] for row in rows})
    heads = ["step", *map(_tokens, tokens), "of a copy", "torch"]
    lines = [heads, ["---"] * len(heads)]
    for step, name in dict.fromkeys((row["step"], row["name"]) for row in rows):
        found = {
            (row["tokens"], row["peer"]): row
            for row in rows
            if (row["step"], row["name"]) == (step, name)
        }
        times = [_us(found.get((count, "moe"), {})) for count in tokens]
        most = found.get((tokens[-1], "moe"), {})
        share = f"{most['share']:.2f}" if "share" in most else "-"
        torch = _us(found.get((tokens[-1], "torch"), {}))
        lines.append([f"{step}: {name}", *times, share, torch])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)}"


def _us(row: dict) -> str:
    return f"{row['us']:.{1 if row['us'] < 100 else 0}f}" if "us" in row else "-"


def draw(path: Path, rows: Sequence[dict]) -> None:
    """Bandwidth against tokens, a line per variant of `moe`, and of the copies beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [row for row in rows if "us" in row]
    steps = list(dict.fromkeys(row["step"] for row in timed))
    count = max(1, len(steps))
    figure, axes = pyplot.subplots(1, count, squeeze=False, figsize=(4.5 * count, 4.5))
    for axis, step in zip(axes[0], steps, strict=False):
        chosen = [row for row in timed if row["step"] == step]
        for colour, name in enumerate(dict.fromkeys(row["name"] for row in chosen)):
            for peer, style in (("moe", "-o"), (COPY, ":")):
                line = [r for r in chosen if (r["name"], r["peer"]) == (name, peer)]
                points = sorted((row["tokens"], row["tbs"]) for row in line)
                label = name if peer == "moe" else None
                axis.plot(*zip(*points, strict=True), style, color=f"C{colour}", label=label)
        axis.set(xscale="log", yscale="log", title=step, xlabel="tokens", ylabel="TB/s")
        axis.legend(fontsize=7, title="dotted: a copy of as many bytes", title_fontsize=7)
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
