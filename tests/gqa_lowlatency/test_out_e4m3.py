"""O in e4m3, divided by out_scale, where one CTA, a cluster or several clusters finish it."""

from __future__ import annotations

import math

import pytest
import torch

from gqa_lowlatency import DecodeConfig, decode, decode_plan, reference
from gqa_lowlatency.shared import finish
from kernelkit.device import narrow
from kernelkit.numerics import tolerance
from lab.problems.attention import PATIENCE, same_bits
from lab.problems.decode import Case, judge
from ptxemu import Options
from tests.gqa_lowlatency.cases import check, run

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCHS = ("sm_90a", "sm_100a", "sm_89")  # the last one has no clusters
E4M3 = torch.float8_e4m3fn
OUT = {"out_dtype": "e4m3", "out_scale": 0.0006}  # some of O is above 448 x 0.0006
CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)
CASES = [
    Case((70, 9), (4, 2), head_dim=64, cluster=2, **OUT),
    Case((300, 130), (8, 1), window=100, sinks=True, parts=2, cluster=1, keys=16, **OUT),
    Case((700,), (3, 1), tokens=3, kv_dtype="e4m3", scales="heads", head_dim=256, **OUT),
    Case((128, 0), (16, 1), tokens=2, dtype="fp16", out_dtype="e4m3", causal=False),
]


@pytest.mark.parametrize(
    ("case", "arch"),
    [(case, arch) for case in CASES for arch in ARCHS if arch != "sm_89" or case.cluster < 2],
    ids=str,
)
def test_every_finish(case, arch):
    check(case, arch, CHECKED, ADVERSARIAL)


def hostile() -> tuple[torch.Tensor, ...]:
    """q, k, v whose columns 0, 1 and 2 of O are NaN, inf and -inf, and column 3 is 0."""
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(n)).bfloat16()
               for n, shape in enumerate([(2, 4, 64), (2, 40, 2, 64), (2, 40, 2, 64)]))  # fmt: skip
    v[..., :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    return q, k, v


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_too_large_numbers_saturate_and_nan_stays(arch):
    """A scale on the device is read by each launch, of calls and of plans, without compiling."""
    q, k, v = hostile()
    room, scale = torch.full((2, 4, 80), math.nan).to(E4M3), torch.ones(())
    out, options = room[..., :64], {"arch": arch, "config": DecodeConfig(cluster=1)}
    plan = decode_plan(q, k, v, out_dtype=E4M3, out_scale=scale, **options)
    for number in (2.0**-126, 2.0**-10):
        scale.fill_(number)
        decode(q, k, v, out=out, out_scale=scale, **options)
        exact, rounded = (of(q, k, v, out_scale=number, out_dtype=torch.float32, arch=arch).o
                          for of in (reference.definition, reference.rounded))  # fmt: skip
        report = tolerance.compare_e4m3(out, exact, rounded, torch.bfloat16)
        assert report.ok, str(report)
        assert out[..., 0].isnan().all()
        assert (out[..., 1:4].float() == torch.tensor([448.0, -448.0, 0.0])).all()
        assert room[..., 64:].isnan().all()
        by_number = decode(q, k, v, out_dtype=E4M3, out_scale=number, **options)
        assert same_bits((out, out), (plan(q, k, v)[0], by_number))


def test_a_kernel_that_ignores_the_scale_is_noticed(changed):
    changed(narrow, [finish], "to_e4m3", ("(factor is not None)", "(False)"))
    reports = judge(CASES[0], "sm_90a", run(CASES[0], "sm_90a"))
    assert [report.ok for report in reports] == [False, True]
