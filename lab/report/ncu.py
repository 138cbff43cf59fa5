"""Reports of Nsight Compute on launches: utilisation of each unit of the GPU, and stall reasons."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.report.documents import Document
from lab.tools import style
from lab.verbs.nsight import KERNELS, LATENCY, PER_ISSUE, STALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "Kernel Name"
# As nsight.py calls a kernel -> in words.
TITLES = {
    "gqa": "Decode attention",
    "fmha": "Attention",
    "moe": "Product of experts",
    "append": "Append to the cache",
    "compress": "Compressor of sparse attention",
}
RECORDED = (("compress", "^fmha_sparse_compressor_"),)  # its name in results/ncu_h200.csv
# ncu's "Speed of Light", from the pipes outwards; each over all cycles of the launch.
PEAK = ".avg.pct_of_peak_sustained_elapsed"
UNITS = {
    "SM": f"sm__throughput{PEAK}",
    "tensor pipe": f"sm__pipe_tensor_cycles_active{PEAK}",
    "L1": f"l1tex__throughput{PEAK}",
    "L2": f"lts__throughput{PEAK}",
    "DRAM": f"gpu__dram_throughput{PEAK}",
}
NEAR = 2.0  # percent points; metrics are of several passes, which differ where clocks are free
WORK = "selected"  # of the reasons: the warp issued, and did not wait
BUSIEST, OTHER = {"facecolor": style.BLUE}, {"facecolor": "white", "edgecolor": style.BLUE}
WAIT = {"facecolor": "#fbe3b5", "edgecolor": style.BLACK, "linewidth": 0.6, "hatch": "////"}


def draw(path: Path, document: Document, source: str = "") -> None:
    """A row per launch: throughputs, and beside them the largest reasons of stalls."""
    _, *launches = document.rows
    how = {
        "height": 1.25 + 1.62 * len(launches),
        "title": "Nsight Compute: which unit is busy, and why warps wait",
        "caption": f"Measured by ncu on one {document.gpu}, {document.date}; one launch each. "
        f"{document.notes}.\nThroughputs are over all cycles of the launch, even those in which an "
        "SM has no CTA; SM is its busiest pipe",
        "keys": 1,
        "sharex": "col",
    }
    with style.picture(path, len(launches), 2, source=source, **how) as (figure, axes):
        for (left, right), launch in zip(axes, launches, strict=True):
            _bars(left, throughputs(launch), dark=True)
            _bars(right, stalls(launch)[: len(UNITS)], dark=False)
            _head(left, *title(launch))
        axes[-1, 0].set_xlabel("throughput, % of peak", fontsize=style.SMALL)
        axes[-1, 1].set_xlabel("share of a warp's time, %", fontsize=style.SMALL)
        style.legend(figure, _keys())


def _head(axis: Axes, first: str, second: str) -> None:
    """Two lines from the edge of the picture on, above both panels."""
    axis.set_title(" \n ", fontsize=style.SMALL)  # their room
    edge = style.MARGIN / style.WIDTH, 1.0
    how = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points"}
    for words, above, weight in ((first, 15, "bold"), (second, 4, "normal")):
        text = axis.annotate(words, edge, (0, above), fontsize=style.SMALL, weight=weight, **how)
        text.set_in_layout(False)


def throughputs(launch: Mapping[str, str]) -> list[tuple[str, float]]:
    """(unit, percent of its peak), in the order of UNITS."""
    return [(unit, float(launch[metric])) for unit, metric in UNITS.items()]


def stalls(launch: Mapping[str, str]) -> list[tuple[str, float]]:
    """(reason, percent of the time of a warp between two of its instructions), the largest first.

    Issuing is no reason, and left out.
    """
    found = {
        name.removeprefix(STALL).removesuffix(PER_ISSUE): float(cycles)
        for name, cycles in launch.items()
        if name.startswith(STALL)
    }
    total = float(launch[LATENCY])
    shares = [(reason.replace("_", " "), 100 * cycles / total)
              for reason, cycles in found.items() if reason != WORK]  # fmt: skip
    return sorted(shares, key=lambda each: -each[1])


def title(launch: Mapping[str, str]) -> tuple[str, str]:
    """Two lines: what the kernel is and its name; its launch."""
    name = re.sub(r"_cutlass_\d+$", "", launch[NAME])
    patterns = (*KERNELS.items(), *RECORDED)
    known = (key for key, pattern in patterns if re.search(pattern, name))
    words = TITLES.get(next(known, ""), "")
    grid, block = (_product(launch[key]) for key in ("Grid Size", "Block Size"))
    us, kb = float(launch["gpu__time_duration.sum"]) / 1e3, _kb(launch)
    facts = (
        f"grid {grid}, block {block}",
        f"{us:.1f} us",
        f"{launch['launch__registers_per_thread']} registers",
        f"{kb:.0f} KB of shared memory",
        f"occupancy {float(launch['sm__warps_active.avg.pct_of_peak_sustained_active']):.0f} %",
        f"waves {float(launch['launch__waves_per_multiprocessor']):.2g}",
    )
    return f"{words}: {name}" if words else name, ", ".join(facts)


def _kb(launch: Mapping[str, str]) -> float:
    return float(launch["launch__shared_mem_per_block"]) / 1e3


def _product(size: str) -> str:
    """(8, 8, 1) as 8 x 8; of ones alone 1."""
    sides = [side for side in re.findall(r"\d+", size) if side != "1"]
    return " x ".join(sides) or "1"


def _bars(axis: Axes, bars: Sequence[tuple[str, float]], *, dark: bool) -> None:
    """Draw bars, those near the largest filled, where `dark` says so."""
    most = max(share for _, share in bars)
    for at, (_, share) in enumerate(bars):
        face = (BUSIEST if share > most - NEAR else OTHER) if dark else WAIT
        axis.barh(at, share, 0.66, **face)
        axis.text(share + 1.5, at, f"{share:.0f}", va="center", fontsize=style.SMALL)
    axis.set_yticks(range(len(bars)), [name for name, _ in bars])
    axis.set_ylim(len(bars) - 0.4, -0.6)
    axis.set_xlim(0, 100)
    axis.set_xticks(range(0, 101, 25))
    axis.tick_params(axis="y", length=0)
    style.grid(axis, "x")


def _keys() -> list:
    from matplotlib.patches import Patch

    return [
        Patch(label=f"busiest units, within {NEAR:.0f} points", **BUSIEST),
        Patch(label="other units", **OTHER),
        Patch(label="largest reasons why warps do not issue, mean over warps", **WAIT),
    ]
