"""Tables and pictures of decode latency: for a terminal, for a README, with matplotlib.

Rows are those of `bench.py gqa`: of a problem and a peer, "cold_us" and so on or why it was
"refused".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.tables import Table, picture
from workbench.tables import markdown as markdown_of


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
    lines = []
    problems = dict.fromkeys((row["batch"], row["kv_len"]) for row in rows)
    for batch, length in problems:
        found = {r["peer"]: r for r in rows if (r["batch"], r["kv_len"]) == (batch, length)}
        floor = next((_short(row["floor_us"]) for row in found.values() if "cold_us" in row), "")
        cells = [_pair(found.get(name, {})) for name in peers]
        keys = f"{length // 1024}k" if length % 1024 == 0 else str(length)
        lines.append([f"{batch} x {keys}", floor, *cells])
    return markdown_of(["batch x keys", "floor", *peers], lines)


def _pair(row: dict) -> str:
    return f"{_short(row['cold_us'])} / {_short(row['warm_us'])}" if "cold_us" in row else "-"


def _short(us: float) -> str:
    return f"{us:.{2 if us < 10 else 1 if us < 100 else 0}f}"


def draw(path: Path, rows: Sequence[dict]) -> None:
    """Latency against KV length, one picture per batch: cold lines, warm dots, the floor."""
    timed_rows = [row for row in rows if "cold_us" in row]
    batches = sorted({row["batch"] for row in timed_rows})
    names = list(dict.fromkeys(row["peer"] for row in timed_rows))
    count = max(1, len(batches))
    with picture(path, 1, count, figsize=(5 * count, 5)) as (_, axes):
        for axis, batch in zip(axes[0], batches, strict=False):
            chosen = [row for row in timed_rows if row["batch"] == batch]
            floor = dict(sorted((row["kv_len"], row["floor_us"]) for row in chosen))
            axis.plot(floor.keys(), floor.values(), "k--", label="read floor")
            for k, name in enumerate(names):
                own, colour = (row for row in chosen if row["peer"] == name), f"C{k % 10}"
                line = sorted((r["kv_len"], r["cold_us"], r["warm_us"]) for r in own)
                lengths = [x for x, *_ in line]
                axis.plot(lengths, [y for _, y, _ in line], "-o", color=colour, label=name)
                axis.plot(lengths, [y for *_, y in line], "x:", color=colour, alpha=0.6)
            axis.set(xscale="log", yscale="log", title=f"batch {batch}", xlabel="keys", ylabel="us")
            axis.set_xticks(list(floor), [str(length) for length in floor])
            axis.grid(alpha=0.3)
        axes[0][0].legend(fontsize=7, title="cold lines, warm crosses", title_fontsize=7)
