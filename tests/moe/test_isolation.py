"""What is broken, or belongs to nobody, shows in its own rows of the grouped GEMM alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from lab.problems.grouped_gemm import Case, checked, same_bits
from moe import reference
from moe.api import grouped_gemm
from moe.formats import FORMATS, SCALE_COLUMNS, format_of
from moe.quantiser.api import quantise
from moe.quantized import Quantized
from moe.reference import NAN_CODE
from tests.moe.grouped_space import FORMS

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")

INF, NAN = math.inf, math.nan
COUNTS = (5, 0, 130, 2)  # a tile reaches into the rows of other experts
FIELDS = {"form": FORMS["deepseek"], "out": "fp32", "tile_rows": 128}
NVFP4 = Case(COUNTS, 128, 64, "nvfp4", per_token=True, **FIELDS)
MXFP8 = Case(COUNTS, 128, 64, "mxfp8", **FIELDS)
LONGER = [replace(case, tile_rows=rows) for case in (NVFP4, MXFP8) for rows in (64, 128, 256)]

each_format = pytest.mark.parametrize("case", dict.fromkeys((NVFP4, *LONGER)), ids=str)


def product(case: Case, x: Quantized, w: Quantized, amax: float = 0.0) -> tuple:
    """(the result, its amax, which was something before)."""
    top = torch.tensor([amax])
    with checked():
        result = grouped_gemm(x, w, case.offsets, **case.options() | {"amax": top})
    return result, top.item()


def same_but(rows: list[int] | slice, mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all other rows are the same."""
    others = torch.ones(len(mine), dtype=torch.bool)
    others[rows] = False
    return torch.equal(mine[others], other[others])


@each_format
def test_nan_and_infinities_of_a_token_stay_in_its_row(case):
    """From bf16 on, through the quantiser. With a scale per token an infinity makes it 0, and all
    of the row NaN; without, it would be huge, and the emulator adds huge numbers in fp64."""
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
        results.append(product(case, operand, w))
    (clean, top), (mine, mine_top) = results
    assert same_but(list(rows), mine, clean)
    assert mine[list(rows)].isnan().all()
    assert math.isfinite(top)
    assert math.isnan(mine_top)


@each_format
def test_a_broken_expert_stays_alone(case):
    """Scale factors of NaN, in nvfp4 a global scale of NaN, and their neighbours never know."""
    x, w = case.inputs()
    clean, _ = product(case, x, w)
    for expert, rows in ((0, slice(0, 5)), (2, slice(5, 135)), (1, slice(0, 0))):
        codes = w.scales.view(torch.uint8).clone().view(len(COUNTS), -1)
        codes[expert] = NAN_CODE[w.format.scale]
        broken = [replace(w, scales=codes.flatten().view(w.scales.dtype))]
        if w.decode_scale is not None:
            decode = w.decode_scale.clone()
            decode[expert] = NAN
            broken.append(replace(w, decode_scale=decode))
        for each in broken:
            mine, _ = product(case, x, each)
            assert mine[rows].isnan().all()
            assert same_but(rows, mine, clean)


