"""Hostile numbers through the kernels: quantise, grouped GEMM with SwiGLU, quantised output.

Each link is judged by itself: the quantiser to the bit, the product in fp64 on the operands that it
was given, and the quantiser in the epilogue to the bit on what the same kernel puts out in fp32.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from kernelkit.numerics import tolerance
from lab.problems import grouped_gemm as cases
from lab.problems import hostile
from lab.problems.grouped_gemm import Case, checked, same_bits
from moe import reference
from moe.api import grouped_gemm
from moe.formats import FORMATS, format_of
from moe.packing import quantise_experts
from moe.quantiser.api import quantise
from moe.quantized import Quantized
from moe.reference import FLT_MAX
from tests.moe.grouped_space import FORMS
from tests.moe.quantise_cases import assert_equal, used_bytes

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")

INF, NAN = math.inf, math.nan
COUNTS = (3, 0, 130, 1)


def chain(fmt: str, x_like: str, w_like: str, **options) -> Case:
    """Both operands hostile, with SwiGLU, a limit that bites and the amax of the output."""
    given = {"form": FORMS["gpt-oss"], "amax": True, "per_token": fmt == "nvfp4", **options}
    return Case(COUNTS, 192, 64, fmt, x_like=x_like, w_like=w_like, out=fmt, **given)


CHAINS = [
    chain("nvfp4", "zero blocks", "one hot"),
    chain("nvfp4", "saturated", "at ends"),
    chain("nvfp4", "subnormal", "far apart"),
    *(
        chain(fmt, x_like, w_like, amplitude=4.0)
        for fmt in FORMATS
        for number, x_like in enumerate(hostile.KINDS)
        for w_like in list(hostile.KINDS)[number % 3 :: 3]
    ),
]


@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_from_the_quantiser_to_the_quantised_output(case):
    """Values are judged in fp32; of these the other output has every bit."""
    (x, _), (wanted, w) = case.values(), case.inputs()
    values, amax = replace(case, out="fp32"), torch.zeros(2, 1)
    with checked():
        operand = quantise(
            x, case.fmt, global_scale=case.scale_of_x(x), offsets=case.offsets, arch="sm_100a"
        )
        exact, result = (
            grouped_gemm(operand, w, case.offsets, **each.options() | {"amax": top})
            for each, top in zip((values, case), amax, strict=True)
        )
    assert_equal(operand, wanted, used_bytes(case.fmt, case.k, case.counts))
    sums = (cases.definition(case, dtype) for dtype in (torch.float64, torch.float32))
    report = tolerance.compare_output(exact, *sums, torch.float32)
    assert report.ok, report
    scale = case.encode_scale()
    again = reference.quantise(exact, case.out, global_scale=scale, offsets=case.offsets)
    assert same_bits(result, again, case.offsets)
    assert amax.tolist() == [[exact.abs().max().item()]] * 2


def magnitudes() -> torch.Tensor:
    """fp32 that rows are times: both ends, subnormal, and what no number has."""
    return torch.tensor([FLT_MAX, 2.0**120, 2.0**-120, 1e-44, -1.0, 0.0, INF, NAN])


def rows_of(fmt: str, k: int = 256) -> tuple[Quantized, Quantized, torch.Tensor]:
    """x, w and offsets of a product that puts out the rows of x times any number: w is 1.

    Three rows of each kind, and random ones times `magnitudes`.
    """
    generator = torch.Generator().manual_seed(0)
    of_kinds = [
        hostile.values(kind, torch.randn(3, k, generator=generator), fmt) for kind in hostile.KINDS
    ]
    last = torch.randn(len(magnitudes()), k, generator=generator).bfloat16()
    x, ones = torch.cat((*of_kinds, last)), torch.ones(len(magnitudes()))
    factors = torch.cat((torch.ones(len(x) - len(ones)), magnitudes()))
    offsets = torch.tensor([0, 15, len(x)]).int()
    scale = torch.full((len(x),), 448.0) if format_of(fmt).has_global else None
    quantised = reference.quantise(x, fmt, global_scale=scale, offsets=offsets)
    decode = factors / 448.0
    operand = replace(quantised, encode_scale=decode.reciprocal(), decode_scale=decode)
    return operand, identity(fmt, k), offsets


def identity(fmt: str, k: int) -> Quantized:
    """Of two experts, exactly."""
    scale = torch.full((2,), 1.0) if format_of(fmt).has_global else None
    return quantise_experts("w", torch.eye(k).expand(2, k, k), format_of(fmt), scale)


ENCODE_SCALES = (448.0, 1e-38, 1e-44, FLT_MAX, 0.0, INF, NAN)
EPILOGUES = list(product(FORMATS, (16, 32, 64, 128, 256)))


@pytest.mark.parametrize(("out", "tile_rows"), EPILOGUES)
def test_the_epilogue_quantises_as_the_reference(out, tile_rows, monkeypatch):
    """To the bit, whatever the sums are and whatever global scale somebody gives."""
    monkeypatch.setattr("moe.arguments.check_scale", lambda *_: None)  # as on a GPU: unread
    x, w, offsets = rows_of("nvfp4")
    tiles = {"tile_rows": tile_rows, "most_rows": int(offsets.diff().max())}
    with checked():
        exact = grouped_gemm(x, w, offsets, out=torch.float32, **tiles)
    for encode in ENCODE_SCALES if format_of(out).has_global else (None,):
        scale = None if encode is None else torch.tensor([encode])
        with checked():
            got = grouped_gemm(x, w, offsets, out=out, encode_scale=scale, **tiles)
        wanted = reference.quantise(exact, out, global_scale=scale, offsets=offsets)
        assert same_bits(got, wanted, offsets)
