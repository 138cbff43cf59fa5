"""Calls that `bench.py toolchains` compares: one or two of every family, each with its check.

A case makes the same inputs in every process. Its kernels are known without a GPU: on the CPU the
call runs on tensors without contents, and only says what it would compile.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import moe
from fmha import attention
from fmha.config import AttentionConfig
from gqa_lowlatency import decode, decode_plan
from kernelkit.call.launch import emulation
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from lab.bench import fmha_peers, gqa_peers
from lab.bench.gqa_peers import MAX_ERROR, error_of
from lab.bench.steps import Call
from lab.problems import mixed_gemm, q8_0
from lab.problems.attention import DTYPES
from lab.problems.steps import problems_of

Launch = Callable[[], object]
SETS = 4  # of buffers, between which the launches of a case alternate


class Case(ABC):
    """A call of ours.

    family: package of its kernels.
    name: what is called, with its sizes.
    """

    family: str
    name: str

    @abstractmethod
    def describe(self, arch: str) -> None:
        """Make the call on CPU tensors without contents, as if for a GPU of that architecture."""

    @abstractmethod
    def launches(self, device: str = "cuda") -> Sequence[Launch]:
        """Return launches, one for each set of buffers, after the result of one of them was
        compared with the reference. Raises ValueError for a wrong result."""

    def keys(self, arch: str) -> list[KernelKey]:
        """Return the keys of its kernels and of those that make its inputs; NotImplementedError
        where there is none for `arch`."""
        with emulation(arch=arch), collecting() as keys:
            self.describe(arch)
        return [*dict.fromkeys(keys)]


def require_close(found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Raise ValueError unless the worst row's error norm is within `limit` of its norm."""
    error = error_of(found, expected)
    if not error <= limit:
        raise ValueError(f"wrong: the worst row is off by {error:.3g} of its norm, limit {limit}")


# -- attention and decode -------------------------------------------------------------------------


