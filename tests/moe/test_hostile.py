"""Numbers near every limit of the formats, and rows that NaN and infinities may not reach."""

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
from moe.formats import FORMATS, SCALE_COLUMNS, format_of
from moe.packing import quantise_experts
from moe.quantiser.api import quantise
from moe.quantized import Quantized
from moe.reference import FLT_MAX, NAN_CODE
from tests.moe.grouped_space import FORMS
from tests.moe.quantise_cases import assert_equal, used_bytes

# ---- Hostile numbers through the kernels: quantise, grouped GEMM with SwiGLU, quantised output
#
# Each link is judged by itself: the quantiser to the bit, the product in fp64 on its given
# operands, and the epilogue's quantiser to the bit on the fp32 output of the same kernel.

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")

INF, NAN = math.inf, math.nan
COUNTS = (3, 0, 130, 1)


def chain(fmt: str, x_like: str, w_like: str, **options) -> Case:
    """Both operands are hostile, with SwiGLU, an effective limit and the amax of the output."""
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
    """Values are judged in fp32; the quantised output must follow from them bit for bit."""
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
    """fp32 factors of rows: both ends of the range, subnormal, infinity and NaN."""
    return torch.tensor([FLT_MAX, 2.0**120, 2.0**-120, 1e-44, -1.0, 0.0, INF, NAN])


def rows_of(fmt: str, k: int = 256) -> tuple[Quantized, Quantized, torch.Tensor]:
    """x, w and offsets of a product that returns the rows of x times any number: w is 1.

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
    """An exact identity matrix for each of two experts."""
    scale = torch.full((2,), 1.0) if format_of(fmt).has_global else None
    return quantise_experts("w", torch.eye(k).expand(2, k, k), format_of(fmt), scale)


ENCODE_SCALES = (448.0, 1e-38, 1e-44, FLT_MAX, 0.0, INF, NAN)
EPILOGUES = list(product(FORMATS, (16, 32, 64, 128, 256)))


@pytest.mark.parametrize(("out", "tile_rows"), EPILOGUES)
def test_the_epilogue_quantises_as_the_reference(out, tile_rows, monkeypatch):
    """The result is equal to the bit, for any sums and any given global scale."""
    monkeypatch.setattr("moe.arguments.check_scale", lambda *_: None)  # unread, as on a GPU
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


# ---- NaN and infinities, and bytes outside of rows, affect only their own rows of the grouped GEMM

TALL_COUNTS = (5, 0, 130, 2)  # a tile reaches into the rows of other experts
FIELDS = {"form": FORMS["deepseek"], "out": "fp32", "tile_rows": 128}
NVFP4 = Case(TALL_COUNTS, 128, 64, "nvfp4", per_token=True, **FIELDS)
MXFP8 = Case(TALL_COUNTS, 128, 64, "mxfp8", **FIELDS)
LONGER = [replace(case, tile_rows=rows) for case in (NVFP4, MXFP8) for rows in (64, 128, 256)]

each_format = pytest.mark.parametrize("case", dict.fromkeys((NVFP4, *LONGER)), ids=str)


def product_and_amax(case: Case, x: Quantized, w: Quantized, amax: float = 0.0) -> tuple:
    """Return (the result, its amax, which starts at `amax`)."""
    top = torch.tensor([amax])
    with checked():
        result = grouped_gemm(x, w, case.offsets, **case.options() | {"amax": top})
    return result, top.item()


def same_but(rows: list[int] | slice, mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all other rows are equal."""
    others = torch.ones(len(mine), dtype=torch.bool)
    others[rows] = False
    return torch.equal(mine[others], other[others])


@each_format
def test_nan_and_infinities_of_a_token_stay_in_its_row(case):
    """This holds from bf16 on, through the quantiser. With a scale per token an infinity makes the
    scale 0, and the whole row NaN; without one the result would be huge, and the emulator adds huge
    numbers in fp64."""
    x, w = case.values()[0], case.inputs()[1]
    broken, rows = x.clone(), {1: NAN, 136: NAN}
    rows |= {4: INF, 60: -INF} if case.per_token else {}
    for row, value in rows.items():
        broken[row, row % case.k] = value
    scaling = "token" if case.per_token else None
    results = []
    for tokens in (x, broken):
        with checked():
            operand = quantise(tokens, case.fmt, global_scale=scaling, offsets=case.offsets)
        results.append(product_and_amax(case, operand, w))
    (clean, top), (mine, mine_top) = results
    assert same_but(list(rows), mine, clean)
    assert mine[list(rows)].isnan().all()
    assert math.isfinite(top)
    assert math.isnan(mine_top)


@each_format
def test_a_broken_expert_stays_alone(case):
    """Scale factors of NaN, and in nvfp4 a global scale of NaN, do not affect neighbours."""
    x, w = case.inputs()
    clean, _ = product_and_amax(case, x, w)
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 135)), (1, slice(0, 0))):
        codes = w.scales.view(torch.uint8).clone().view(len(TALL_COUNTS), -1)
        codes[expert] = NAN_CODE[w.format.scale]
        broken = [replace(w, scales=codes.flatten().view(w.scales.dtype))]
        if w.decode_scale is not None:
            decode = w.decode_scale.clone()
            decode[expert] = NAN
            broken.append(replace(w, decode_scale=decode))
        for each in broken:
            mine, _ = product_and_amax(case, x, each)
            assert mine[rows].isnan().all()
            assert same_but(rows, mine, clean)


