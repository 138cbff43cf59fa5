"""Tables of decode latency: for a terminal, for a README.

Rows are those of `bench.py gqa`: of a problem and a peer, "cold_us" and so on or why it was
"refused".
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.tools.groups import spelt
from lab.tools.tables import Table, table
from lab.tools.tables import markdown as markdown_of


def title_of(row: dict) -> str:
    heads = f"{row['q_heads']} query heads, {row['kv_heads']} KV heads of {row['head_dim']}"
    return f"batch {row['batch']}, {row['kv_len']} keys, {heads}, {row['dtype']}"


LATENCY = (
    ("peer", "{peer}{mark}"), ("cold us", "{cold_us:.2f}"), ("TB/s", "{cold_tbs:.2f}"),
    ("x floor", lambda row: f"{row['cold_us'] / row['floor_us']:.2f}"),
    ("warm us", "{warm_us:.2f}"), ("TB/s", "{warm_tbs:.2f}"),
    ("spread", lambda row: f"{max(row['cold_spread'], row['warm_spread']):.1%}"),
    ("error", "{error:.1e}"),
)  # fmt: skip
HOST = (("call", "{peer}"), ("us", "{host_us:.2f}"), ("spread", "{host_spread:.1%}"), ("", ""))
STATIC = (
    ("batch", "{batch}"), ("keys", "{kv_len}"), ("arch", "{arch}"), ("cluster", "{cluster}"),
    ("CTAs", "{ctas}"), ("SMEM bytes", "{smem_bytes:,}"), ("bytes", "{nbytes:,}"),
    ("floor us", "{floor_us:.2f}"), ("floor of", "{floor_of}"),
)  # fmt: skip


def latency_table(rows: Sequence[dict]) -> Table:
    """Of one problem; the fastest cold one is marked."""
    timed = [row for row in rows if "cold_us" in row]
    best = min((row["cold_us"] for row in timed), default=0)
    floor = f"; floor {timed[0]['floor_us']:.2f} us" if timed else ""
    marked = [row | {"mark": " *" * (row.get("cold_us") == best)} for row in rows]
    return table(title_of(rows[0]) + floor, LATENCY, marked)


def markdown(rows: Sequence[dict], peers: Sequence[str]) -> str:
    """A line per problem: cold and warm microseconds of each peer, the floor before them."""
    lines = []
    problems = dict.fromkeys((row["batch"], row["kv_len"]) for row in rows)
    for batch, length in problems:
        found = {r["peer"]: r for r in rows if (r["batch"], r["kv_len"]) == (batch, length)}
        floor = next((_short(row["floor_us"]) for row in found.values() if "cold_us" in row), "")
        cells = [_pair(found.get(name, {})) for name in peers]
        lines.append([f"{batch} x {spelt(length)}", floor, *cells])
    return markdown_of(["batch x keys", "floor", *peers], lines)


def _pair(row: dict) -> str:
    return f"{_short(row['cold_us'])} / {_short(row['warm_us'])}" if "cold_us" in row else "-"


def _short(us: float) -> str:
    return f"{us:.{2 if us < 10 else 1 if us < 100 else 0}f}"
