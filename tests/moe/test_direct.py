"""A planned product or layer: the bits of a call, contents that change, tensors that it keeps."""

from __future__ import annotations

import gc
import weakref
from typing import ClassVar

import pytest
import torch

from kernelkit.launch import emulation
from moe import direct, forward
from moe.grouped import Activation, grouped_gemm, grouped_gemm_plan
from moe.layer import Router, Scales, fused_moe, fused_moe_plan
from moe.packing import pack
from workbench.problems.grouped_gemm import CHECKED, DTYPES, Case

QUANTISED = Case((3, 0, 2), 128, 64, out="nvfp4", amax=True)
PLAIN = Case((2, 1), 64, 64, "mxfp8", 0, None, "fp32")


@pytest.fixture(autouse=True)
def two_ctas(monkeypatch):
    monkeypatch.setattr(forward, "sms_of", lambda device: 2)


def given(case: Case) -> tuple[tuple, dict]:
    x, w = case.inputs()
    out = DTYPES.get(case.out, case.out)
    options = {"activation": case.activation, "out": out, "encode_scale": case.encode_scale()}
    return (x, w, case.offsets), options


def parts(result) -> list[torch.Tensor]:
    """Elements, and what a tensor or Quantized has besides that rows are read with."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [result.data.view(torch.uint8), result.encode_scale, result.decode_scale]


@pytest.mark.parametrize(
    "case", [QUANTISED, PLAIN], ids=str
)
def test_a_plan_gives_the_bits_of_a_call_whenever_contents_change(case):
    (x, w, offsets), options = given(case)
    plan = grouped_gemm_plan(x, w, offsets, **options)
    with emulation(CHECKED) as active:
        first = [part.clone() for part in parts(plan())]
        assert all(map(torch.equal, first, parts(grouped_gemm(x, w, offsets, **options))))
        x.data.view(torch.uint8).bitwise_xor_(1)
        offsets[1] -= 1
        assert plan() is plan.result
        second = parts(plan.result)
        assert all(map(torch.equal, second, parts(grouped_gemm(x, w, offsets, **options))))
    assert not torch.equal(first[0], second[0])
    assert not any(report.findings for report in active.reports)


class Forgetful:
    """As a prepared launch on a GPU: it knows addresses and holds no tensor."""

    made: ClassVar[list] = []

    def __init__(self, *given) -> None:
        self.launch = lambda: None
        self.made.append(weakref.ref(self))


def test_a_plan_keeps_what_it_reads_and_writes(monkeypatch):
    monkeypatch.setattr(direct, "PreparedLaunch", Forgetful)
    (x, w, offsets), options = given(QUANTISED)
    amax = torch.zeros(1)
    plan = grouped_gemm_plan(x, w, offsets, amax=amax, **options)
    read = (x.data, x.scales, x.decode_scale, w.data, w.scales, w.decode_scale, offsets, amax)
    wanted = [weakref.ref(tensor) for tensor in (*read, options["encode_scale"])] + Forgetful.made
    assert len(wanted) == 10
    del x, w, offsets, amax, options, read
    gc.collect()
    assert all(reference() is not None for reference in wanted)
    assert plan() is plan.result


def test_nothing_is_compiled_or_checked_again(monkeypatch, no_compiles):
    (x, w, offsets), options = given(PLAIN)
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        grouped_gemm_plan(x, w, offsets, activation=None, out=torch.float16)
    monkeypatch.undo()
    monkeypatch.setattr(forward, "sms_of", lambda device: 2)
    plan = grouped_gemm_plan(x, w, offsets, **options)
    monkeypatch.setattr(forward, "launch", lambda *_: pytest.fail("launched anew"))
    monkeypatch.setattr("kernelkit.compile.compile_once", lambda *_: pytest.fail("compiled"))
    plan()


def test_no_rows_no_launch(no_compiles):
    (x, w, offsets), options = given(Case((0, 0), 128, 64))
    assert grouped_gemm_plan(x, w, offsets, **options)().shape == (0, 64)


def test_a_plan_refuses_what_a_call_refuses(no_compiles):
    (x, w, offsets), options = given(PLAIN)
    with pytest.raises(ValueError, match="most_rows 1: 2 experts have 3 rows together"):
        grouped_gemm_plan(x, w, offsets, most_rows=1)
    with pytest.raises(TypeError, match="x is Tensor"):
        grouped_gemm_plan(x.data, w, offsets)
    with pytest.raises(TypeError, match="rows_most"):
        grouped_gemm_plan(x, w, offsets, rows_most=1)
    with pytest.raises(NotImplementedError, match="granularity 12"):
        grouped_gemm_plan(x, w, offsets, activation=Activation(12))
    assert options


def layer(fmt: str) -> tuple:
    """What a plan of a layer takes, options last."""
    generator = torch.Generator().manual_seed(4)
    w13, w2 = torch.randn(3, 128, 64, generator=generator), torch.randn(3, 64, 64)
    experts = pack(w13.bfloat16() / 8, w2.bfloat16() / 8, fmt, granularity=8)
    known = Scales(torch.tensor([500.0]), torch.tensor([300.0]))
    scales = known if fmt == "nvfp4" else Scales(h_amax=torch.zeros(1))
    x = torch.randn(3, 64, generator=generator).bfloat16()
    return x, experts, torch.randn(3, 3, generator=generator), Router(2), {"scales": scales}


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8"])
def test_a_planned_layer_gives_the_bits_of_a_call_whenever_contents_change(fmt):
    *tensors, options = layer(fmt)
    x, _, logits, _ = tensors
    with emulation(CHECKED) as active:
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
    assert not any(report.findings for report in active.reports)


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"scales": None}, ValueError, "scales.x is None: a plan takes one that is known"),
    ({"scales": Scales(torch.ones(1), "token")}, ValueError, "scales.h is 'token'"),
    ({"logits": torch.zeros(3, 1).expand(3, 3)}, ValueError, "router_logits has strides"),
    ({"x": None}, TypeError, "x is NoneType"),
    ({"tile_rows": 2}, NotImplementedError, "tile_rows 2"),
    ({"rows": 2}, TypeError, "rows"),
])  # fmt: skip
def test_a_planned_layer_refuses_by_name(no_compiles, changes, error, words):
    x, experts, logits, router, options = layer("nvfp4")
    given = {"x": x, "logits": logits} | options | changes
    x, logits = given.pop("x"), given.pop("logits")
    with pytest.raises(error, match=words):
        fused_moe_plan(x, experts, logits, router, **given)
