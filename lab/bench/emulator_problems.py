"""The kernels that the emulator's speed is measured on: one small problem of each family."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernelkit.call.launch import PreparedLaunch, emulation, watching

ROWS = 32  # appended
Launches = list[Callable[[], None]]


@dataclass(frozen=True)
class Problem:
    """name: its sizes. call: the public function, on the CPU."""

    name: str
    call: Callable[[], object]


def launches_of(problem: Problem) -> Launches:
    """What the call launches, each to be made again on the same tensors."""
    found: Launches = []

    def watch(prepared: PreparedLaunch | None, words: list[tuple[torch.Tensor, int]]) -> None:
        if prepared is not None:
            found.append(partial(prepared.launch, [tensor for tensor, _ in words]))

    with watching(watch, launching=False), emulation():
        problem.call()
    return found


def attention(options: argparse.Namespace) -> Problem:
    from fmha import attention
    from lab.problems.fmha import case_of, check

    case = case_of(options)
    check(case)
    call = partial(attention, *case.inputs("cpu"), **case.arguments())
    return Problem(str(case), call)


def decode(_options: argparse.Namespace) -> Problem:
    from gqa_lowlatency import decode

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((1, 1, 16, 128), (1, 1024, 2, 128), (1, 1024, 2, 128))
    )
    return Problem("1,024 keys, heads 16/2, d128, bf16", partial(decode, q, k, v))


def grouped(_options: argparse.Namespace) -> Problem:
    from lab.problems.grouped_gemm import Case
    from moe.api import grouped_gemm

    case = Case((70, 0, 130, 9), k=512, columns=256, out="nvfp4")
    call = partial(grouped_gemm, *case.inputs(), case.offsets, **case.options())
    return Problem("SwiGLU, nvfp4, 209 rows, K 512, N 256", call)


def append(_options: argparse.Namespace) -> Problem:
    from lab.problems.steps import problems_of

    problem, *_ = problems_of("kvcache", ["append"], [ROWS], 0)
    arguments = problem.draw(0, "cpu")
    call = partial(problem.peers[problem.ours], *arguments)
    return Problem(f"{ROWS} rows, {problem.name}", call)


# by the names of `lab.flags.bench.EMULATED`
PROBLEMS = {"fmha": attention, "decode": decode, "grouped": grouped, "append": append}
