"""Runs a rung of the ladder in the emulator: is it right, is it clean, what overlaps with what."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernelkit.call.launch import Target, emulation, launch
from kernelkit.compile.compiler import compile_once
from kernelkit.compile.kernel import CompiledKernel
from kernelkit.numerics import tolerance
from masks import MASKS, Mask
from pieces import HEAD_DIM, example_arguments
from ptxemu.check.text import render
from ptxemu.options import Options
from ptxemu.report import Report
from ptxemu.trace import Trace


@dataclass(frozen=True)
class Problem:
    """Random q, k and v, [1, length, heads, 64]; scale is 1 / sqrt(64)."""

    q_len: int = 128
    kv_len: int = 1024
    heads: int = 1
    mask: str = "full"

    scale = HEAD_DIM**-0.5

    def inputs(self) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        lengths = (self.q_len, self.kv_len, self.kv_len)
        shapes = ((1, length, self.heads, HEAD_DIM) for length in lengths)
        return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def reference(problem: Problem, *, exact: bool) -> torch.Tensor:
    """O by the definition: in fp64, or rounded where the kernels round (fp32, and P to bf16)."""
    kind = torch.float64 if exact else torch.float32
    q, k, v = (tensor[0].transpose(0, 1).to(kind) for tensor in problem.inputs())
    scores = problem.scale * q @ k.transpose(1, 2)
    mask: Mask | None = MASKS[problem.mask]
    if mask is not None:
        queries, keys = torch.arange(problem.q_len)[:, None], torch.arange(problem.kv_len)
        scores = scores.masked_fill(~mask(queries, keys), -math.inf)
    top = scores.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    weights = (scores - top).exp()
    rounded = weights if exact else weights.bfloat16().float()
    sums = weights.sum(-1, keepdim=True)
    o = torch.where(sums > 0, rounded @ v / sums, 0.0).transpose(0, 1)[None]
    return o if exact else o.bfloat16().to(kind)


def compiled(rung: type, mask: str) -> CompiledKernel:
    """The kernel of a rung for any lengths, heads, batch and strides."""

    def describe() -> tuple:
        return rung(MASKS[mask]), *example_arguments()

    return compile_once((rung.__name__, mask), "sm_100a", describe)


def run(rung: type, problem: Problem, options: Options) -> tuple[torch.Tensor, Report]:
    """O, poisoned with NaN before, and what the emulator says of the launch."""
    q, k, v = problem.inputs()
    o = torch.full_like(q, math.nan)
    with emulation(options) as emulated:
        arguments = (q, k, v, o, problem.scale)
        launch(compiled(rung, problem.mask), arguments, Target("emulate", "sm_100a"), q.device)
    (report,) = emulated.reports
    return o, report


def judge(problem: Problem, o: torch.Tensor) -> tolerance.Report:
    """O against fp64, within twice the error that the same roundings make in the reference."""
    exact, rounded = reference(problem, exact=True), reference(problem, exact=False)
    return tolerance.compare_output(o, exact, rounded, o.dtype)


@dataclass(frozen=True)
class Overlap:
    """Nominal cycles of the first CTA: its duration, and the busy time of each unit."""

    cycles: float
    tma: float
    tensor_core: float
    warps: float  # at least one of them computed

    @property
    def units(self) -> float:
        """Average number of the three units that are busy at a time."""
        return (self.tma + self.tensor_core + self.warps) / self.cycles


def overlap(trace: Trace) -> Overlap:
    """Return the overlap of the units in the timeline of the first CTA.

    The timeline is a model, not a prediction of hardware time: an instruction costs a cycle, a copy
    a latency and its bytes over a rate, a product its operations over a rate.
    """
    spans = [span for span in trace.spans if span.cta == trace.ctas()[0]]

    def busy(category: str) -> float:
        """Length of the union of the spans."""
        total, reached = 0.0, 0.0
        for span in sorted(spans, key=lambda span: span.start):
            if span.category == category and span.end > reached:
                total += span.end - max(span.start, reached)
                reached = span.end
        return total

    return Overlap(max(s.end for s in spans), busy("tma"), busy("mma"), busy("compute"))


def main(rung: type, argv: Sequence[str] | None = None) -> int:
    """The command line of a rung; returns 0 where it is right and the checker has no finding."""
    parser = argparse.ArgumentParser(description=f"{rung.__name__}: {rung.__doc__}")
    parser.add_argument("--q-len", type=int, default=128, help="queries")
    parser.add_argument("--kv-len", type=int, default=1024, help="keys")
    parser.add_argument("--heads", type=int, default=1, help="heads, a CTA for each")
    parser.add_argument("--mask", choices=MASKS, default="full", help="one of masks.py")
    parser.add_argument("--trace", type=Path, help="write the timeline, for ui.perfetto.dev")
    flags = parser.parse_args(argv)
    problem = Problem(flags.q_len, flags.kv_len, flags.heads, flags.mask)
    names = {
        warp: role.name
        for role in rung.plan.roles.roles
        for warp in range(role.first_warp, role.last_warp + 1)
    }
    o, report = run(rung, problem, Options(check=True, trace=True, limit=None, roles=names))
    verdict, seen = judge(problem, o), overlap(report.launches[0].trace)
    print(f"{rung.__name__}: {problem}")
    print(f"  result    {verdict}")
    print(f"  checker   {len(report.errors)} findings")
    print(f"  executed  {report.warp_instructions:,} warp-instructions")
    print(f"  timeline  {seen.cycles:,.0f} nominal cycles of a CTA, modelled, not hardware time:")
    for name, busy in (("TMA", seen.tma), ("tensor core", seen.tensor_core), ("warps", seen.warps)):
        print(f"            {name:<12} busy {busy:>8,.0f}, {busy / seen.cycles:4.0%}")
    print(f"            {seen.units:.2f} of the three busy at a time")
    if report.findings:
        print(render(report))
    if flags.trace:
        report.launches[0].trace.to_perfetto(flags.trace)
    return 0 if verdict.ok and not report.errors else 1
