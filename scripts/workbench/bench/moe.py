"""What bench_moe.py does: times of the steps, beside torch and a copy of as many bytes."""

from __future__ import annotations

import argparse
import datetime
import gc
import sys
from collections.abc import Callable, Iterable

import torch

from workbench.bench.gqa import Sample, replay, spreads
from workbench.bench.gqa_tables import show
from workbench.bench.moe_tables import COPY, by_problem, draw, markdown, step_table
from workbench.cases.moe_steps import INPUTS, Arguments, Outputs, Problem, problems_of
from workbench.common import read_rows, save_rows
from workbench.timing import setting

MAX_SETS = 128
COPY_UNIT = 1 << 17
NO_GPU = """\
No CUDA GPU here. Not done: times of the steps, of torch and of copies, comparison with the
reference. Below are the bytes of each problem."""


class Call:
    """A call that keeps its results until the next one: those of a rotation lie apart."""

    def __init__(self, function: Callable[..., Outputs], arguments: Arguments) -> None:
        self.function, self.arguments = function, arguments
        self.results: Outputs | None = None

    def __call__(self) -> None:
        self.results = self.function(*self.arguments)


def copies(nbytes: int, count: int, device: str) -> list[Callable[[], object]]:
    """Copies that read and write half of `nbytes` each, rounded up to COPY_UNIT where that is
    little: the copies of odd sizes are slower."""
    unit = COPY_UNIT if nbytes > 50 * COPY_UNIT else 16
    half = -(-nbytes // (2 * unit)) * unit
    pairs = [
        [torch.empty(half, dtype=torch.uint8, device=device) for _ in range(2)]
        for _ in range(count)
    ]
    return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]


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
            if name == "moe":
                problem.check(sets[-1], function(*sets[-1]))
            samples[name] = samples_of([Call(function, arguments) for arguments in sets])
        except Exception as refusal:  # noqa: BLE001  torch runs out of memory as it likes
            reason = str(refusal).strip().partition("\n")[0]
            rows[name]["refused"] = f"{type(refusal).__name__}: {reason}"
    samples[COPY] = samples_of(copies(problem.nbytes, len(sets), device))
    rows[COPY] = {**rows["moe"], "peer": COPY}
    rows[COPY].pop("refused", None)
    return with_shares(rows, dict(zip(samples, spreads([*samples.values()]), strict=True)))


def with_shares(rows: dict[str, dict], found: dict) -> list[dict]:
    """Rows with times; share: of the bandwidth of the copy."""
    for name, spread in found.items():
        rows[name] |= {"us": spread.median, "spread": spread.spread}
        rows[name]["tbs"] = rows[name]["nbytes"] / spread.median * 1e-6
        rows[name]["share"] = found[COPY].median / spread.median
    return [*rows.values()]


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


def earlier_rows(options: argparse.Namespace) -> list[dict]:
    """What options ask for of the file of an earlier run, whose setting is printed."""
    head, *found = read_rows(options.show)
    gpu = head.get("gpu", {}).get("name", "no GPU")
    rows = [row for row in found if row["kind"] == "step" and row["step"] in options.steps]
    if options.names:
        rows = [row for row in rows if any(name in row["name"] for name in options.names)]
    print(f"{gpu}, {head['date']}, microseconds")
    return rows


def show_again(options: argparse.Namespace) -> None:
    """Tables of the file of an earlier run."""
    rows = earlier_rows(options)
    if options.markdown:
        print(markdown(rows))
    else:
        for group in by_problem(rows):
            show(*step_table(group))
    if options.plot:
        draw(options.plot, rows)


def perform(options: argparse.Namespace) -> int:
    """What the flags ask for; returns the exit code."""
    if options.show:
        show_again(options)
        return 0
    try:
        problems = problems_of(options.steps, options.tokens, options.hidden, options.names)
    except ValueError as error:
        sys.exit(f"refused: {error}")
    head = {"kind": "setting", "date": datetime.date.today().isoformat(), "inputs": INPUTS}
    head |= {"hidden": options.hidden, **setting()}
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        rows = [{"kind": "step", **row} for row in time_all(problems, show)]
        if options.plot:
            draw(options.plot, rows)
        rows.append({"kind": "after", "gpu": setting().get("gpu")})
    else:
        print(NO_GPU)
        rows = [{"kind": "static", **problem.sizes} for problem in problems]
        heads = ["step", "name", "tokens", "bytes"]
        cells = [[str(row[name]) for name in ("step", "name", "tokens", "nbytes")] for row in rows]
        show("static figures", heads, cells)
    if options.json:
        save_rows(options.json, [head, *rows])
    return 0
