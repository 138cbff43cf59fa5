"""Problems of `q8_0`: an operation on a matrix, its inputs, calls of ours, and what is right."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from q8_0 import Activations, Weights, dequantise, matvec, quantise, reference, repack
from q8_0.blocks import BLOCK, INTERLEAVED, SOA, blocks_of
from q8_0.config import MOST_TOKENS
from q8_0.product.launch import product
from q8_0.weights import empty

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
OURS = "q8_0"  # the peer of an operation that reads no weights
PRODUCTS = ("matvec", "integer", "product")
LARGEST_ERROR = 2.0**-8  # of a product, over the largest result: half a step of bf16 is 2^-9
Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Problem:
    """One operation on one matrix. tokens: 0 where there are none. dtype: of numbers, x and results
    alike. bias: of a product."""

    operation: str
    rows: int
    cols: int
    tokens: int
    layouts: tuple[str, ...]
    dtype: str = "bf16"
    bias: bool = False

    @property
    def weight_bytes(self) -> int:
        """In Q8_0."""
        return self.rows * self.cols // BLOCK * 34

    @property
    def nbytes(self) -> int:
        """That have to be read and written, each once."""
        size = DTYPES[self.dtype].itemsize
        numbers = size * self.tokens * self.cols
        if self.operation == "repack":
            return 2 * self.weight_bytes
        if self.operation == "dequantise":
            return self.weight_bytes + size * self.rows * self.cols
        if self.operation == "quantise":
            return numbers + self.tokens * self.cols // BLOCK * 34
        if self.operation in ("integer", "product"):
            numbers = self.tokens * self.cols // BLOCK * 34
        results = size * (self.tokens + self.bias) * self.rows
        return self.weight_bytes + numbers + results

    @property
    def operations(self) -> int:
        """Multiplications and additions."""
        return 2 * self.rows * self.cols * self.tokens * (self.operation in PRODUCTS)

    @property
    def sizes(self) -> dict[str, Any]:
        """What a row says of it."""
        names = ("operation", "rows", "cols", "tokens", "nbytes", "operations")
        return {"problem": str(self), **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        tokens = f", {self.tokens} token{'s' * (self.tokens != 1)}" if self.tokens else ""
        return f"{self.operation} {self.rows} x {self.cols}{tokens}"


def problems_of(options: argparse.Namespace) -> Iterator[Problem]:
    """All that the options ask for."""
    kind = {name: getattr(options, name) for name in ("dtype", "bias") if hasattr(options, name)}
    layouts = tuple(options.layouts)
    for operation, (rows, cols) in itertools.product(options.operations, options.shapes):
        for tokens in options.tokens if operation not in ("repack", "dequantise") else (0,):
            few = tokens <= MOST_TOKENS
            if operation == "quantise" or few == (operation != "product") or not tokens:
                own = kind | {"bias": kind.get("bias", False) and operation in PRODUCTS}
                yield Problem(operation, rows, cols, tokens, layouts, **own)


def some_of(options: argparse.Namespace) -> list[Problem]:
    """The same; ValueError for none, and for columns that there are not."""
    found = [*problems_of(options)]
    for problem in found:
        blocks_of(problem.cols)
    if not found:
        asked = " ".join(options.operations)
        raise ValueError(f"no problem of {asked}: up to {MOST_TOKENS} tokens are no product's")
    return found


@dataclass(frozen=True)
class Inputs:
    """A buffer set: weights by layout, activations as numbers and in Q8_1, a bias."""

    weights: dict[str, Weights]
    x: torch.Tensor
    rounded: Activations
    bias: torch.Tensor | None

    @classmethod
    def drawn(cls, problem: Problem, seed: int, device: str) -> Inputs:
        """Uniform quants, x standard normal."""
        generator = torch.Generator(device).manual_seed(seed)
        how: dict[str, Any] = {"generator": generator, "device": device}
        quants = torch.randint(-127, 128, (problem.rows, problem.cols), **how).char()
        scales = torch.rand(problem.rows, problem.cols // BLOCK, **how)
        scales = (scales * 0.01 + 0.001).half()
        weights = {layout: reference.packed(quants, scales, layout) for layout in problem.layouts}
        dtype = DTYPES[problem.dtype]
        x = torch.randn(max(problem.tokens, 1), problem.cols, **how).to(dtype)
        bias = torch.randn(problem.rows, **how).to(dtype) if problem.bias else None
        return cls(weights, x, reference.quantise(x), bias)

    @classmethod
    def empty(cls, problem: Problem) -> Inputs:
        """Without contents, to ask which kernels there are; on the CPU, since on the device 'meta'
        no operator gets as far as its kernel."""
        tokens, rows, cols = max(problem.tokens, 1), problem.rows, problem.cols
        dtype = DTYPES[problem.dtype]
        weights = {layout: empty(rows, cols, layout) for layout in problem.layouts}
        scales = torch.empty(tokens, cols // BLOCK, dtype=torch.float16)
        rounded = Activations(torch.empty(tokens, cols, dtype=torch.int8), scales)
        bias = torch.empty(rows, dtype=dtype) if problem.bias else None
        return cls(weights, torch.empty(tokens, cols, dtype=dtype), rounded, bias)

    def calls(self, problem: Problem, **place: str | None) -> Calls:
        """Of ours, by layout, or OURS. place: backend and arch."""
        out = DTYPES[problem.dtype]
        of_integers: dict[str, Any] = {"out_dtype": out, **place}
        one: dict[str, Callable[[Weights], Any]] = {
            "repack": lambda w: repack(w, other_than(w.layout), **place).data,
            "dequantise": lambda w: dequantise(w, out, **place),
            "matvec": lambda w: matvec(w, self.x, self.bias, **place),
            "integer": lambda w: matvec(w, self.rounded, self.bias, **of_integers),
            "product": lambda w: product(w, self.rounded, self.bias, **of_integers),
        }
        if problem.operation == "quantise":
            return {OURS: lambda: quantise(self.x, **place)}
        run = one[problem.operation]
        return {layout: lambda w=w: run(w) for layout, w in self.weights.items()}


def other_than(layout: str) -> str:
    """The other layout."""
    return INTERLEAVED if layout == SOA else SOA


def check(problem: Problem, inputs: Inputs, peer: str, result: Any) -> float:
    """The largest error of a product of ours, over the largest result of fp64; 0 of what has the
    bits of the reference. ValueError where a result is wrong."""
    if problem.operation in PRODUCTS:
        x = inputs.x if problem.operation == "matvec" else inputs.rounded
        exact = reference.matvec(inputs.weights[peer], x, inputs.bias)
        error = ((result.double() - exact).abs().amax() / exact.abs().amax()).item()
        if not error < LARGEST_ERROR:
            raise ValueError(f"wrong: {error:.1e} of the largest result off fp64")
        return error
    if problem.operation == "quantise":
        expected = reference.quantise(inputs.x)
        pairs = [(result.quants, expected.quants), (result.scales, expected.scales)]
    elif problem.operation == "repack":
        weights = inputs.weights[peer]
        pairs = [(result, reference.repack(weights, other_than(peer)).data)]
    else:
        pairs = [(result, reference.dequantise(inputs.weights[peer], DTYPES[problem.dtype]))]
    if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
        raise ValueError("wrong: other bits than the reference's")
    return 0.0
