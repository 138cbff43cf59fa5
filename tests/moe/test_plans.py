"""A planned product and a planned layer: the bits of a call, contents that change, an amax in
place, scales that have to be known. tests/kernelkit/test_call_plan.py tests what all plans share.
"""

from __future__ import annotations

import pytest
import torch

from lab.problems.grouped_gemm import Case, checked
from moe.api import fused_moe, fused_moe_plan, grouped_gemm, grouped_gemm_plan
from moe.arguments import Activation, Router, Scales
from moe.packing import pack

QUANTISED = Case((3, 0, 2), 128, 64, out="nvfp4", amax=True, bias=True)
MIXED = Case((2, 1), 192, 64, "mxfp4", out="fp32", amax=True, x_fmt="mxfp8")
PLAIN = Case((2, 1), 64, 64, "mxfp8", 0, None, "fp32", amax=True)


pytestmark = pytest.mark.usefixtures("three_ctas")


def parts(result) -> list[torch.Tensor]:
    """Elements and scales of a tensor or Quantized."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [result.data.view(torch.uint8), result.encode_scale, result.decode_scale]


@pytest.mark.parametrize("case", [QUANTISED, MIXED, PLAIN], ids=str)
def test_a_plan_gives_the_bits_of_a_call_whenever_contents_change(case):
    (x, w), offsets, options = case.inputs(), case.offsets, case.options()
    amax = options["amax"]
    plan = grouped_gemm_plan(x, w, offsets, **options)

    def planned() -> list[torch.Tensor]:
        """Run the plan; compare the result and its amax with a call."""
        amax.zero_()
        assert plan() is plan.result
        found = [part.clone() for part in (*parts(plan.result), amax)]
        amax.zero_()
        expected = grouped_gemm(x, w, offsets, **options)
        assert all(map(torch.equal, found, (*parts(expected), amax)))
        return found

    with checked():
        first = planned()
        x.data.view(torch.uint8).bitwise_xor_(0x80)  # flips the signs of some
        offsets[1] -= 1
        second = planned()
        assert not torch.equal(first[0], second[0])
        if options["bias"] is not None:
            options["bias"] += 1.0
            assert not torch.equal(second[0], planned()[0])
        amax.fill_(1e30)
        plan()
        assert amax == 1e30


def test_no_rows_no_launch(no_compile):
    case = Case((0, 0), 128, 64)
    assert grouped_gemm_plan(*case.inputs(), case.offsets)().shape == (0, 128)


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"most_rows": 1}, ValueError, "most_rows 1: 2 experts have 3 rows together"),
    ({"x": torch.zeros(1)}, TypeError, "x is Tensor"),
    ({"rows_most": 1}, TypeError, "rows_most"),
    ({"activation": Activation(12)}, NotImplementedError, "granularity 12"),
    ({"out": torch.int8}, NotImplementedError, "out torch.int8"),
])  # fmt: skip
def test_a_plan_refuses_by_name(no_compile, changes, error, words):
    (x, w), options = PLAIN.inputs(), PLAIN.options()
    with pytest.raises(error, match=words):
        grouped_gemm_plan(**{"x": x, "w": w, "offsets": PLAIN.offsets} | options | changes)


def layer(fmt: str) -> tuple:
    """Arguments of a plan of a layer, options last."""
    generator = torch.Generator().manual_seed(4)
    w13, w2 = torch.randn(3, 128, 64, generator=generator), torch.randn(3, 64, 64)
    experts = pack(w13.bfloat16() / 8, w2.bfloat16() / 8, fmt, granularity=8)
    known = Scales(torch.tensor([500.0]), torch.tensor([300.0]))
    scales = known if fmt == "nvfp4" else Scales(h_amax=torch.zeros(1))
    x = torch.randn(3, 64, generator=generator).bfloat16()
    options = {"scales": scales, "activations": fmt}
    return x, experts, torch.randn(3, 3, generator=generator), Router(2), options


@pytest.mark.parametrize(("fmt", "scales"), [
    ("nvfp4", {}), ("nvfp4", {"scales": Scales()}),
    ("nvfp4", {"scales": Scales("tensor", "tensor")}),
    ("mxfp8", {}),
], ids=["nvfp4", "nvfp4-found", "nvfp4-tensor", "mxfp8"])  # fmt: skip
def test_a_planned_layer_gives_the_bits_of_a_call_whenever_contents_change(fmt, scales):
    *tensors, options = layer(fmt)
    options |= scales
    x, _, logits, _ = tensors
    with checked() as active:
        plan = fused_moe_plan(*tensors, **options)
        first = plan.result.clone()
        assert torch.equal(first, fused_moe(*tensors, **options))
        x.mul_(-1.5)
        logits.copy_(logits.flip(1))
        planned = len(active.reports)
        assert plan() is plan.result
        repeated = len(active.reports) - planned
        assert torch.equal(plan.result, fused_moe(*tensors, **options))
        assert len(active.reports) == planned + 2 * repeated
    assert not torch.equal(first, plan.result)


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"scales": Scales("row")}, ValueError, "scales.x 'row'"),
    ({"logits": torch.zeros(3, 1).expand(3, 3)}, ValueError, "router_logits has strides"),
    ({"router": Router(2, logit_bias=torch.zeros(1).expand(3))}, ValueError,
     "logit_bias has strides"),
    ({"expert_range": (1, 2)}, ValueError, r"expert_range \(1, 2\), but 3 are packed"),
    ({"expert_range": 3}, TypeError, "expert_range is 3"),
    ({"x": None}, TypeError, "x is NoneType"),
    ({"tile_rows": 2}, NotImplementedError, "tile_rows 2"),
    ({"scales": {"h": 1.0}}, TypeError, "scales is dict"),
    ({"rows": 2}, TypeError, "rows"),
])  # fmt: skip
def test_a_planned_layer_refuses_by_name(no_compile, changes, error, words):
    x, experts, logits, router, options = layer("nvfp4")
    given = {"x": x, "logits": logits, "router": router} | options | changes
    x, logits, router = (given.pop(name) for name in ("x", "logits", "router"))
    with pytest.raises(error, match=words):
        fused_moe_plan(x, experts, logits, router, **given)
