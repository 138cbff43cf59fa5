"""The grouped GEMM in the emulator, under the checker: values, outputs, refusals, every tile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

from kernelkit.call.launch import emulation
from kernelkit.numerics import e2m1
from lab.problems import grouped_gemm as cases
from lab.problems.grouped_gemm import CHECKED, PATIENCE, Case
from moe.api import grouped_gemm, grouped_gemm_swiglu
from moe.arguments import Activation, SwiGLU
from moe.choose import FEW
from moe.config import TILE_ROWS
from moe.formats import SCALE_COLUMNS
from moe.packing import pack
from moe.quantized import Quantized, of_bytes
from moe.reference import unswizzle_scales
from moe.sm100 import kernel
from moe.sm100.roles import epilogue, mma
from ptxemu import Options
from ptxemu.record.recording import EXPECT, LOAD
from tests.moe.grouped_space import FORMS, MATRIX, QUICK, random_case

# ---- The grouped GEMM in the emulator, under the checker: values, outputs, refusals

GROUPS = 4
SEEDS = 200  # of the sweep

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")


def in_groups(given: Iterable) -> list:
    """Parameters in groups of xdist: cases hardly share kernels, so they can be split between
    workers."""
    marks = [pytest.mark.xdist_group(f"moe-grouped-{number}") for number in range(GROUPS)]
    return [pytest.param(each, marks=marks[i % GROUPS]) for i, each in enumerate(given)]


def check(case: Case, options: Options = CHECKED) -> tuple:
    result, amax = cases.run(case, options)
    report = cases.judge(case, result)
    assert report.ok, f"{case}: {report}"
    if amax is not None and case.rows:
        top = cases.definition(case, torch.float64).abs().max().item()
        assert amax.item() == pytest.approx(top, rel=1e-5)
    return result, amax


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_quick(case):
    check(case)


@pytest.mark.parametrize("case", in_groups(MATRIX), ids=str)
def test_matrix(case):
    check(case)


@pytest.mark.parametrize("seed", range(SEEDS), ids="seed-{}".format)
def test_any(seed):
    """A random problem of the whole space, in two orders of events."""
    case = random_case(seed)
    result, amax = check(case)
    late = Options("adversarial" if seed % 4 == 0 else "random", seed, limit=PATIENCE)
    other, other_amax = cases.run(case, late)
    assert cases.same_bits(result, other, case.offsets), case
    assert amax == other_amax


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adversarial_schedule_gives_the_same_bits(seed):
    case = Case((3, 130, 0, 1), 320, 64, out="mxfp8")
    first, _ = cases.run(case)
    late = Options(policy="adversarial", seed=seed, check=True, limit=PATIENCE)
    second, _ = cases.run(case, late)
    assert cases.same_bits(first, second, case.offsets)


@pytest.mark.parametrize("granularity", [8, 16, 64])
def test_every_granularity_gives_the_same_bits(granularity):
    """Packings of the same logical weights differ only in their order."""
    case = Case((5, 129), 128, 128, granularity=32)
    torch.manual_seed(0)
    x, _ = case.inputs()
    w13, w2 = torch.randn(2, 256, 128).bfloat16(), torch.randn(2, 128, 128).bfloat16()
    with cases.checked():
        results = [
            grouped_gemm(
                x, pack(w13, w2, granularity=size).w13, case.offsets, activation=Activation(size)
            )
            for size in (32, granularity)
        ]
    assert torch.equal(*results)


@pytest.mark.parametrize("form", [None, SwiGLU(1.702, 1.0, 7.0)], ids=str)
def test_the_first_product_by_its_name(form):
    case = Case((5, 2), 128, 64, granularity=16, amplitude=4.0)
    x, w = case.inputs()
    activation = Activation(16, **vars(form or SwiGLU()))
    wanted = grouped_gemm(x, w, case.offsets, activation=activation, out=torch.float32)
    got = grouped_gemm_swiglu(x, w, case.offsets, form=form, granularity=16, out=torch.float32)
    assert torch.equal(got, wanted)
    with pytest.raises(TypeError, match="form is str"):
        grouped_gemm_swiglu(x, w, case.offsets, form="silu")


def test_a_limit_is_never_dropped():
    case = Case((6,), 128, 64, form=FORMS["tight"], out="fp32", amplitude=8.0)
    limited, _ = cases.run(case)
    free, _ = cases.run(case, activation=Activation(32))
    assert (limited - free).abs().max() > 1.0
    assert limited.abs().max() <= 0.25 * 0.2785  # |up| <= L, and gate sigmoid(gate) >= -0.2785


# 160 columns quantised to nvfp4 have ten scale factors: two in their last atom belong to no column.
BIASED = Case((3, 130), 128, 160, "nvfp4", 8, FORMS["gpt-oss"], "nvfp4", bias=True)
PLAIN_BIASED = Case((3, 9), 128, 72, "mxfp8", 0, None, "fp32", bias=True)


def is_right(case: Case, result: torch.Tensor | Quantized) -> bool:
    """Whether the judge objects neither to values nor to bytes."""
    try:
        return cases.judge(case, result).ok
    except AssertionError:
        return False


@pytest.mark.parametrize("case", [BIASED, PLAIN_BIASED], ids=str)
def test_a_bias_is_never_dropped_nor_moved(case):
    """The judge of all cases notices a missing bias, one of neighbouring columns, and one of other
    experts."""
    other = case.added()
    for wrong in (None, other.roll(1, 1), other.roll(4, 1), other.flip(0)):
        result, _ = cases.run(case, bias=wrong)
        assert not is_right(case, result)
    assert is_right(case, cases.run(case)[0])


@pytest.mark.parametrize("change", [
    ("bias_at(affine, first + begin)", "bias_at(affine, begin)"),  # the first subtile's for all
    ("@exists ld", "ld"),  # reads past the last column, too
    ("(bias[index], bias[index + 1])", "(bias[0], bias[1])"),
    ("setp.gt", "setp.le"),
], ids="".join)  # fmt: skip
def test_a_wrong_load_of_the_bias_is_noticed(change, changed):
    changed(epilogue, [epilogue], "apply", change)
    with pytest.raises(AssertionError):  # from the judge, or findings of the checker
        check(replace(BIASED, tile_rows=128))


@pytest.mark.parametrize("change", [
    ("if column < cute.size(tensors.bias, mode=[1]):", "if column >= 0:"),
    ("tile.n * config.tile_n + thread", "thread"),
    ("* of_column.factor + of_column.bias", "* of_column.factor"),
], ids="".join)  # fmt: skip
def test_a_wrong_bias_of_a_column_is_noticed(change, changed):
    """The tile is swapped: each of its threads has one column."""
    changed(epilogue, [kernel], "Epilogue", change)
    with pytest.raises(AssertionError):
        check(replace(BIASED, tile_rows=64))


@pytest.mark.parametrize("tile_rows", [16, 128, 256])
def test_scale_factors_of_no_column_are_0(tile_rows):
    """There is no bias after column N; that memory belongs to the next expert."""
    case = replace(BIASED, counts=(3, 16), tile_rows=tile_rows)
    result, _ = cases.run(case, bias=case.added() + 100.0)
    columns = result.format.columns(result.k)
    assert columns % SCALE_COLUMNS == 2
    codes = unswizzle_scales(result.scales, result.rows, columns + 2, case.offsets)
    codes = codes.view(torch.uint8)
    assert codes[:, :columns].all()
    assert not codes[:, columns:].any()


def test_a_bias_in_rows_of_a_larger_tensor():
    """Rows of a bias need not be contiguous."""
    case = PLAIN_BIASED
    expected, _ = cases.run(case)
    wide = torch.full((2, 80), float("nan"))[:, 4:76]
    wide.copy_(case.added())
    assert torch.equal(cases.run(case, bias=wide)[0], expected)


W4A8 = Case((3, 0, 130), 320, 96, "mxfp4", 16, FORMS["gpt-oss"], "fp32", x_fmt="mxfp8")


@pytest.mark.parametrize("k", [128, 192, 256, 448, 2880])
@pytest.mark.parametrize("tile", [16, 128, 256])
def test_mixed_formats_have_windows_up_to_the_end_of_k(tile, k):
    """The last window begins a step early if K is an odd number of steps of 64; bytes after w are
    not allocated."""
    check(replace(W4A8, k=k, counts=(3, 0, 16), tile_rows=tile))


def test_mixed_formats_are_those_of_x_and_w():
    """E2M1 is a subset of E4M3, and both have the same scales: weights in mxfp8 with the same
    values give the same bits."""
    x, w = W4A8.inputs()
    elements = e2m1.unpacked(w.data.view(torch.uint8)).to(torch.float8_e4m3fn)
    wide = of_bytes(elements, w.scales, "mxfp8")
    with cases.checked():
        mixed, one = (grouped_gemm(x, each, W4A8.offsets, **W4A8.options()) for each in (w, wide))
    assert torch.equal(mixed, one)


def test_recorded_copies_bring_the_bytes_that_barriers_expect():
    """Padding is not counted: a model of time would wait forever."""
    with emulation(Options(record=True)) as run:
        grouped_gemm(*W4A8.inputs(), W4A8.offsets, **W4A8.options())
    expected: Counter = Counter()
    brought: Counter = Counter()
    for report in run.reports:
        for warp in report.launches[0].recording.warps:
            for event in warp.events:
                if event.what in (EXPECT, LOAD):
                    (expected if event.what == EXPECT else brought).update(dict(event.signals))
    assert brought == expected
    assert brought.total() > 0


@pytest.mark.parametrize("change", [
    ("in_w = block, block + (K_BLOCKS - count) * plan.pads_w", "in_w = block, block"),
    ("(in_w, in_x) if", "(in_x, in_w) if"),
], ids=str)  # fmt: skip
def test_a_wrong_end_of_a_window_is_noticed(change, changed):
    changed(mma, [kernel], "Mma", change)
    with pytest.raises(AssertionError):
        check(replace(W4A8, counts=(3, 0, 16), tile_rows=16))


# ---- A problem has the same bits with tiles of any size, and with or without the carrying
# epilogue: K is added up in the same order, and sums are processed alike

OTHERS = [tile_rows for tile_rows in TILE_ROWS if tile_rows != 128]
LARGER = [tile_rows for tile_rows in OTHERS if tile_rows not in FEW]

# No expert has more than 8 rows, so that every tile is possible.
SMALL = Case((8, 0, 1, 7), 192, 160, "nvfp4", 32, FORMS["deepseek"], "fp32", amax=True, bias=True)
# More rows than any tile has; a K tail of a stage.
LARGE = Case((33, 0, 257, 64, 1), 352, 96, "nvfp4", 16, FORMS["gpt-oss"], "bf16", per_token=True)
PLAIN = replace(LARGE, form=None, granularity=0, columns=200)

TILE_CASES = [(SMALL, tile_rows) for tile_rows in OTHERS]
TILE_CASES += [
    (replace(case, fmt=fmt, out=out, per_token=case.per_token and fmt == "nvfp4"), tile_rows)
    for number, (case, tiles) in enumerate(((SMALL, OTHERS), (LARGE, LARGER), (PLAIN, LARGER)))
    for fmt, out in (
        ("nvfp4", ("fp16", "nvfp4", "bf16")[number]),
        ("mxfp8", ("mxfp8", "fp32", "fp16")[number]),
        ("mxfp4", ("bf16", "mxfp4", "fp32")[number]),
    )
    for tile_rows in tiles
]


@pytest.mark.parametrize(("case", "tile_rows"), TILE_CASES, ids=str)
def test_every_tile_gives_the_same_bits(case, tile_rows):
    assert_same(replace(case, tile_rows=128), replace(case, tile_rows=tile_rows))


def assert_same(case: Case, other: Case) -> None:
    (expected, amax), (result, other_amax) = cases.run(case), cases.run(other)
    assert cases.same_bits(result, expected, case.offsets)
    assert amax == other_amax


@pytest.mark.parametrize("tile_rows", [128, 256])
@pytest.mark.parametrize("out", ["nvfp4", "fp32"])
def test_wide_tiles_and_the_carrying_path_give_the_same_bits(tile_rows, out):
    """256 columns compared with 128; SiLU of gate carried to the subtile of up, compared with both
    at once."""
    case = replace(LARGE, granularity=8, amax=True, out=out, tile_rows=tile_rows, tile_n=128)
    for changes in ({"tile_n": 256}, {"carry": True}, {"tile_n": 256, "carry": True}):
        assert_same(case, replace(case, **changes))


@pytest.mark.parametrize("tile_rows", [64, 128, 256])
def test_a_dependent_launch_gives_the_same_bits(tile_rows):
    case = replace(LARGE, out="nvfp4", tile_rows=tile_rows)
    assert_same(case, replace(case, pdl=True))


@pytest.mark.parametrize("tile_rows", [64, 256])
def test_weights_that_are_fetched_early_give_the_same_bits(tile_rows):
    """More stages of K than the ring has, several tiles per CTA, biases."""
    case = replace(LARGE, out="nvfp4", tile_rows=tile_rows, bias=True, k=2048)
    assert_same(case, replace(case, pdl=True, w_ready=True))