@each_format
def test_nan_of_gate_or_of_up_alone_reaches_its_column(case):
    """The other one is a number, and limits apply: a minimum would return the number."""
    x, w = case.inputs()
    clean, _ = product_and_amax(case, x, w)
    columns = w.format.columns(w.k)
    parts = [  # (expert, column, packed row of its gate, or of up if odd)
        (expert, column, column // 32 * 64 + column % 32 + 32 * (column % 2))
        for expert, column in ((0, 4), (0, 37), (2, 40), (3, 63))
    ]
    own = [reference.unswizzle_scales(each, w.rows, columns).view(torch.uint8)
           for each in w.scales.view(len(TALL_COUNTS), -1)]  # fmt: skip
    expected = torch.zeros(clean.shape, dtype=torch.bool)
    for expert, column, row in parts:
        own[expert][row, 1] = NAN_CODE[w.format.scale]
        expected[case.offsets[expert] : case.offsets[expert + 1], column] = True
    scales = torch.cat([reference.swizzle_scales(each) for each in own]).view(w.scales.dtype)
    mine, _ = product_and_amax(case, x, replace(w, scales=scales))
    assert torch.equal(mine.isnan(), expected)
    assert torch.equal(mine[~expected], clean[~expected])


@pytest.mark.parametrize("out", ["fp32", "nvfp4"])
def test_scale_factors_of_no_row_do_not_matter(out):
    """NaN in every byte of A's scale factors outside of rows gives the same bits, and the same
    amax."""
    case = replace(NVFP4, out=out)
    x, w = replace(NVFP4, out="fp32").inputs()
    broken = replace(x, scales=with_nan_of_nobody(x, case.offsets))
    assert not torch.equal(broken.scales.view(torch.uint8), x.scales.view(torch.uint8))
    (mine, top), (clean, clean_top) = (
        product_and_amax(case, broken, w),
        product_and_amax(case, x, w),
    )
    assert top == clean_top
    assert math.isfinite(top)
    assert same_bits(mine, clean, case.offsets)


def with_nan_of_nobody(x: Quantized, offsets: torch.Tensor) -> torch.Tensor:
    """Return the scale factors of x with NaN after the rows of each expert, and after the last
    block."""
    columns = -(-x.format.columns(x.k) // SCALE_COLUMNS) * SCALE_COLUMNS  # padding of columns is 0
    used = torch.ones(x.rows, columns, dtype=torch.uint8)
    owned = reference.swizzle_scales(used, offsets).bool()
    codes = torch.where(owned, x.scales.view(torch.uint8), NAN_CODE[x.format.scale])
    return codes.to(torch.uint8).view(x.scales.dtype)


def test_amax_is_the_largest_so_far():
    """amax starts at nothing, zeros, less than before, more, and NaN, which stays."""
    x, w = NVFP4.inputs()
    result, top = product_and_amax(NVFP4, x, w)
    assert top == result.abs().max().item()
    assert product_and_amax(NVFP4, x, w, amax=1e30)[1] == pytest.approx(1e30)
    assert product_and_amax(NVFP4, x, w, amax=top / 2)[1] == top
    assert math.isnan(product_and_amax(NVFP4, x, w, amax=NAN)[1])
    zeros = replace(x, decode_scale=torch.zeros(NVFP4.rows))
    assert product_and_amax(NVFP4, zeros, w) == (pytest.approx(torch.zeros(NVFP4.rows, 64)), 0.0)


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("out", ["fp32", *FORMATS])
def test_amax_of_nothing_is_what_it_was(out):
    case = replace(NVFP4, counts=(0, 0, 0), out=out)
    x, w = case.inputs()
    result, top = product_and_amax(case, x, w, amax=3.0)
    assert top == 3.0
    shape = result.shape if out == "fp32" else result.data.shape
    assert shape == (0, 64 // (1 if out == "fp32" else format_of(out).per_byte))


@pytest.mark.parametrize("whose", ["x", "rows", "experts"])
def test_each_global_scale_comes_before_the_nonlinearity(whose):
    """Four times the scale is not four times the result: gate is not linear, and limits apply."""
    case = replace(NVFP4, counts=(3, 0, 4, 1), per_token=whose == "rows", form=FORMS["tight"])
    x, w = case.inputs()
    single, _ = product_and_amax(case, x, w)
    factors = 4.0 ** torch.arange(4 if whose == "experts" else len(x.decode_scale))
    if whose == "experts":
        more = product_and_amax(case, x, replace(w, decode_scale=w.decode_scale * factors))[0]
        of_row = factors.repeat_interleave(case.offsets.diff())
    else:
        factors = factors * 4.0
        more = product_and_amax(case, replace(x, decode_scale=x.decode_scale * factors), w)[0]
        of_row = factors.expand(case.rows)
    sums = reference.grouped_gemm(x, w, case.offsets) * of_row[:, None].double()
    gate, up = sums.unflatten(1, (-1, 2, case.granularity)).unbind(2)
    exact = reference.swiglu(gate.flatten(1), up.flatten(1), limit=0.25)
    torch.testing.assert_close(more.double(), exact, rtol=1e-5, atol=1e-6)
    scaled = single * of_row[:, None]
    assert (more - scaled).abs().amax(1)[of_row > 1].min() > 0.01
