"""Inputs for `merge` that are hostile by default, and its definition in fp64.

Every O lies in a wider tensor of NaN, every LSE is a transposed view. Some rows of every part have
no keys, with NaN for O and row_max, and some rows have no keys in any part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernelkit.merge.api import merge
from kernelkit.numerics.tolerance import compare_lse, compare_output

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EXP2_BITS = 22  # PTX ISA, ex2.approx: relative error up to 2 ** -22
DEAD = 0.2  # share of a part's rows without keys


@dataclass(frozen=True)
class Case:
    """A problem of `merge`.

    kinds: for each part a dtype, with '*' if raw.
    shape: (B, S, H, D), packed with B = 1.
    """

    kinds: tuple[str, ...]
    shape: tuple[int, int, int, int]
    out_dtype: str = "bf16"
    sinks: bool = False
    packed: bool = False
    stacked: bool = False
    level: float = 0.0  # mean of all LSE
    spread: float = 3.0  # their deviation
    seed: int = 0

    def __str__(self) -> str:
        kinds = f"{len(self.kinds)}-" + "+".join(sorted(set(self.kinds)))
        flags = "-sinks" * self.sinks + "-packed" * self.packed + "-stacked" * self.stacked
        return f"{kinds}-{'x'.join(map(str, self.shape))}-{self.out_dtype}{flags}"


def build(case: Case, device: str) -> tuple[list[tuple[torch.Tensor, ...]], torch.Tensor | None]:
    """Return (a tuple [B, S, H, D], [B, H, S], ... per part, sinks)."""
    generator = torch.Generator().manual_seed(case.seed)
    batch, positions, heads, _ = case.shape
    nowhere = torch.rand(batch, heads, positions, generator=generator) < DEAD / 2
    parts = []
    for kind in case.kinds:
        o = torch.randn(case.shape, generator=generator)
        lse = torch.randn(nowhere.shape, generator=generator) * case.spread + case.level
        lag = torch.rand(nowhere.shape, generator=generator) * 4
        dead = nowhere | (torch.rand(nowhere.shape, generator=generator) < DEAD)
        lse[dead], lag[dead] = -math.inf, math.nan
        o[dead.transpose(1, 2)] = math.nan
        tensors = (o, lse)
        if kind.endswith("*"):
            tensors = (o * lag.exp().transpose(1, 2)[..., None], lse, lse - lag)
        tensors = (tensors[0].to(DTYPES[kind.rstrip("*")]), *tensors[1:])
        parts.append(tuple(tensor.to(device) for tensor in tensors))
    sinks = torch.randn(heads, generator=generator) * case.spread + case.level
    return parts, sinks.to(device) if case.sinks else None


def as_argument(parts: list[tuple[torch.Tensor, ...]], case: Case) -> object:
    """Return these parts as an argument of `merge`: in hostile layouts, without a batch, or
    stacked."""
    if case.stacked:
        parts = [tuple(torch.stack(tensors) for tensors in zip(*parts, strict=True))]
    views = [(_amid_nan(o), *map(_transposed, statistics)) for o, *statistics in parts]
    if case.packed:
        views = [tuple(tensor.squeeze(int(case.stacked)) for tensor in part) for part in views]
    return views[0] if case.stacked else views


def definition(
    parts: list[tuple[torch.Tensor, ...]], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE) in fp64."""
    lse = torch.stack([part[1] for part in parts]).double()
    reference = torch.stack([part[-1] if len(part) == 3 else part[1] for part in parts]).double()
    every = lse if sinks is None else torch.cat([lse, _like_rows(sinks, lse)])
    top = every.amax(dim=0)
    base = torch.where(top == -math.inf, 0.0, top)
    total = (every - base).exp().sum(dim=0)
    weights = torch.where(lse == -math.inf, 0.0, (reference - base).exp() / total)
    result = torch.zeros(parts[0][0].shape, dtype=torch.float64, device=lse.device)
    for (o, *_), weight in zip(parts, weights, strict=True):
        share = weight.transpose(1, 2)[..., None]
        result += torch.where(share == 0.0, 0.0, share * o.double())
    return result, top + torch.where(top == -math.inf, 0.0, total.log())


def rounded(
    parts: list[tuple[torch.Tensor, ...]], sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, LSE) rounded as in the kernel: one pass in fp32 over the parts with a running maximum.
    Every weight is an exp2 of a rounded exponent, with a relative error of 2 ** -EXP2_BITS."""
    rows = parts[0][1].shape
    top = torch.full(rows, -math.inf, device=parts[0][1].device)
    if sinks is not None:
        top = top.maximum(sinks[None, :, None])
    total = _weight(top, top)
    acc = torch.zeros(parts[0][0].shape, device=top.device)
    for o, lse, *row_max in parts:
        newer = top.maximum(lse)
        shrink, share = _weight(top, newer), _weight(row_max[0] if row_max else lse, newer)
        share = torch.where(lse == -math.inf, 0.0, share).transpose(1, 2)[..., None]
        acc = acc * shrink.transpose(1, 2)[..., None]
        acc += torch.where(share == 0.0, 0.0, share * o.float())
        total = total * shrink + _weight(lse, newer)
        top = newer
    o = acc / torch.where(total == 0.0, 1.0, total).transpose(1, 2)[..., None]
    return o, torch.where(top == -math.inf, top, top + total.log())


def _weight(exponent: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """exp(exponent - base) in fp32; 0 if both are -inf."""
    power = torch.exp2((exponent - base) * math.log2(math.e))
    mantissa, binary = torch.frexp(power)
    power = torch.ldexp((mantissa * 2**EXP2_BITS).round() / 2**EXP2_BITS, binary)
    return torch.where(exponent == -math.inf, 0.0, power)


def check(case: Case, device: str = "cpu") -> None:
    """Compare `merge` of a case with its definition, within the design's tolerance."""
    parts, sinks = build(case, device)
    out_dtype = DTYPES[case.out_dtype]
    o, lse = merge(as_argument(parts, case), sinks=sinks, out_dtype=out_dtype)
    if case.packed:
        o, lse = o.unsqueeze(0), lse.unsqueeze(0)
    exact_o, exact_lse = definition(parts, sinks)
    rounded_o, rounded_lse = rounded(parts, sinks)
    assert (o.dtype, lse.dtype) == (out_dtype, torch.float32)
    assert o.is_contiguous()
    assert lse.is_contiguous()
    report = compare_output(o, exact_o, rounded_o.to(out_dtype), out_dtype)
    assert report.ok, str(report)
    report = compare_lse(lse, exact_lse, rounded_lse)
    assert report.ok, str(report)


def _amid_nan(tensor: torch.Tensor) -> torch.Tensor:
    *front, last = tensor.shape
    wide = torch.full((*front, last + 16), math.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., 8 : 8 + last] = tensor
    return wide[..., 8 : 8 + last]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def _like_rows(sinks: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return sinks.double()[None, None, :, None].expand(1, *lse.shape[1:])