@each_format
def test_nan_of_gate_or_of_up_alone_reaches_its_column(case):
    """Where the other one is a number, and limits apply: a minimum would rather have the number."""
    x, w = case.inputs()
    clean, _ = product(case, x, w)
    columns = w.format.columns(w.k)
    parts = [  # (expert, column, packed row of its gate, or of up where it is odd)
        (expert, column, column // 32 * 64 + column % 32 + 32 * (column % 2))
        for expert, column in ((0, 4), (0, 37), (2, 40), (3, 63))
    ]
    own = [reference.unswizzle_scales(each, w.rows, columns).view(torch.uint8)
           for each in w.scales.view(len(COUNTS), -1)]  # fmt: skip
    expected = torch.zeros(clean.shape, dtype=torch.bool)
    for expert, column, row in parts:
        own[expert][row, 1] = NAN_CODE[w.format.scale]
        expected[case.offsets[expert] : case.offsets[expert + 1], column] = True
    scales = torch.cat([reference.swizzle_scales(each) for each in own]).view(w.scales.dtype)
    mine, _ = product(case, x, replace(w, scales=scales))
    assert torch.equal(mine.isnan(), expected)
    assert torch.equal(mine[~expected], clean[~expected])


@pytest.mark.parametrize("out", ["fp32", "nvfp4"])
def test_scale_factors_of_no_row_do_not_matter(out):
    """NaN in every byte of A's scale factors that no row has: the same bits, and the same amax."""
    case = replace(NVFP4, out=out)
    x, w = replace(NVFP4, out="fp32").inputs()
    broken = replace(x, scales=with_nan_of_nobody(x, case.offsets))
    assert not torch.equal(broken.scales.view(torch.uint8), x.scales.view(torch.uint8))
    (mine, top), (clean, clean_top) = product(case, broken, w), product(case, x, w)
    assert top == clean_top
    assert math.isfinite(top)
    assert same_bits(mine, clean, case.offsets)


def with_nan_of_nobody(x: Quantized, offsets: torch.Tensor) -> torch.Tensor:
    """The scale factors of x; NaN behind the rows of an expert, and behind the last block."""
    columns = -(-x.format.columns(x.k) // SCALE_COLUMNS) * SCALE_COLUMNS  # padding of columns is 0
    used = torch.ones(x.rows, columns, dtype=torch.uint8)
    owned = reference.swizzle_scales(used, offsets).bool()
    codes = torch.where(owned, x.scales.view(torch.uint8), NAN_CODE[x.format.scale])
    return codes.to(torch.uint8).view(x.scales.dtype)


def test_amax_is_the_largest_so_far():
    """Nothing, zeros, less than before, more, and NaN, which stays."""
    x, w = NVFP4.inputs()
    result, top = product(NVFP4, x, w)
    assert top == result.abs().max().item()
    assert product(NVFP4, x, w, amax=1e30)[1] == pytest.approx(1e30)
    assert product(NVFP4, x, w, amax=top / 2)[1] == top
    assert math.isnan(product(NVFP4, x, w, amax=NAN)[1])
    zeros = replace(x, decode_scale=torch.zeros(NVFP4.rows))
    assert product(NVFP4, zeros, w) == (pytest.approx(torch.zeros(NVFP4.rows, 64)), 0.0)


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize("out", ["fp32", *FORMATS])
def test_amax_of_nothing_is_what_it_was(out):
    case = replace(NVFP4, counts=(0, 0, 0), out=out)
    x, w = case.inputs()
    result, top = product(case, x, w, amax=3.0)
    assert top == 3.0
    shape = result.shape if out == "fp32" else result.data.shape
    assert shape == (0, 64 // (1 if out == "fp32" else format_of(out).per_byte))


@pytest.mark.parametrize("whose", ["x", "rows", "experts"])
def test_each_global_scale_comes_before_the_nonlinearity(whose):
    """Four times the scale is not four times the result: gate is not linear, and limits bite."""
    case = replace(NVFP4, counts=(3, 0, 4, 1), per_token=whose == "rows", form=FORMS["tight"])
    x, w = case.inputs()
    single, _ = product(case, x, w)
    factors = 4.0 ** torch.arange(4 if whose == "experts" else len(x.decode_scale))
    if whose == "experts":
        more = product(case, x, replace(w, decode_scale=w.decode_scale * factors))[0]
        of_row = factors.repeat_interleave(case.offsets.diff())
    else:
        factors = factors * 4.0
        more = product(case, replace(x, decode_scale=x.decode_scale * factors), w)[0]
        of_row = factors.expand(case.rows)
    sums = reference.grouped_gemm(x, w, case.offsets) * of_row[:, None].double()
    gate, up = sums.unflatten(1, (-1, 2, case.granularity)).unbind(2)
    exact = reference.swiglu(gate.flatten(1), up.flatten(1), limit=0.25)
    torch.testing.assert_close(more.double(), exact, rtol=1e-5, atol=1e-6)
    scaled = single * of_row[:, None]
    assert (more - scaled).abs().amax(1)[of_row > 1].min() > 0.01
