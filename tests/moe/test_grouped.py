"""The grouped GEMM in the emulator, under the checker: values, outputs, refusals."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from moe.api import grouped_gemm, grouped_gemm_swiglu
from moe.arguments import Activation, SwiGLU
from moe.packing import pack
from ptxemu import Options
from tests.moe.grouped_space import FORMS, MATRIX, QUICK, random_case
from workbench.problems import grouped_gemm as cases
from workbench.problems.grouped_gemm import CHECKED, PATIENCE, Case

GROUPS = 4
SEEDS = 200  # of the sweep

pytestmark = pytest.mark.usefixtures("poisoned_outputs", "three_ctas")


def in_groups(given: Iterable) -> list:
    """Kernels of a matrix are hardly shared, so that workers may share the cases."""
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
    """A problem of the whole space at random, in two orders of events."""
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
    """The same logical weights, packed differently: only their order differs."""
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
