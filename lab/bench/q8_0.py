"""`bench.py q8_0`: compares kernels that read Q8_0 with a copy, a read, and torch in fp16."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernelkit.compile.arch import ARCH_OF_CAPABILITY
from lab.bench.perform import Bench
from lab.bench.steps import Call, copies
from lab.measure.timing import measure, replay, sets_here
from lab.problems.q8_0 import OURS, Calls, Inputs, Problem, check, problems_of
from lab.tools.tables import show, table
from q8_0 import reference

# Dense int8 TOPS, nominal, by NVIDIA's data sheets: A100, RTX 4090, H100 and H200, B200.
PEAK = {"sm_80": 624.0, "sm_89": 660.6, "sm_90a": 1979.0, "sm_100a": 4500.0}
COPY, READ, TORCH = "copy", "read", "torch fp16"
NO_GPU = """\
No CUDA GPU here. Not done: times of the kernels, of copies, reads and torch, comparison with the
reference. Below are the bytes and operations of each problem."""
COLUMNS = (
    ("peer", "{peer}"), ("us", "{us:.2f}"), ("GB/s", "{gbs:.0f}"), ("of a copy", "{of_copy:.2f}"),
    ("of a read", "{of_read:.2f}"), ("TOPS", "{tops:.1f}"), ("of int8 peak", "{of_peak:.1%}"),
    ("spread", "{spread:.1%}"), ("", lambda row: "" if row["cold"] else "warm"),
)  # fmt: skip
STATIC = (("problem", "{problem}"), ("bytes", "{nbytes}"), ("operations", "{operations}"))


def calls_of(problem: Problem, inputs: Inputs) -> Calls:
    """Return the calls by peer: each layout of ours, and torch if the problem has a product."""
    found = inputs.calls(problem)
    if problem.operations:
        dense = reference.dequantise(next(iter(inputs.weights.values())), torch.float16)
        half = inputs.x.half()
        found[TORCH] = lambda: torch.nn.functional.linear(half, dense)
    return found


def reads(nbytes: int, count: int, device: str) -> list[Callable[[], object]]:
    """Reads of so many bytes by torch's fastest reduction, see lab.bench.gqa."""
    sources = [torch.zeros(-(-nbytes // 8), dtype=torch.int64, device=device) for _ in range(count)]
    return [source.amax for source in sources]


def rows_of(
    problem: Problem, count: int, samples_of: Callable = replay, device: str = "cuda"
) -> list[dict]:
    """A row per peer. count: buffer sets of the rotation."""
    sets = [Inputs.drawn(problem, seed, device) for seed in range(count)]
    calls = [calls_of(problem, inputs) for inputs in sets]

    def sampler(peer: str) -> Callable[[dict], dict]:
        def sample(_: dict) -> dict:
            if peer in (*problem.layouts, OURS):
                check(problem, sets[-1], peer, calls[-1][peer]())
            return {"": samples_of([Call(call[peer]) for call in calls])}

        return sample

    samplers = [sampler(peer) for peer in calls[0]]
    samplers.append(lambda _: {"": samples_of(copies(problem.nbytes, count, device))})
    samplers.append(lambda _: {"": samples_of(reads(problem.nbytes, count, device))})
    same = {**problem.sizes, "sets": count, "cold": device == "cuda" and _is_cold(problem)}
    rows = [{**same, "peer": peer} for peer in (*calls[0], COPY, READ)]
    measure(rows, samplers)
    copy, read = rows[-2:]
    for row in rows:
        with_figures(row, copy.get("us"), read.get("us"))
    return rows


def with_figures(row: dict, copy_us: float | None, read_us: float | None) -> None:
    """Adds what follows from a time."""
    if "us" not in row:
        return
    row["gbs"] = row["nbytes"] / row["us"] * 1e-3
    if copy_us:
        row["of_copy"] = copy_us / row["us"]
    if read_us:
        row["of_read"] = read_us / row["us"]
    if row["operations"] and row["peer"] not in (COPY, READ):
        row["tops"] = row["operations"] / row["us"] * 1e-6
        peak = PEAK.get(_arch())
        if peak and row["peer"] != TORCH:
            row["of_peak"] = row["tops"] / peak


def _arch() -> str:
    if not torch.cuda.is_available():
        return ""
    return ARCH_OF_CAPABILITY.get(torch.cuda.get_device_capability(), "")


def _is_cold(problem: Problem) -> bool:
    cache = torch.cuda.get_device_properties().L2_cache_size
    return sets_here(problem.weight_bytes) * problem.weight_bytes > cache


class Products(Bench):
    """Kernels that read Q8_0."""

    kind = "q8_0"
    no_gpu = NO_GPU
    static_columns = STATIC

    def problems(self) -> Sequence[Problem]:
        return [*problems_of(self.options)]

    def setting(self) -> dict[str, Any]:
        return {"inputs": "uniform quants, x standard normal"}

    def rows(self, problem: Problem) -> list[dict]:
        nbytes = problem.nbytes if problem.operation == "quantise" else problem.weight_bytes
        return rows_of(problem, sets_here(nbytes))

    def show(self, rows: Sequence[dict]) -> None:
        show(*table(rows[0]["problem"], COLUMNS, rows))

    def subject(self, row: Mapping[str, Any]) -> str:
        return row["problem"]


BENCH = Products
