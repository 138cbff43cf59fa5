"""O in e4m3, divided by out_scale: every way in which a kernel stores O, and the judge of it."""

from __future__ import annotations

import math

import pytest
import torch

from fmha import AttentionConfig, attention, attention_plan, reference
from fmha.shared import epilogue as rows
from fmha.sm90 import epilogue as sm90
from kernelkit.device import narrow
from kernelkit.numerics import tolerance
from kernelkit.numerics.definition import saturated
from lab.problems.attention import Case, same_bits
from tests.fmha import test_kernel
from tests.fmha.test_kernel import TWO_POLICIES
from tests.fmha.test_sm90 import noticed

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

E4M3 = torch.float8_e4m3fn
OUT = {"out_dtype": "e4m3", "out_scale": 0.004}  # some of O is above 448 x 0.004
FP8 = {"dtype": "bf16", "kv_dtype": "e4m3", "scales": True}
PACKED = {"q_lens": (37, 3), "k_lens": (70, 100)}
RAGGED = {"kv_lens": (90, 31), "causal": True, "window": (40, 0)}


def case(*heads: int, **fields: object) -> Case:
    return Case(40, 100, heads or (2, 1), **{"batch": 2} | OUT | fields)


KINDS = [
    ("sm_100a", case(1, 1, causal=True, batch=1)),
    ("sm_90a", case(1, 1, q_lens=(9, 3), k_lens=(20, 70))),
    ("sm_89", case(1, 1, dims=(32, 32), batch=1)),
    ("sm_100a", case(**RAGGED)),
    ("sm_90a", case(2, 1, causal=True)),
    ("sm_100a", case(dims=(96, 96), sinks=True, out_scale=0.0)),
    ("sm_100a", case(8, 1, dims=(128, 128), schedule="pingpong", pack_heads=True)),
    ("sm_100a", case(dims=(192, 128), **FP8)),
    ("sm_100a", case(dims=(256, 256), **PACKED)),
    ("sm_100a", case(1, 1, dims=(512, 512), rope_dim=64)),
    ("sm_90a", case(dims=(96, 96), **RAGGED)),
    ("sm_90a", case(8, 1, dims=(128, 128), dtype="fp16", rope_dim=16, out_scale=0.0)),
    ("sm_90a", case(dims=(192, 128), **FP8)),
    ("sm_90a", case(dims=(256, 256), page_size=16, kv_lens=(90, 31))),
    ("sm_90a", case(1, 1, dims=(512, 512), **PACKED)),
    ("sm_120a", case(dims=(80, 48), rope_dim=16, **PACKED)),
    ("sm_89", case(4, 1, dims=(128, 128), sinks=True, pack_heads=True)),
    ("sm_120a", case(dims=(256, 256), softcap=20.0)),
    ("sm_89", case(1, 1, dims=(512, 512), **RAGGED)),
]


@pytest.mark.parametrize(("arch", "problem"), KINDS, ids=str)
def test_every_store(arch, problem):
    test_kernel.check(problem, TWO_POLICIES, arch)


def hostile() -> tuple[torch.Tensor, ...]:
    """q, k, v whose columns 0, 1 and 2 of O are NaN, inf and -inf, and column 3 is 0."""
    q, k, v = (torch.randn(1, 20, 2, 64, generator=torch.Generator().manual_seed(n)).bfloat16()
               for n in range(3))  # fmt: skip
    v[..., :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    return q, k, v


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a", "sm_89"])
def test_too_large_numbers_saturate_and_nan_stays(arch):
    """Also with the smallest scale, which makes 448 of all numbers but 0."""
    q, k, v = hostile()
    room = torch.full((1, 20, 2, 80), math.nan).to(E4M3)
    out = room[..., :64]
    for scale in (torch.tensor(2.0**-126), torch.tensor(2.0**-10), 2.0**-10):
        attention(q, k, v, out=out, out_scale=scale, arch=arch)
        exact = reference.definition(q, k, v, out_scale=scale).o
        rounded = reference.rounded(q, k, v, out_scale=scale, out_dtype=torch.float32).o
        report = tolerance.compare_e4m3(out, exact, rounded, torch.bfloat16)
        assert report.ok, str(report)
        assert out[..., 0].isnan().all()
        assert (out[..., 1:4].float() == torch.tensor([448.0, -448.0, 0.0])).all()
        assert room[..., 64:].isnan().all()


def test_a_scale_on_the_device_is_read_in_place():
    """A call with another number launches the same kernel, and a plan reads it when it is called;
    without a scale O is divided by 1."""
    q, k, v = hostile()
    scale, options = torch.tensor([0.25]), {"causal": True, "arch": "sm_90a"}
    plan = attention_plan(q, k, v, out_dtype=E4M3, out_scale=scale, **options)
    wide, expected_lse = attention(q, k, v, out_dtype=torch.float32, return_lse=True, **options)
    for number in (0.25, 1.0):
        scale.fill_(number)
        found = attention(q, k, v, out_dtype=E4M3, out_scale=scale, **options)
        by_number = attention(q, k, v, out_dtype=E4M3, out_scale=number, **options)
        assert same_bits((found, found), (plan(q, k, v)[0], by_number))
        assert torch.equal(found[..., 3:].float(), saturated(wide / number, E4M3)[..., 3:].float())
    plain, lse = attention(q, k, v, out_dtype=E4M3, return_lse=True, **options)
    assert same_bits((plain, lse), (found, expected_lse))


def test_a_kernel_that_ignores_the_scale_is_noticed(changed):
    changed(narrow, [rows], "to_e4m3", ("(factor is not None)", "(False)"))
    assert noticed(case(), "sm_90a")


def test_a_kernel_that_mixes_rows_is_noticed(changed):
    changed(rows, [sm90], "store_pieces", ("0x7632 if half", "0x5410 if half"))
    assert noticed(case(), "sm_90a")


def test_the_judge_sees_one_code_of_difference():
    """PTX has no conversion to e4m3 that does not saturate; the judge refuses NaN in its place."""
    exact = torch.tensor([[1.0, 1.05, 1.07, 500.0, 0.0012, 0.0]], dtype=torch.float64)
    right = torch.tensor([[1.0, 1.0, 1.125, 448.0, 0.001953125, 0.0]])

    def verdict(found: torch.Tensor) -> bool:
        row = torch.float32  # rounding errors of 6e-5 at 500
        return tolerance.compare_e4m3(found.to(E4M3), exact, exact.float(), row).ok

    assert verdict(right)
    for place in range(6):
        for step in (-1, 1):
            wrong = right.to(E4M3).view(torch.uint8).clone()
            wrong[0, place] = (int(wrong[0, place]) + step) % 256
            assert not verdict(wrong.view(E4M3).float()), (place, step)


def test_raw_sums_are_refused():
    q, k, v = hostile()
    with pytest.raises(ValueError, match="normalize=False: raw sums leave its range"):
        attention(q, k, v, out_dtype=E4M3, normalize=False)
    config = AttentionConfig(out_dtype="e4m3", normalize=False)
    for broken, words in (
        (config, "raw sums leave its range"),
        (AttentionConfig(out_scale=True), "out_scale with out_dtype bf16: only e4m3 is scaled"),
    ):
        with pytest.raises(ValueError, match=words):
            broken.check_values()
