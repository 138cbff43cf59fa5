"""The grouped GEMM in the emulator, under the checker: values, outputs, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from moe import grouped, reference
from moe.config import GroupedConfig
from moe.grouped import Activation, grouped_gemm
from moe.packing import pack
from moe.quantized import Quantized
from moe.sm100.plan import make_plan
from ptxemu import Options
from tests.moe import grouped_cases as cases
from tests.moe.grouped_cases import CHECKED, PATIENCE, Case
from tests.moe.grouped_space import FORMS, MATRIX, QUICK

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture(autouse=True)
def three_ctas(monkeypatch):
    """Each takes several tiles, of several experts."""
    monkeypatch.setattr(grouped, "_sms", lambda device: 3)


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


@pytest.mark.matrix
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_matrix(case):
    check(case)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_adversarial_schedule_gives_the_same_bits(seed):
    case = Case((3, 130, 0, 1), 320, 64, out="mxfp8")
    first, _ = cases.run(case)
    late = Options(policy="adversarial", seed=seed, check=True, limit=PATIENCE)
    second, _ = cases.run(case, late)
    for name in ("data", "scales"):
        mine, other = (getattr(each, name).view(torch.uint8) for each in (first, second))
        if name == "scales":  # what belongs to no row is not written
            mine, other = (
                reference.unswizzle_scales(each, case.rows, 2, offsets=case.offsets)
                for each in (mine, other)
            )
        assert torch.equal(mine, other)


@pytest.mark.parametrize("granularity", [8, 16, 64])
def test_every_granularity_gives_the_same_bits(granularity):
    """The same logical weights, packed differently: only their order differs."""
    case = Case((5, 129), 128, 128, granularity=32)
    torch.manual_seed(0)
    x, _ = case.inputs()
    w13, w2 = torch.randn(2, 256, 128).bfloat16(), torch.randn(2, 128, 128).bfloat16()
    results = [
        grouped_gemm(
            x, pack(w13, w2, granularity=size).w13, case.offsets, activation=Activation(size)
        )
        for size in (32, granularity)
    ]
    assert torch.equal(*results)


def test_the_global_scale_comes_before_the_nonlinearity():
    """Twice the global scale of x is not twice the result: gate is not linear, and limits bite."""
    case = Case((4,), 128, 64, form=FORMS["tight"], out="fp32")
    x, w = case.inputs()
    double = Quantized(x.data, x.scales, x.encode_scale / 2, x.decode_scale * 2, x.fmt)
    results = [
        grouped_gemm(each, w, case.offsets, activation=case.activation, out=torch.float32)
        for each in (x, double)
    ]
    product = 2 * reference.grouped_gemm(x, w, case.offsets)
    gate, up = product.unflatten(1, (-1, 2, 32)).unbind(2)
    exact = reference.swiglu(gate.flatten(1), up.flatten(1), limit=0.25)
    torch.testing.assert_close(results[1].double(), exact, rtol=1e-4, atol=1e-5)
    assert (results[1] - 2 * results[0]).abs().max() > 0.01


def test_a_limit_is_never_dropped():
    case = Case((6,), 128, 64, form=FORMS["tight"], out="fp32", amplitude=8.0)
    limited, _ = cases.run(case)
    free, _ = cases.run(case, activation=Activation(32))
    assert (limited - free).abs().max() > 1.0
    assert limited.abs().max() <= 0.25 * 0.2785  # |up| <= L, and gate sigmoid(gate) >= -0.2785


def test_nan_reaches_its_row_alone():
    case = Case((3, 2), 128, 64, out="fp32", form=FORMS["deepseek"])
    x, w = case.inputs()
    scales = x.scales.clone()
    row = 1
    scales.view(torch.uint8)[row % 32 * 16] = 0x7F  # of its first block
    broken = Quantized(x.data, scales, x.encode_scale, x.decode_scale, x.fmt)
    result = grouped_gemm(broken, w, case.offsets, activation=case.activation, out=torch.float32)
    assert result[row].isnan().all()
    assert result[[0, 2, 3, 4]].isfinite().all()


def _given(**changes):
    case = Case((3, 2), 128, 64)
    x, w = case.inputs()
    return {"x": x, "w": w, "offsets": case.offsets, "activation": case.activation} | changes


OTHER, _ = Case((3, 2), 128, 64, "mxfp8").inputs()
LONGER, _ = Case((3, 2), 256, 64).inputs()
REFUSED = {
    "format": ({"x": OTHER}, ValueError, "mxfp8"),
    "K": ({"x": LONGER}, ValueError, "K = 256"),
    "offsets": ({"offsets": torch.tensor([0, 3, 4]).int()}, ValueError, r"\[0, 3, 4\]"),
    "descending": ({"offsets": torch.tensor([0, 6, 5]).int()}, ValueError, "ascending"),
    "offsets dtype": ({"offsets": torch.tensor([0, 3, 5])}, ValueError, "offsets"),
    "experts": ({"offsets": torch.tensor([0, 1, 3, 5]).int()}, ValueError, "offsets"),
    "granularity": ({"activation": Activation(12)}, NotImplementedError, "granularity 12"),
    "limit": ({"activation": Activation(32, limit=-1.0)}, ValueError, "limit -1.0"),
    "out": ({"out": torch.float64}, NotImplementedError, "float64"),
    "out format": ({"out": "int4"}, NotImplementedError, "int4"),
    "no encode scale": ({"out": "nvfp4"}, ValueError, "encode_scale"),
    "encode scale": ({"encode_scale": torch.ones(1)}, ValueError, "encode_scale"),
    "amax": ({"amax": torch.zeros(2)}, ValueError, "amax"),
    "arch": ({"arch": "sm_90a"}, NotImplementedError, "sm_90a"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_value(name):
    change, error, words = REFUSED[name]
    given = _given(**change)
    x, w, offsets = (given.pop(key) for key in ("x", "w", "offsets"))
    with pytest.raises(error, match=words):
        grouped_gemm(x, w, offsets, **given)


@pytest.mark.parametrize(
    ("config", "stages", "stage_bytes", "columns"),
    [  # 128 + tile_n rows of 128 bytes, and 512 bytes of scale factors for 128 rows by four
        (GroupedConfig(), 6, 36_864, 288),
        (GroupedConfig(fmt="mxfp4"), 6, 34_816, 272),
        (GroupedConfig(fmt="mxfp8"), 6, 33_792, 264),
        (GroupedConfig(tile_n=64, granularity=16), 8, 28_672, 160),
    ],
)
def test_shared_and_tensor_memory(config, stages, stage_bytes, columns):
    plan = make_plan(config)
    assert (plan.stages, plan.stage_bytes) == (stages, stage_bytes)
    assert max(item.end for item in plan.tmem.ranges) == columns
    assert plan.tmem.allocated <= 512
    assert plan.smem.bytes <= 232_448
    assert math.prod((plan.k_block, 4)) == plan.k_stage
