"""Modelled times over those that were measured or published, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.tools import style

BAND = 0.10  # of the real time, shaded
COLUMNS = 4  # of keys


def draw(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """rows: group, real_us, modelled_us, low_us, high_us. A colour and shape per group; the bars
    are what comes out with parameters anywhere within their ranges."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    lines = -(-(len(groups) + 1) // COLUMNS)
    how = {"height": 6.6 + 0.2 * lines, "title": title[:1].upper() + title[1:], "keys": lines}
    with style.picture(path, **how) as (figure, ((axis,),)):
        keys: list[Any] = []
        for number, group in enumerate(groups):
            mine = [row for row in rows if row["group"] == group]
            real, modelled = ([row[key] for row in mine] for key in ("real_us", "modelled_us"))
            below = [row["modelled_us"] - row["low_us"] for row in mine]
            above = [row["high_us"] - row["modelled_us"] for row in mine]
            marks = {**style.OTHERS[number % len(style.OTHERS)].marks(4.5), "linestyle": ""}
            keys.append(axis.errorbar(real, modelled, yerr=[below, above], elinewidth=0.8,
                                      label=group, **marks))  # fmt: skip
        real = [row["real_us"] for row in rows]
        ends = [min(real) / 1.5, max(real) * 1.5]
        axis.plot(ends, ends, color=style.BLACK, linewidth=1)
        low, high = ([end * (1 + sign * BAND) for end in ends] for sign in (-1, 1))
        shade = {"color": style.BLACK, "alpha": 0.1, "linewidth": 0}
        keys.append(axis.fill_between(ends, low, high, label=f"within {BAND:.0%}", **shade))
        axis.set(xscale="log", yscale="log", xlim=ends)
        axis.set(xlabel="measured or published, us", ylabel="modelled, us")
        style.grid(axis)
        style.legend(figure, keys, columns=COLUMNS)
