"""`bench.py merge`, `moe`, `kvcache` and `dsv4`: compares times of steps with torch and with a
copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.bench.perform import Bench
from lab.measure.timing import MAX_SETS, Sample, measure, replay
from lab.problems.steps import Arguments, Outputs, Problem, problems_of
from lab.report.documents import Document
from lab.report.steps import draw_steps
from lab.tools.tables import Table, markdown, show, table

COPY = "copy"  # the peer that moves as many bytes and does nothing else
COPY_UNIT = 1 << 17
INPUTS = "standard normal, bf16 (logits fp32); experts of a token all alike"
NO_GPU = """\
No CUDA GPU here. Not done: times of the kernels, of torch and of copies, comparison with the
reference. Below are the bytes of each problem."""


class Call:
    """A call that keeps its results until the next one: those of a rotation lie apart."""

    def __init__(self, function: Callable[..., Outputs], arguments: Arguments = ()) -> None:
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


# -- rows -----------------------------------------------------------------------------------------


def rows_of(
    problem: Problem, cache_bytes: int, samples_of: Callable = replay, device: str = "cuda"
) -> list[dict]:
    """A row per peer and for the copy: microseconds of a call, TB/s and what share that is of the
    copy's, or why there is nothing to say."""
    wanted = problem.sets(cache_bytes)
    sets = [problem.draw(seed, device) for seed in range(min(wanted, MAX_SETS))]

    def sampled(name: str, function: Callable[..., Outputs], _: dict) -> dict[str, Sample]:
        if name == problem.ours:
            problem.check(sets[-1], function(*sets[-1]))
        return {"": samples_of([Call(function, arguments) for arguments in sets])}

    samplers = [partial(sampled, *peer) for peer in problem.peers.items()]
    samplers.append(lambda _: {"": samples_of(copies(problem.nbytes, len(sets), device))})
    same = {**problem.sizes, "sets": len(sets), "cold": len(sets) == wanted}
    rows = [{**same, "peer": name} for name in (*problem.peers, COPY)]
    measure(rows, samplers)
    for row in rows:
        if "us" in row:
            row["tbs"] = row["nbytes"] / row["us"] * 1e-6
            row["share"] = rows[-1]["us"] / row["us"]
    return rows


# -- tables and pictures --------------------------------------------------------------------------


COLUMNS = (
    ("peer", "{peer}"), ("us", "{us:.2f}"), ("TB/s", "{tbs:.3f}"), ("of a copy", "{share:.2f}"),
    ("spread", "{spread:.1%}"), ("", lambda row: "" if row["cold"] else "warm"),
)  # fmt: skip
STATIC = (("step", "{step}"), ("name", "{name}"), ("rows", "{tokens}"), ("bytes", "{nbytes}"))


def step_table(rows: Sequence[dict]) -> Table:
    """Table of the rows of one problem: a line per peer."""
    first = rows[0]
    size = f"{first['nbytes'] / 1e6:.3g} MB"
    title = f"{first['step']}: {first['name']}, {_rows(first['tokens'])}, {size}"
    return table(title, COLUMNS, rows)


def page_table(rows: Sequence[dict]) -> str:
    """A line per variant: microseconds of ours for every number of rows, the share of a copy's
    bandwidth with the most, and what the other peers take there."""
    counts = sorted({row["tokens"] for row in rows})
    lines = []
    for step, name in dict.fromkeys((row["step"], row["name"]) for row in rows):
        found = [row for row in rows if (row["step"], row["name"]) == (step, name)]
        ours = found[0]["peer"]
        mine = {row["tokens"]: row for row in found if row["peer"] == ours and "us" in row}
        times = [_us(mine[count]) if count in mine else "-" for count in counts]
        share = f"{mine[counts[-1]]['share']:.2f}" if counts[-1] in mine else "-"
        beside = [
            f"{row['peer']} {_us(row)}"
            for row in found
            if row["peer"] not in (ours, COPY) and row["tokens"] == counts[-1] and "us" in row
        ]
        lines.append([f"{step}: {name}", *times, share, ", ".join(beside) or "-"])
    return markdown(["step", *map(str, counts), "of a copy", "beside it"], lines)


def _rows(count: int) -> str:
    return f"{count} row{'s' * (count != 1)}"


def _us(row: dict) -> str:
    return f"{row['us']:.{1 if row['us'] < 100 else 0}f}"


# -- the command ----------------------------------------------------------------------------------


class Steps(Bench):
    """Steps of one of the families of `lab.flags.steps`."""

    kind = "step"
    selects = ("steps", "names")
    no_gpu = NO_GPU
    static_columns = STATIC

    def problems(self) -> Sequence[Problem]:
        asked = self.options
        return [*problems_of(asked.family, asked.steps, asked.rows, asked.hidden, asked.names)]

    def setting(self) -> dict[str, Any]:
        return {"inputs": INPUTS, "hidden": self.options.hidden}

    def rows(self, problem: Problem) -> list[dict]:
        return rows_of(problem, torch.cuda.get_device_properties().L2_cache_size)

    def show(self, rows: Sequence[dict]) -> None:
        show(*step_table(rows))

    def subject(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["step"], row["name"], row["tokens"]

    def has(self, row: Mapping[str, Any]) -> bool:
        names = self.options.names or [""]
        return row["step"] in self.options.steps and any(name in row["name"] for name in names)

    def markdown(self, rows: Sequence[dict]) -> str:
        return page_table(rows)

    def draw(self, path: Path, document: Document) -> None:
        draw_steps(path, document)


BENCH = Steps
