"""Problems of the grouped GEMM: inputs, a launch in the emulator, and what the result has to be."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from kernelkit import tolerance
from kernelkit.launch import emulation
from moe import reference
from moe.formats import FORMATS
from moe.grouped import Activation, grouped_gemm
from moe.packing import pack
from moe.quantized import Quantized
from ptxemu import Options
from ptxemu.check.text import render

PATIENCE = 600.0  # seconds of a launch; a busy machine is no reason to fail
CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
K_BLOCK = 32
SAME_BYTES = 0.999  # of a quantised output: the others stood at a tie, and sigmoid is approximated


@dataclass(frozen=True)
class Case:
    """counts: rows of each expert. k; columns: of the output. form: (alpha, beta, limit) of SwiGLU,
    None for the plain product. amplitude: of x."""

    counts: tuple[int, ...]
    k: int = 256
    columns: int = 128
    fmt: str = "nvfp4"
    granularity: int = 32
    form: tuple[float, float, float | None] | None = (1.0, 0.0, None)
    out: str = "bf16"
    per_token: bool = False
    amax: bool = False
    amplitude: float = 1.0

    def __str__(self) -> str:
        counts = ".".join(map(str, self.counts[:6])) + "..." * (len(self.counts) > 6)
        parts = [self.fmt, f"{len(self.counts)}x{counts}", f"k{self.k}", f"n{self.columns}"]
        parts += [f"g{self.granularity}-{self.form}"] if self.form else ["plain"]
        parts += [self.out] + ["token"] * self.per_token + ["amax"] * self.amax
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

    def inputs(self) -> tuple[Quantized, Quantized]:
        """x and w, the same for every schedule."""
        generator = torch.Generator().manual_seed(zlib.crc32(str(self).encode()))
        x = torch.randn(self.rows, self.k, generator=generator) * self.amplitude
        n = self.columns * (2 if self.form else 1)
        w = torch.randn(len(self.counts), n, self.k, generator=generator) * self.k**-0.5
        scale = ("token" if self.per_token else "tensor") if self.fmt == "nvfp4" else None
        quantised = reference.quantise(
            x.bfloat16(), self.fmt, global_scale=scale, offsets=self.offsets
        )
        return quantised, self._weights(w.bfloat16())

    def _weights(self, w: torch.Tensor) -> Quantized:
        """Packed as the layer's first product; a plain product takes rows as they are."""
        if self.form:
            other = torch.ones(len(w), self.k, self.columns, dtype=w.dtype)
            return pack(w, other, self.fmt, granularity=self.granularity).w13
        return _plain(w, self.fmt)

    def encode_scale(self) -> torch.Tensor | None:
        """Of an output in nvfp4."""
        return torch.tensor([448.0]) if self.out == "nvfp4" else None


def _plain(w: torch.Tensor, fmt: str) -> Quantized:
    """[E, N, K], every expert by itself."""
    parts = [reference.quantise(each, fmt) for each in w]
    joined = {
        name: torch.stack([getattr(part, name).view(torch.uint8) for part in parts])
        for name in ("data", "scales")
    }
    scales = [None, None]
    if FORMATS[fmt].has_global:
        names = ("encode_scale", "decode_scale")
        scales = [torch.cat([getattr(part, name) for part in parts]) for name in names]
    return Quantized(
        joined["data"].view(parts[0].data.dtype),
        joined["scales"].flatten().view(parts[0].scales.dtype),
        *scales,
        fmt,
    )


def run(case: Case, options: Options = CHECKED, **changes: Any) -> tuple:
    """(the result, amax or None) of the kernel in the emulator, where nothing is found."""
    x, w = case.inputs()
    amax = torch.zeros(1) if case.amax else None
    given = {"activation": case.activation, "amax": amax, "encode_scale": case.encode_scale()}
    given |= {"out": DTYPES.get(case.out, case.out)} | changes
    with emulation(options) as active:
        result = grouped_gemm(x, w, case.offsets, **given)
    for report in active.reports:
        assert not report.findings, render(report)
    return result, amax


def definition(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """[R, columns] in fp64, or with what the kernel computes in fp32: sums, block by block of K,
    and SwiGLU."""
    x, w = case.inputs()
    product = reference.grouped_gemm(x, w, case.offsets)
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
    """fp32 [R, N]: an MMA adds the products of K_BLOCK elements to what is there."""
    starts, rows = case.offsets.tolist(), []
    for expert, (begin, end) in enumerate(pairwise(starts)):
        total = torch.zeros(end - begin, w.shape[1])
        for own, other in zip(
            x[begin:end].split(K_BLOCK, 1), w[expert].split(K_BLOCK, 1), strict=True
        ):
            total = (total + own @ other.T).float()
        rows.append(total)
    return torch.cat(rows)


def judge(case: Case, result: torch.Tensor | Quantized) -> tolerance.Report:
    """Of the values; a quantised output has to be, byte by byte, nearly always the definition's."""
    exact, rounded = definition(case, torch.float64), definition(case, torch.float32)
    if isinstance(result, torch.Tensor):
        assert result.dtype == DTYPES[case.out]
        return tolerance.compare_output(result, exact, rounded.to(result.dtype), result.dtype)
    wanted = reference.quantise(
        rounded, case.out, global_scale=case.encode_scale(), offsets=case.offsets
    )
    same = result.data.view(torch.uint8) == wanted.data.view(torch.uint8)
    assert same.numel() == 0 or same.double().mean() >= SAME_BYTES, same.double().mean()
    values = [reference.dequantise(each, offsets=case.offsets) for each in (result, wanted)]
    return tolerance.compare_output(values[0], exact, values[1], torch.bfloat16)
