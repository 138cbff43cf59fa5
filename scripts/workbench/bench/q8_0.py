"""What `bench.py q8_0` does: kernels that read Q8_0 beside a copy, a read, and torch in fp16."""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from kernelkit.arch import ARCH_OF_CAPABILITY
from q8_0 import Weights, dequantise, matvec, quantise, reference, repack
from q8_0.blocks import BLOCK, SOA
from q8_0.config import MOST_TOKENS
from workbench.bench.steps import copies
from workbench.common import read_rows, save_rows
from workbench.tables import show, table
from workbench.timing import heading, measure, replay, sets_here, setting

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
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Problem:
    """One operation on one matrix. tokens: 0 where there are none."""

    operation: str
    rows: int
    cols: int
    tokens: int
    layouts: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """In Q8_0."""
        return self.rows * self.cols // BLOCK * 34

    @property
    def nbytes(self) -> int:
        """That have to be read and written, each once, with results in bf16."""
        numbers = 2 * self.tokens * self.cols
        if self.operation == "repack":
            return 2 * self.weight_bytes
        if self.operation == "dequantise":
            return self.weight_bytes + 2 * self.rows * self.cols
        if self.operation == "quantise":
            return numbers + self.tokens * self.cols // BLOCK * 34
        if self.operation in ("integer", "product"):
            numbers = self.tokens * self.cols // BLOCK * 34
        return self.weight_bytes + numbers + 2 * self.tokens * self.rows

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        multiplies = self.operation in ("matvec", "integer", "product")
        return 2 * self.rows * self.cols * self.tokens * multiplies

    def __str__(self) -> str:
        tokens = f", {self.tokens} token{'s' * (self.tokens != 1)}" if self.tokens else ""
        return f"{self.operation} {self.rows} x {self.cols}{tokens}"


def problems_of(options: argparse.Namespace) -> Iterator[Problem]:
    """All that the options ask for."""
    layouts = tuple(options.layouts)
    for operation, (rows, cols) in itertools.product(options.operations, options.shapes):
        for tokens in options.tokens if operation not in ("repack", "dequantise") else (0,):
            few = tokens <= MOST_TOKENS
            if operation == "quantise" or few == (operation != "product") or not tokens:
                yield Problem(operation, rows, cols, tokens, layouts)


