"""What bench_kvcache.py and bench_dsv4.py do: times beside torch and a copy of as many bytes."""

from __future__ import annotations

import argparse
import datetime
import gc
from collections.abc import Callable, Iterable, Sequence

import torch

from workbench.bench.gqa import Sample, replay, spreads
from workbench.bench.gqa_tables import show
from workbench.bench.moe import Call, copies, earlier_rows, with_shares
from workbench.bench.moe_tables import COPY, by_problem, step_table
from workbench.cases.moe_steps import Problem
from workbench.common import save_rows
from workbench.timing import setting

MAX_SETS = 128
OURS = "kvcache"
NO_GPU = """\
No CUDA GPU here. Not done: times of the kernels, of torch and of copies, comparison with the
reference. Below are the bytes of each problem."""


def rows_of(
    problem: Problem, cache_bytes: int, samples_of: Callable = replay, device: str = "cuda"
) -> list[dict]:
    """A row per peer and for the copy: microseconds of a call, or why there is nothing to say."""
    wanted = problem.sets(cache_bytes)
    sets = [problem.draw(seed, device) for seed in range(min(wanted, MAX_SETS))]
    samples: dict[str, Sample] = {}
    rows: dict[str, dict] = {}
    for name, function in problem.peers.items():
        rows[name] = {**problem.sizes, "peer": name, "sets": len(sets), "cold": len(sets) == wanted}
        try:
            if name == OURS:
                problem.check(sets[-1], function(*sets[-1]))
            samples[name] = samples_of([Call(function, arguments) for arguments in sets])
        except Exception as refusal:  # noqa: BLE001  torch runs out of memory as it likes
            reason = str(refusal).strip().partition("\n")[0]
            rows[name]["refused"] = f"{type(refusal).__name__}: {reason}"
    samples[COPY] = samples_of(copies(problem.nbytes, len(sets), device))
    rows[COPY] = {**rows[OURS], "peer": COPY}
    rows[COPY].pop("refused", None)
    return with_shares(rows, dict(zip(samples, spreads([*samples.values()]), strict=True)))


def time_all(problems: Iterable[Problem], console: Callable) -> list[dict]:
    """Rows of all problems; each is shown when it is done."""
    rows: list[dict] = []
    for problem in problems:
        gc.collect()
        torch.cuda.empty_cache()
        found = rows_of(problem, torch.cuda.get_device_properties().L2_cache_size)
        console(*step_table(found))
        rows += found
    return rows


def markdown(rows: Sequence[dict]) -> str:
    """A line per kind: microseconds for every number of rows, the share of a copy's bandwidth with
    the most, and what the other peer takes there."""
    counts = sorted({row["tokens"] for row in rows})
    lines = [["step", *(f"{count}" for count in counts), "of a copy", "beside it"]]
    lines.append(["---"] * len(lines[0]))
    for step, name in dict.fromkeys((row["step"], row["name"]) for row in rows):
        found = [row for row in rows if (row["step"], row["name"]) == (step, name)]
        mine = {row["tokens"]: row for row in found if row["peer"] == OURS and "us" in row}
        times = [f"{mine[count]['us']:.1f}" if count in mine else "-" for count in counts]
        most = mine.get(counts[-1], {})
        others = [
            f"{row['peer']} {row['us']:.1f}"
            for row in found
            if row["peer"] not in (OURS, COPY) and row["tokens"] == counts[-1] and "us" in row
        ]
        share = f"{most['share']:.2f}" if most else "-"
        lines.append([f"{step}: {name}", *times, share, ", ".join(others) or "-"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_again(options: argparse.Namespace) -> None:
    """Tables of the file of an earlier run."""
    rows = earlier_rows(options)
    if options.markdown:
        print(markdown(rows))
        return
    for group in by_problem(rows):
        show(*step_table(group))


def perform(options: argparse.Namespace, problems_of: Callable[..., list[Problem]]) -> int:
    """What the flags ask for, of problems_of(steps, counts, words); returns the exit code."""
    if options.show:
        show_again(options)
        return 0
    problems = problems_of(options.steps, options.rows, options.names)
    head = {"kind": "setting", "date": datetime.date.today().isoformat(), **setting()}
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        rows = [{"kind": "step", **row} for row in time_all(problems, show)]
        rows.append({"kind": "after", "gpu": setting().get("gpu")})
    else:
        print(NO_GPU)
        rows = [{"kind": "static", **problem.sizes} for problem in problems]
        heads = ["step", "name", "rows", "bytes"]
        cells = [[str(row[name]) for name in ("step", "name", "tokens", "nbytes")] for row in rows]
        show("static figures", heads, cells)
    if options.json:
        save_rows(options.json, [head, *rows])
    return 0
