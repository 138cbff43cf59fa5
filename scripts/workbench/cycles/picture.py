"""Modelled times over those that were measured or published, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workbench.tables import picture

BAND = 0.10  # of the real time, shaded
SHAPES = "o^sD"  # one for every ten colours


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """rows: group, real_us, modelled_us, low_us, high_us. A colour and shape per group; the bars
    are what comes out with parameters anywhere within their ranges."""
    with picture(path, figsize=(7, 6.5)) as (_, axes):
        axis = axes[0][0]
        for number, group in enumerate(dict.fromkeys(row["group"] for row in rows)):
            mine = [row for row in rows if row["group"] == group]
            real, modelled = ([row[key] for row in mine] for key in ("real_us", "modelled_us"))
            below = [row["modelled_us"] - row["low_us"] for row in mine]
            above = [row["high_us"] - row["modelled_us"] for row in mine]
            how = {"color": f"C{number % 10}", "fmt": SHAPES[number // 10 % len(SHAPES)]}
            axis.errorbar(real, modelled, yerr=[below, above], ms=4, lw=0.8, label=group, **how)
        real = [row["real_us"] for row in rows]
        ends = [min(real) / 1.5, max(real) * 1.5]
        axis.plot(ends, ends, "k-", lw=0.8)
        low, high = ([end * (1 + sign * BAND) for end in ends] for sign in (-1, 1))
        axis.fill_between(ends, low, high, color="k", alpha=0.08, label=f"within {BAND:.0%}")
        axis.set(xscale="log", yscale="log", xlim=ends, title=title)
        axis.set(xlabel="measured or published, us", ylabel="modelled, us")
        axis.legend(fontsize=8)