class Inputs:
    """A buffer set: weights in both layouts, activations, and what torch has of them."""

    def __init__(self, problem: Problem, seed: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        shape = problem.rows, problem.cols
        quants = torch.randint(-127, 128, shape, generator=generator, device=device).char()
        scales = torch.rand(problem.rows, problem.cols // BLOCK, generator=generator, device=device)
        scales = (scales * 0.01 + 0.001).half()
        self.weights: dict[str, Weights] = {
            layout: reference.packed(quants, scales, layout) for layout in problem.layouts
        }
        tokens = max(problem.tokens, 1)
        x = torch.randn(tokens, problem.cols, generator=generator, device=device)
        self.x, self.half = x.bfloat16(), x.half()
        self.rounded = reference.quantise(self.x)

    def calls(self, problem: Problem) -> Calls:
        """By peer: each layout of ours, and torch where it does the same."""
        one = {
            "repack": lambda w: repack(w, "interleaved" if w.layout == SOA else SOA).data,
            "dequantise": lambda w: dequantise(w, torch.bfloat16),
            "matvec": lambda w: matvec(w, self.x),
            "integer": lambda w: matvec(w, self.rounded, out_dtype=torch.bfloat16),
            "product": lambda w: _product(w, self.rounded),
        }
        if problem.operation == "quantise":
            return {"q8_0": lambda: quantise(self.x)}
        run = one[problem.operation]
        found: Calls = {layout: lambda w=w: run(w) for layout, w in self.weights.items()}
        if problem.operations:
            dense = reference.dequantise(next(iter(self.weights.values())), torch.float16)
            found[TORCH] = lambda: torch.nn.functional.linear(self.half, dense)
        return found


def _product(weights: Weights, x: Any) -> torch.Tensor:
    product = import_module("q8_0.product.launch").product
    return product(weights, x, out_dtype=torch.bfloat16)


def check(problem: Problem, inputs: Inputs, layout: str, result: Any) -> None:
    """ValueError where a result of ours is wrong."""
    if problem.operation == "quantise":
        expected = reference.quantise(inputs.x)
        pairs = [(result.quants, expected.quants), (result.scales, expected.scales)]
    elif problem.operation == "repack":
        weights = inputs.weights[layout]
        other = "interleaved" if layout == SOA else SOA
        pairs = [(result, reference.repack(weights, other).data)]
    elif problem.operation == "dequantise":
        pairs = [(result, reference.dequantise(inputs.weights[layout], torch.bfloat16))]
    else:
        pairs = []
        x = inputs.x if problem.operation == "matvec" else inputs.rounded
        exact = reference.matvec(inputs.weights[layout], x)
        error = (result.double() - exact).abs().amax() / exact.abs().amax()
        if not error < 2.0**-8:
            raise ValueError(f"wrong: {error:.1e} of the largest result off fp64")
    if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
        raise ValueError("wrong: other bits than the reference's")


def reads(nbytes: int, count: int, device: str) -> list[Callable[[], object]]:
    """Reads of so many bytes by torch's fastest reduction, see workbench.bench.gqa."""
    sources = [torch.zeros(-(-nbytes // 8), dtype=torch.int64, device=device) for _ in range(count)]
    return [source.amax for source in sources]


class _Kept:
    """A call that keeps its result until the next one, so that a rotation's lie apart."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call, self.result = call, None

    def __call__(self) -> None:
        self.result = self.call()


def rows_of(
    problem: Problem, count: int, samples_of: Callable = replay, device: str = "cuda"
) -> list[dict]:
    """A row per peer. count: buffer sets of the rotation."""
    sets = [Inputs(problem, seed, device) for seed in range(count)]
    calls = [inputs.calls(problem) for inputs in sets]

    def sampler(peer: str) -> Callable[[dict], dict]:
        def sample(_: dict) -> dict:
            if peer in (*problem.layouts, "q8_0"):
                check(problem, sets[-1], peer, calls[-1][peer]())
            return {"": samples_of([_Kept(call[peer]) for call in calls])}

        return sample

    samplers = [sampler(peer) for peer in calls[0]]
    samplers.append(lambda _: {"": samples_of(copies(problem.nbytes, count, device))})
    samplers.append(lambda _: {"": samples_of(reads(problem.nbytes, count, device))})
    same = {**sizes_of(problem), "sets": count, "cold": device == "cuda" and _is_cold(problem)}
    rows = [{**same, "peer": peer} for peer in (*calls[0], COPY, READ)]
    measure(rows, samplers)
    copy, read = rows[-2:]
    for row in rows:
        with_figures(row, copy.get("us"), read.get("us"))
    return rows


def sizes_of(problem: Problem) -> dict[str, Any]:
    """What a row says of a problem."""
    names = ("operation", "rows", "cols", "tokens", "nbytes", "operations")
    return {"problem": str(problem), **{name: getattr(problem, name) for name in names}}


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


def time_all(problems: Sequence[Problem]) -> list[dict]:
    """Rows of all problems; each is shown when it is done."""
    rows: list[dict] = []
    for problem in problems:
        gc.collect()
        torch.cuda.empty_cache()
        nbytes = problem.nbytes if problem.operation == "quantise" else problem.weight_bytes
        found = rows_of(problem, sets_here(nbytes))
        show(*table(str(problem), COLUMNS, found))
        rows += found
    return rows


def show_again(options: argparse.Namespace) -> None:
    """The tables of an earlier run's file."""
    head, *found = read_rows(options.show)
    print(f"{head.get('gpu', {}).get('name', 'no GPU')}, {head['date']}")
    rows = [row for row in found if row["kind"] == "q8_0"]
    for name, group in itertools.groupby(rows, key=lambda row: row["problem"]):
        show(*table(name, COLUMNS, group))


def perform(options: argparse.Namespace) -> int:
    """Returns the exit code."""
    if options.show:
        show_again(options)
        return 0
    problems, head = [*problems_of(options)], heading(inputs="uniform quants, x standard normal")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
        rows = [{"kind": "q8_0", **row} for row in time_all(problems)]
        rows.append({"kind": "after", "gpu": setting().get("gpu")})
    else:
        print(NO_GPU)
        rows = [{"kind": "static", **sizes_of(problem)} for problem in problems]
        show(*table("static figures", STATIC, rows))
    if options.json:
        save_rows(options.json, [head, *rows])
    return 0
