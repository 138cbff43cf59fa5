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


def bars(path: Path, rows: Sequence[dict[str, Any]], title: str) -> None:
    """rows: row, kernels (of a name: us, low_us, high_us), published (us). Times over that of our
    kernel, which the label has; what is published as a cross."""
    names = list(dict.fromkeys(name for row in rows for name in row["kernels"]))
    height = 0.8 / len(names)
    rows = [row for row in rows if any("us" in each for each in row["kernels"].values())]
    with picture(path, figsize=(9, 1 + 0.55 * len(rows))) as (_, axes):
        axis = axes[0][0]
        units = [next(k["us"] for k in row["kernels"].values() if "us" in k) for row in rows]
        for number, name in enumerate(names):
            found = [(at, row["kernels"][name], units[at]) for at, row in enumerate(rows)
                     if "us" in row["kernels"].get(name, {})]  # fmt: skip
            places = [at + number * height for at, *_ in found]
            widths = [each["us"] / unit for _, each, unit in found]
            below = [(each["us"] - each["low_us"]) / unit for _, each, unit in found]
            above = [(each["high_us"] - each["us"]) / unit for _, each, unit in found]
            how = {"color": f"C{number}", "label": name, "error_kw": {"lw": 0.8}}
            axis.barh(places, widths, height, xerr=[below, above], **how)
        marks = [(each["us"] / units[at], at + 0.4 - height / 2)
                 for at, row in enumerate(rows) for each in row["published"]]  # fmt: skip
        if marks:
            axis.plot(*zip(*marks, strict=True), "kx", ms=5, label="published")
        labels = [f"{row['row']}, {unit:.0f} us" for row, unit in zip(rows, units, strict=True)]
        axis.set_yticks([at + 0.4 - height / 2 for at in range(len(rows))], labels)
        axis.invert_yaxis()
        axis.set(xlabel="time over that of the first bar", title=title)
        axis.legend(fontsize=8)
