"""Features that only the Hopper kernel has: Q in fp16 with keys in e4m3, and steps of 32 keys."""

from __future__ import annotations

import pytest
import torch

from gqa_lowlatency import decode
from lab.problems.attention import PATIENCE
from lab.problems.decode import Case, verdicts
from ptxemu import Options
from tests.gqa_lowlatency import cases

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCH = "sm_90a"
CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)
FP8 = {"kv_dtype": "e4m3", "scales": "heads", "tuning": (("step", 32), ("stages", 3))}
WIDE = (
    Case((700, 33, 0), (16, 2), cluster=2, **FP8),
    Case((300, 31), (8, 1), 2, cluster=1, keys=16, **FP8),  # two pages in a step
    Case((300, 31), (8, 1), cluster=2, keys=32, window=100, sink_tokens=9, softcap=15.0, **FP8),
    Case((290,), (32, 1), head_dim=64, cluster=1, pdl="ready", **FP8),
    Case((290,), (5, 1), head_dim=64, cluster=2, tuning=(("step", 32), ("warps", 4))),
)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_steps_of_32_keys(case):
    cases.check(case, ARCH, CHECKED, ADVERSARIAL)


def problem() -> tuple[torch.Tensor, ...]:
    """q, k and v; two rows of Q are not representable in fp16, one is zero."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((1, 3, 128), generator=generator)
    q[0, 0] *= torch.exp2(torch.randint(-30, 1, (128,), generator=generator).float())
    q[0, 1] = 0.0
    k, v = torch.randn((2, 1, 70, 1, 128), generator=generator).to(torch.float8_e4m3fn)
    return q.bfloat16(), k, v


def decoded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> list[torch.Tensor]:
    return list(decode(q, k, v, scale=scale, arch=ARCH, return_lse=True))


def test_elements_of_q_may_be_far_apart():
    tensors = problem()
    options = {"scale": 1.0, "arch": ARCH}
    results = decoded(*tensors, 1.0)
    cases.expect(verdicts(tensors, options, results, torch.bfloat16))


@pytest.mark.parametrize("exponent", [-38, -20, 20, 38])
def test_a_power_of_two_moves_from_the_scale_to_q_without_a_bit(exponent):
    """fp16 represents neither 2^38 nor 2^-38."""
    q, k, v = problem()
    expected = decoded(q, k, v, 1.0)
    moved = decoded(q * 2.0**exponent, k, v, 2.0**-exponent)
    assert cases.same_bits(moved, expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38, 2.0**-133])
def test_extreme_elements_of_q_stay_in_their_row(value):
    q, k, v = problem()
    expected = decoded(q, k, v, 1.0)
    q[0, 2, 5] = value
    found = decoded(q, k, v, 1.0)
    for new, old in zip(found, expected, strict=True):
        assert torch.equal(new[0, :2], old[0, :2])
    assert found[0][0, 2].isnan().any() == (abs(value) > 1 or value != value)
