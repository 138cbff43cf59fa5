"""Problems of the grouped GEMM: inputs, a launch in the emulator, and what the result has to be."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from kernelkit.call.launch import Emulation, emulation
from kernelkit.numerics import tolerance
from lab.problems import hostile
from moe import reference
from moe.api import grouped_gemm
from moe.arguments import Activation
from moe.formats import format_of
from moe.packing import pack, quantise_experts
from moe.quantized import Quantized, laid_out
from ptxemu import Options
from ptxemu.check.text import render

PATIENCE = 600.0  # seconds of a launch; a busy machine is no reason to fail
CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
K_BLOCK = 32
# Of a quantised output: the others stood at a tie, and sigmoid is approximated. Hostile numbers
# have more ties; tests/moe/test_hostile.py has every byte of those.
SAME_BYTES, OF_HOSTILE = 0.999, 0.98
LARGEST_FP16 = 65_519.0  # what is rounded to less than infinity


@dataclass(frozen=True)
class Case:
    """A grouped GEMM.

    counts: rows of each expert.
    k: depth of the product.
    columns: columns of the output.
    form: (alpha, beta, limit) of SwiGLU, None for the plain product.
    amplitude: amplitude of x.
    x_like, w_like: kinds of numbers in `lab.problems.hostile`.
    bias: whether there is one, of the amplitude of x.
    x_fmt: format of x, '' for fmt.
    pairs: whether gate and up have separate global scales.
    tile_rows, tile_n, carry, pdl: options of `grouped_gemm`."""

    counts: tuple[int, ...]
    k: int = 256
    columns: int = 128
    fmt: str = "nvfp4"
    granularity: int = 32
    form: tuple[float, float, float | None] | None = (1.0, 0.0, None)
    out: str = "bf16"
    per_token: bool = False
    amax: bool = False
    bias: bool = False
    x_fmt: str = ""
    amplitude: float = 1.0
    x_like: str = "normal"
    w_like: str = "normal"
    tile_rows: int | None = None
    tile_n: int | None = None
    carry: bool = False
    pdl: bool = False
    w_ready: bool = False
    pairs: bool = False

    def __str__(self) -> str:
        tile = f"-m{self.tile_rows}" * bool(self.tile_rows) + f"-{self.tile_n}" * bool(self.tile_n)
        return (
            self.problem
            + tile
            + "-carry" * self.carry
            + "-pdl" * self.pdl
            + "-ready" * self.w_ready
        )

    @property
    def problem(self) -> str:
        """Name of the problem without the schedule."""
        counts = ".".join(map(str, self.counts[:6])) + "..." * (len(self.counts) > 6)
        parts = [self.fmt, f"{len(self.counts)}x{counts}", f"k{self.k}", f"n{self.columns}"]
        parts += [f"g{self.granularity}-{self.form}"] if self.form else ["plain"]
        parts += [self.out] + ["token"] * self.per_token + ["amax"] * self.amax
        parts += ["bias"] * self.bias + [f"x.{self.x_fmt}"] * bool(self.x_fmt)
        parts += ["pairs"] * self.pairs
        likes = (("x", self.x_like), ("w", self.w_like))
        parts += [f"{name}.{like.replace(' ', '.')}" for name, like in likes if like != "normal"]
        return "-".join(parts).replace(" ", "")

    @property
    def offsets(self) -> torch.Tensor:
        """int32 [E + 1]."""
        return torch.tensor([0, *self.counts]).cumsum(0).int()

    @property
    def rows(self) -> int:
        return sum(self.counts)

    @property
    def activation(self) -> Activation | None:
        return Activation(self.granularity, *self.form) if self.form else None

    @property
    def format_of_x(self) -> str:
        return self.x_fmt or self.fmt

    @property
    def packed_columns(self) -> int:
        """N."""
        return self.columns * (2 if self.form else 1)

    def _generator(self, of: int = 0) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(self.problem.encode()) + of)

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 x [R, K] and w [E, N, K], the same for every schedule."""
        generator = self._generator()
        x = torch.randn(self.rows, self.k, generator=generator) * self.amplitude
        of_w = len(self.counts), self.packed_columns, self.k
        w = torch.randn(of_w, generator=generator) * self.k**-0.5
        w = hostile.values(self.w_like, w, self.fmt)
        return hostile.values(self.x_like, x, self.format_of_x), w

    def added(self) -> torch.Tensor | None:
        """The bias, fp32 [E, N], in packed columns as the rows of w."""
        shape = len(self.counts), self.packed_columns
        values = torch.randn(shape, generator=self._generator(1)) * self.amplitude
        return values if self.bias else None

    def scale_of_x(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the global scale of x as `quantise` expects it."""
        rows = x if self.per_token else x.flatten()[None]
        return hostile.encode_scale(self.x_like, rows, self.format_of_x)

    def inputs(self) -> tuple[Quantized, Quantized]:
        """x and w, quantised."""
        x, w = self.values()
        scale, fmt = self.scale_of_x(x), self.format_of_x
        quantised = reference.quantise(x, fmt, global_scale=scale, offsets=self.offsets)
        return quantised, self._weights(w)

    def _weights(self, w: torch.Tensor) -> Quantized:
        """Packed as the layer's first product; a plain product takes rows as they are."""
        scale = hostile.encode_scale(self.w_like, w.flatten(1), self.fmt)
        if not self.form:
            return quantise_experts("w", w, format_of(self.fmt), scale)
        other = torch.ones(len(w), self.k, self.columns, dtype=w.dtype)
        both = None if scale is None else (scale, torch.ones_like(scale))
        packing = {"granularity": self.granularity, "encode_scales": both}
        packed = pack(w, other, self.fmt, **packing).w13
        return with_pairs(packed, self._generator(2), self.granularity) if self.pairs else packed

    def encode_scale(self) -> torch.Tensor | None:
        """Scale of an output in nvfp4."""
        return torch.tensor([448.0]) if self.out == "nvfp4" else None

    def options(self) -> dict[str, Any]:
        """Further arguments of `grouped_gemm`."""
        given = {
            "activation": self.activation,
            "bias": self.added(),
            "amax": torch.zeros(1) if self.amax else None,
            "encode_scale": self.encode_scale(),
            "out": DTYPES.get(self.out, self.out),
            "tile_n": self.tile_n,
            "carry": self.carry,
            "pdl": self.pdl,
            "w_ready": self.w_ready,
        }
        if self.tile_rows:
            given |= {"tile_rows": self.tile_rows, "most_rows": max(self.counts)}
        return given


def with_pairs(w: Quantized, generator: torch.Generator, granularity: int) -> Quantized:
    """Return the weights with another global scale for up, which changes the values of its rows."""
    assert w.decode_scale is not None
    factor = torch.rand(len(w.data), generator=generator).to(w.decode_scale) + 0.25
    decode = torch.stack((w.decode_scale, w.decode_scale * factor), 1)
    made = replace(w, encode_scale=decode.reciprocal(), decode_scale=decode)
    return laid_out(made, granularity=granularity)


def run(case: Case, options: Options = CHECKED, **changes: Any) -> tuple:
    """(the result, amax or None) of the kernel in the emulator, where nothing is found."""
    x, w = case.inputs()
    given = case.options() | changes
    with checked(options):
        result = grouped_gemm(x, w, case.offsets, **given)
    return result, given["amax"]


@contextmanager
def checked(options: Options = CHECKED) -> Iterator[Emulation]:
    """Launches in the emulator, of which nothing is found; on a GPU nothing else happens."""
    with emulation(options) as active:
        yield active
    for report in active.reports:
        assert not report.findings, render(report)


def same_bits(
    first: torch.Tensor | Quantized, second: torch.Tensor | Quantized, offsets: torch.Tensor
) -> bool:
    """Whether two results have the same in everything that belongs to a row."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    columns = first.format.columns(first.k)
    codes = (
        reference.unswizzle_scales(each.scales, each.rows, columns, offsets).view(torch.uint8)
        for each in (first, second)
    )
    data = (each.data.view(torch.uint8) for each in (first, second))
    return torch.equal(*codes) and torch.equal(*data)


def definition(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """[R, columns] in fp64, or with what the kernel computes in fp32: sums, block by block of K,
    and SwiGLU."""
    x, w = case.inputs()
    product = reference.grouped_gemm(x, w, case.offsets, case.added())
    if dtype == torch.float32:
        product = _summed(
            reference.dequantise(x, offsets=case.offsets), reference.dequantise(w), case
        )
    if case.form is None:
        return product
    pairs = product.unflatten(1, (-1, 2, case.granularity))
    gate, up = (pairs[:, :, index].flatten(1) for index in range(2))
    alpha, beta, limit = case.form
    return reference.swiglu(gate, up, alpha=alpha, beta=beta, limit=limit)


def _summed(x: torch.Tensor, w: torch.Tensor, case: Case) -> torch.Tensor:
    """fp32 [R, N]: an MMA adds up products of K_BLOCK elements, and adds those to what is there.
    The bias comes last."""
    starts, rows, added = case.offsets.tolist(), [], case.added()
    for expert, (begin, end) in enumerate(pairwise(starts)):
        total = torch.zeros(end - begin, w.shape[1])
        for own, other in zip(
            x[begin:end].split(K_BLOCK, 1), w[expert].split(K_BLOCK, 1), strict=True
        ):
            total += own.float() @ other.float().T
        rows.append(total if added is None else total + added[expert])
    return torch.cat(rows)


def judge(case: Case, result: torch.Tensor | Quantized) -> tolerance.Report:
    """Verdict on the values; a quantised output has to be, byte by byte, nearly always the
    definition's."""
    exact, rounded = definition(case, torch.float64), definition(case, torch.float32)
    if isinstance(result, torch.Tensor):
        assert result.dtype == DTYPES[case.out]
        if case.out == "fp16":
            exact = torch.where(exact.abs() > LARGEST_FP16, exact.sign() * math.inf, exact)
        return tolerance.compare_output(result, exact, rounded.to(result.dtype), result.dtype)
    wanted = reference.quantise(
        rounded, case.out, global_scale=case.encode_scale(), offsets=case.offsets
    )
    same = result.data.view(torch.uint8) == wanted.data.view(torch.uint8)
    least = SAME_BYTES if {case.x_like, case.w_like} == {"normal"} else OF_HOSTILE
    assert same.numel() == 0 or same.double().mean() >= least, same.double().mean()
    values = [reference.dequantise(each, offsets=case.offsets) for each in (result, wanted)]
    return tolerance.compare_output(values[0], exact, values[1], torch.bfloat16)
