"""A slim table of reports of Nsight Compute: a row per launch, and few of ncu's 2,200 metrics.

    ncu --import out/profile/gqa.ncu-rep --page raw --csv > out/profile/gqa.csv
    python scripts/nsight.py table out/profile/gqa.csv --out results/ncu_h200.csv

It has the form of ncu's own export: a line of names, one of units, then the launches. Above them
stand comments, the GPU and the date first. Names of hosts, processes and files are left out.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from io import StringIO
from pathlib import Path

from lab.tools.common import refuse

GPU = "device__attribute_display_name"
WORDS = ("Kernel Name", "Grid Size", "Block Size")  # everything else is a number
STALL, PER_ISSUE = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
LATENCY = "smsp__average_warp_latency_per_inst_issued.ratio"  # what the stalls add up to
METRICS = (
    "launch__cluster_size",
    "launch__waves_per_multiprocessor",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block",
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.avg",
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.avg.per_second",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    LATENCY,
    *(f"{STALL}{reason}{PER_ISSUE}" for reason in (
        "barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle",
        "long_scoreboard", "math_pipe_throttle", "membar", "mio_throttle", "misc",
        "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping",
        "tex_throttle", "wait",
    )),
)  # fmt: skip
# ncu prints what is readable, which differs from report to report: to base units, as its
# `--print-units base` does.
TIMES = {"us": 1000, "ms": 10**6, "s": 10**9}
PREFIXES = {"K": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
SCALED = ("byte", "hz")


def slim(exports: Sequence[Path], day: str, notes: Sequence[str] = ()) -> str:
    """The table of these exports, as CSV.

    day: of the measurement. ValueError where a file is no such export, or where reports of several
    GPUs or in different units are among them; OSError where it cannot be read.
    """
    found = [launch for export in exports for launch in launches(export)]
    gpus = sorted({launch[GPU][0] for launch in found})
    if len(gpus) != 1:
        raise ValueError(f"reports of one GPU are wanted, not of {', '.join(gpus) or 'none'}")
    out = StringIO()
    out.writelines(f"# {note}\n" for note in (f"gpu: {gpus[0]}", f"date: {day}", *notes))
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([*WORDS, *METRICS])
    lines.writerow(["" for _ in WORDS] + [_unit(name, found) for name in METRICS])
    for launch in found:
        lines.writerow([launch[name][0] for name in (*WORDS, *METRICS)])
    return out.getvalue()


def launches(export: Path) -> list[dict[str, tuple[str, str]]]:
    """Of each launch in an export: metric -> (value, unit), in base units."""
    with export.open(encoding="utf-8", newline="") as file:
        names, units, *rows = [*csv.reader(file), [], []]  # of an empty file, too
    missing = {GPU, *WORDS, *METRICS} - {*names}
    if missing:
        raise ValueError(
            f"{export} lacks {min(missing)}: not of `--page raw --csv`, or few sections"
        )
    places = {name: names.index(name) for name in (GPU, *WORDS, *METRICS)}
    return [
        {name: (row[at], "") if name in (GPU, *WORDS) else in_base_units(row[at], units[at])
         for name, at in places.items()}
        for row in rows
        if row
    ]  # fmt: skip


def in_base_units(value: str, unit: str) -> tuple[str, str]:
    """12.128 us is 12128 ns, 33.8 Kbyte/block is 33800 byte/block; thousands lose their commas."""
    scale = 1
    if unit in TIMES:
        scale, unit = TIMES[unit], "ns"
    elif unit[:1] in PREFIXES and unit[1:].startswith(SCALED):
        scale, unit = PREFIXES[unit[0]], unit[1:]
    return f"{(Decimal(value.replace(',', '')) * scale).normalize():f}", unit


def _unit(name: str, found: Sequence[dict[str, tuple[str, str]]]) -> str:
    units = {launch[name][1] for launch in found}
    if len(units) != 1:
        raise ValueError(f"{name} is in {' and in '.join(sorted(units))}")
    return units.pop()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="nsight.py table",
        description="A slim CSV of exports of Nsight Compute, a row per launch.",
        epilog="To export one: ncu --import STEM.ncu-rep --page raw --csv > STEM.csv",
    )
    parser.add_argument("exports", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: the terminal")
    words = "of the measurement; default: today"
    parser.add_argument("--date", default=date.today().isoformat(), help=words)
    parser.add_argument("--note", action="append", default=[], help="driver, clocks (repeatable)")
    options = parser.parse_args([*arguments])
    try:
        text = slim(options.exports, options.date, options.note)
        if options.out:
            options.out.write_text(text, encoding="utf-8")
        else:
            sys.stdout.write(text)
    except (ValueError, OSError) as error:
        return refuse(error)
    return 0
