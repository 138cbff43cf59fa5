"""Tables and pictures of decode latency: for a terminal, for a README, with matplotlib.

Rows are those of `bench.py gqa`: of a problem and a peer, "cold_us" and so on or why it was
"refused".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

Table = tuple[str, list[str], list[list[str]]]  # title, heads, rows


def title_of(row: dict) -> str:
    heads = f"{row['q_heads']} query heads, {row['kv_heads']} KV heads of {row['head_dim']}"
    return f"batch {row['batch']}, {row['kv_len']} keys, {heads}, {row['dtype']}"


def latency_table(rows: Sequence[dict]) -> Table:
    """Of one problem; the fastest cold one is marked."""
    heads = ["peer", "cold us", "TB/s", "x floor", "warm us", "TB/s", "spread", "error"]
    best = min((row["cold_us"] for row in rows if "cold_us" in row), default=0)
    cells = []
    for row in rows:
        if "refused" in row:
            cells.append([row["peer"], "-", "", "", "-", "", "", row["refused"][:60]])
            continue
        mark = " *" if row["cold_us"] == best else ""
        cells.append(
            [
                row["peer"] + mark,
                *(f"{row['cold_us']:.2f}", f"{row['cold_tbs']:.2f}"),
                f"{row['cold_us'] / row['floor_us']:.2f}",
                *(f"{row['warm_us']:.2f}", f"{row['warm_tbs']:.2f}"),
                f"{max(row['cold_spread'], row['warm_spread']):.1%}",
                f"{row['error']:.1e}",
            ]
        )
    floors = {row["floor_us"] for row in rows if "floor_us" in row}
    floor = f"; floor {floors.pop():.2f} us" if floors else ""
    return title_of(rows[0]) + floor, heads, cells


def host_table(rows: Sequence[dict]) -> Table:
    cells = [
        [row["peer"], "-", "", row["refused"][:60]]
        if "refused" in row
        else [row["peer"], f"{row['host_us']:.2f}", f"{row['host_spread']:.1%}", ""]
        for row in rows
    ]
    return f"host, {title_of(rows[0])}", ["call", "us", "spread", ""], cells


def static_table(rows: Sequence[dict]) -> Table:
    heads = ["batch", "keys", "arch", "cluster", "CTAs", "SMEM KB", "MB", "floor us", "floor of"]
    cells = []
    for row in rows:
        cell = [str(row["batch"]), str(row["kv_len"]), row["arch"]]
        if "refused" in row:
            cells.append([*cell, "-", "", "", "", "", row["refused"][:60]])
            continue
        cell += [str(row["cluster"]), str(row["ctas"]), f"{row['smem_bytes'] / 1024:.1f}"]
        cell += [f"{row['nbytes'] / 1e6:.1f}", f"{row['floor_us']:.2f}", row["floor_of"]]
        cells.append(cell)
    return "static figures", heads, cells


def markdown(rows: Sequence[dict], peers: Sequence[str]) -> str:
    """A line per problem: cold and warm microseconds of each peer, the floor before them."""
    heads = ["batch x keys", "floor", *peers]
    lines = [heads, ["---"] * len(heads)]
    problems = dict.fromkeys((row["batch"], row["kv_len"]) for row in rows)
    for batch, length in problems:
        found = {r["peer"]: r for r in rows if (r["batch"], r["kv_len"]) == (batch, length)}
        floor = next((_short(row["floor_us"]) for row in found.values() if "cold_us" in row), "")
        cells = [_pair(found.get(name, {})) for name in peers]
        keys = f"{length // 1024}k" if length % 1024 == 0 else str(length)
        lines.append([f"{batch} x {keys}", floor, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _pair(row: dict) -> str:
    return f"{_short(row['cold_us'])} / {_short(row['warm_us'])}" if "cold_us" in row else "-"


def _short(us: float) -> str:
    return f"{us:.{2 if us < 10 else 1 if us < 100 else 0}f}"


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
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def draw(path: Path, rows: Sequence[dict]) -> None:
    """Latency against KV length, one picture per batch: cold lines, warm dots, the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed_rows = [row for row in rows if "cold_us" in row]
    batches = sorted({row["batch"] for row in timed_rows})
    names = list(dict.fromkeys(row["peer"] for row in timed_rows))
    colours = {name: f"C{k % 10}" for k, name in enumerate(names)}
    figure, axes = pyplot.subplots(
        1, max(1, len(batches)), squeeze=False, figsize=(5 * max(1, len(batches)), 5)
    )
    for axis, batch in zip(axes[0], batches, strict=False):
        chosen = [row for row in timed_rows if row["batch"] == batch]
        floor = dict(sorted((row["kv_len"], row["floor_us"]) for row in chosen))
        axis.plot(floor.keys(), floor.values(), "k--", label="read floor")
        for name in names:
            line = sorted(
                (r["kv_len"], r["cold_us"], r["warm_us"]) for r in chosen if r["peer"] == name
            )
            lengths = [x for x, *_ in line]
            axis.plot(lengths, [y for _, y, _ in line], "-o", color=colours[name], label=name)
            axis.plot(lengths, [y for *_, y in line], "x:", color=colours[name], alpha=0.6)
        axis.set(xscale="log", yscale="log", title=f"batch {batch}", xlabel="keys", ylabel="us")
        axis.set_xticks(list(floor), [str(length) for length in floor])
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7, title="cold lines, warm crosses", title_fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