@dataclass(frozen=True)
class Attend(Case):
    """Attention. instructions: '' or 'mma.sync', as of `AttentionConfig`."""

    problem: fmha_peers.Problem
    instructions: str = ""
    family = "fmha"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"attention{' mma.sync' * bool(self.instructions)}, {self.problem}"

    def _call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        config = AttentionConfig(instructions=self.instructions)
        return attention(q, k, v, causal=self.problem.causal, config=config)

    def describe(self, arch: str) -> None:
        it = self.problem
        keys = (it.batch, it.skv, it.kv_heads)
        kv = DTYPES[it.kv_dtype or it.dtype]
        q = torch.empty(it.batch, it.sq, it.q_heads, it.head_dim, dtype=DTYPES[it.dtype])
        self._call(q, *(torch.empty(*keys, n, dtype=kv) for n in (it.head_dim, it.v_dim)))

    def launches(self, device: str = "cuda") -> Sequence[Launch]:
        sets = [fmha_peers.inputs_of(self.problem, device, seed) for seed in range(SETS // 2)]
        first = sets[0]
        found = self._call(first.q, first.k, first.v)
        for head in (0, self.problem.q_heads - 1):
            rows, expected = self._some(first, head)
            limit = MAX_ERROR[self.problem.kv_dtype or self.problem.dtype]
            require_close(found[0, rows, head].double(), expected, limit)
        return [partial(self._call, each.q, each.k, each.v) for each in sets]

    def _some(self, given: fmha_peers.Inputs, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(positions of some queries of the first entry, their O in fp64)."""
        it = self.problem
        rows = torch.arange(0, it.sq, 61, device=given.q.device)
        group = it.q_heads // it.kv_heads
        q, k, v = (
            tensor[0, :, which].double()
            for tensor, which in (
                (given.q, head),
                (given.k, head // group),
                (given.v, head // group),
            )
        )
        scores = q[rows] @ k.T * it.head_dim**-0.5
        if it.causal:
            keys = torch.arange(it.skv, device=rows.device)
            seen = keys <= rows[:, None] + it.skv - it.sq
            scores = scores.masked_fill(~seen, -math.inf)
        return rows, torch.softmax(scores, -1) @ v


@dataclass(frozen=True)
class Decode(Case):
    """Decode of one token."""

    problem: gqa_peers.Problem
    family = "gqa_lowlatency"

    @property
    def name(self) -> str:  # type: ignore[override]
        it = self.problem
        heads = f"heads {it.q_heads}/{it.kv_heads} of {it.head_dim}"
        return f"decode, {it.batch} x {it.kv_len} keys, {heads}, {it.dtype}"

    def describe(self, arch: str) -> None:
        q_dtype, kv_dtype = gqa_peers.DTYPES[self.problem.dtype]
        it = self.problem
        q = torch.empty(it.batch, it.q_heads, it.head_dim, dtype=q_dtype)
        shape = it.batch, it.kv_len, it.kv_heads, it.head_dim
        k, v = (torch.empty(shape, dtype=kv_dtype) for _ in range(2))
        decode(q, k, v)

    def launches(self, device: str = "cuda") -> Sequence[Launch]:
        sets = [self.problem.inputs(device, seed) for seed in range(SETS)]
        plan = decode_plan(*sets[0])
        found = plan(*sets[0])[0]
        require_close(found, gqa_peers.reference(sets[0]), MAX_ERROR[self.problem.dtype])
        return [lambda each=each: plan(*each) for each in sets]  # type: ignore[misc]


# -- experts --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixed(Case):
    """A product of tokens in bf16 and weights in four bits."""

    case: mixed_gemm.Case
    family = "moe"

    @property
    def name(self) -> str:  # type: ignore[override]
        it = self.case
        sizes = f"{len(it.counts)} experts of {it.counts[0]} rows, {it.k} x {it.rows_of_w}"
        return f"mixed GEMM, {sizes}, {it.fmt}"

    def describe(self, arch: str) -> None:
        it = replace(self.case, arch=arch)
        tokens = torch.empty(it.rows, it.k, dtype=torch.bfloat16)
        w = mixed_gemm.empty_fragments(
            len(it.counts), it.rows_of_w, it.k, it.fmt, swiglu=it.form is not None
        )
        w = replace(w, data=torch.empty_like(w.data, device="cpu"),
                    factor=torch.empty_like(w.factor, device="cpu"))  # fmt: skip
        bias = torch.empty(len(it.counts), it.rows_of_w) if it.bias else None
        offsets = torch.tensor([0, *it.counts]).cumsum(0).int()
        moe.mixed_gemm(tokens, w, offsets, bias=bias, **it.options())

    def launches(self, device: str = "cuda") -> Sequence[Launch]:
        case = replace(self.case, arch=None)  # type: ignore[arg-type]
        inputs = self.case.inputs(device)
        found = mixed_gemm.call(case, inputs)
        exact = mixed_gemm.definition(self.case, inputs, torch.float64)
        require_close(found.double(), exact, MAX_ERROR["bf16"])
        copies = [replace(inputs.w, data=inputs.w.data.clone()) for _ in range(SETS - 1)]
        sets = [inputs, *(replace(inputs, w=w) for w in copies)]
        return [partial(mixed_gemm.call, case, each) for each in sets]


# -- the others -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product(Case):
    """An operation with weights in Q8_0."""

    problem: q8_0.Problem
    family = "q8_0"

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"Q8_0, {self.problem}"

    def describe(self, arch: str) -> None:
        for call in q8_0.Inputs.empty(self.problem).calls(self.problem, arch=arch).values():
            call()

    def launches(self, device: str = "cuda") -> Sequence[Launch]:
        found = []
        for seed in range(SETS):
            drawn = self.problem.draw(seed, device)
            for name, call in drawn.calls(self.problem).items():
                if not seed:
                    q8_0.check(self.problem, drawn, name, call())
                found.append(Call(call))
        return found


@dataclass(frozen=True)
class Step(Case):
    """The first problem of `lab.problems.steps` with these words in its name."""

    family: str
    step: str
    rows: int
    words: str
    hidden: int = 4096

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self.problem)

    @property
    def problem(self) -> Any:
        of = {"mla": "dsv4", "kernelkit": "merge"}.get(self.family, self.family)
        return problems_of(of, [self.step], [self.rows], self.hidden, [self.words])[0]

    def describe(self, arch: str) -> None:
        problem = self.problem
        problem.peers[problem.ours](*problem.draw(0, "cpu"))

    def launches(self, device: str = "cuda") -> Sequence[Launch]:
        problem, found = self.problem, []
        ours = problem.peers[problem.ours]
        for seed in range(SETS):
            drawn = problem.draw(seed, device)
            if not seed:
                problem.check(drawn, ours(*drawn))
            found.append(Call(ours, drawn))
        return found


def _square(head_dim: int, **more: Any) -> fmha_peers.Problem:
    heads = fmha_peers.COLUMNS // head_dim
    return fmha_peers.Problem(2, 8192, 8192, heads, heads, head_dim, head_dim, causal=True, **more)


_LATENT = fmha_peers.Problem(1, 4096, 4096, 64, 1, 512, 512, causal=True)
_SWIGLU = (1.702, 1.0, 7.0)
_GPT_OSS = {"k": 2880, "columns": 2880, "form": _SWIGLU, "bias": True}
_ONE, _MANY = (
    q8_0.Problem(operation, 8192, 8192, tokens, ("soa",))
    for operation, tokens in (("matvec", 1), ("product", 1024))
)
CASES: tuple[Case, ...] = (
    Attend(_square(64)),
    Attend(_square(128)),
    Attend(_square(256)),
    Attend(_LATENT),
    Attend(_square(128, dtype="e4m3")),
    Attend(_square(128), "mma.sync"),
    Decode(gqa_peers.Problem(8, 8192, 64, 8, 128, "bf16")),
    Decode(gqa_peers.Problem(8, 8192, 64, 8, 128, "e4m3")),
    Mixed(mixed_gemm.Case((4,) * 4, **_GPT_OSS)),  # type: ignore[arg-type]
    Mixed(mixed_gemm.Case((1024,) * 4, **_GPT_OSS)),  # type: ignore[arg-type]
    Product(_ONE),
    Product(_MANY),
    Step("kvcache", "append", 8192, "fp8_584"),
    Step("kvcache", "gather", 8192, "fp8_584"),
    Step("mla", "score", 1024, "fp4"),
    Step("mla", "compress", 1024, "C4, fp8_584"),
    Step("moe", "combine", 4096, "bf16"),
    Step("kernelkit", "merge", 8192, "4 parts of head_dim 128, stack"),
)
