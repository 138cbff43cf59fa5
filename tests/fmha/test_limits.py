"""The limits of `make_plan` are those of the machine. A config inside a limit runs; one outside,
with the check disabled, is refused by the DSL, ptxas or ptxemu. And every accepted config runs.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch

import fmha.choose
import fmha.launch
import fmha.sm100.kernel
from fmha import AttentionConfig, attention
from fmha.plan import make_plan, plan_unchecked
from lab.problems import attention as cases
from lab.problems.attention import Case
from ptxemu.errors import Deadlock, HardwareRefusal
from tests.fmha import space
from tests.support.pairwise import random_row


@pytest.fixture
def forced(monkeypatch):
    """Disable every check of a config in fmha."""
    monkeypatch.setattr(AttentionConfig, "check_values", lambda config: None)
    monkeypatch.setattr(fmha.choose, "check_config", lambda config, arch: None)
    monkeypatch.setattr(fmha.launch, "decide", fmha.choose.decide.__wrapped__)
    monkeypatch.setattr(fmha.sm100.kernel, "make_plan", plan_unchecked)


def attend(dims: tuple[int, int], tuning: dict[str, Any], **changes: Any) -> None:
    """Run a small problem whose last key tile is ragged; its result has to be right."""
    case = Case(5, 300, kv_lens=(200,), dims=dims, dtype="fp16")
    results, _ = cases.run_reported(
        case, "round-robin", config=AttentionConfig(**tuning), **changes
    )
    for report in cases.judge(case, results):
        assert report.ok, str(report)


# Just inside: each is the last value within one or several limits.
INSIDE = {
    "shared memory and one K piece": ((64, 64), {"k_stages": 1, "v_stages": 11}),
    "shared memory of a pair": ((512, 512), {"k_stages": 2, "v_stages": 2}),
    "all columns of TMEM": ((128, 128), {"schedule": "pingpong"}),
    "P in TMEM, one tile of V": (
        (256, 256), {"k_stages": 1, "v_stages": 2},
    ),
}  # fmt: skip

# Just outside: the config, what refuses it, and the message.
OUTSIDE = {
    "shared memory": (
        (64, 64), {"k_stages": 1, "v_stages": 12}, HardwareRefusal, "may have 232448",
    ),
    "shared memory of a pair": (
        (512, 512), {"k_stages": 2, "v_stages": 3}, HardwareRefusal, "may have 232448",
    ),
    "columns of TMEM": (
        (256, 256), {"schedule": "pingpong", "v_stages": 2}, ValueError, "but got 1024",
    ),
    "a part of a tile of V": (
        (512, 512), {"k_stages": 2, "v_stages": 1}, Deadlock, "no warp can go on",
    ),
    "no K piece": ((64, 64), {"k_stages": -1}, ValueError, "must be greater than 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_just_inside_runs(name):
    attend(*INSIDE[name])


@pytest.mark.parametrize("name", OUTSIDE)
def test_just_outside_is_refused(name, forced):
    dims, tuning, error, words = OUTSIDE[name]
    with pytest.raises(error, match=words):
        attend(dims, tuning)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("size", [1, 2, 4, 17, 132])
def test_small_pages_by_tma_are_refused(size, arch):
    """The mma.sync kernel accepts such pages: tests/fmha/test_mma_sync.py."""
    q, pool = torch.zeros(1, 5, 1, 64).half(), torch.zeros(33, size, 1, 64).half()
    table, lens = torch.arange(33).int()[None], torch.tensor([33], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=f"page_size {size} with TMA: a multiple of 8"):
        attention(q, pool, pool, page_table=table, kv_lens=lens, arch=arch)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a", "sm_89"])
@pytest.mark.parametrize("size", [24, 528])
@pytest.mark.parametrize(
    "case",
    [
        Case(40, 700, (4, 2), batch=2, kv_lens=(700, 61), causal=True),
        Case(130, 600, (2, 1), batch=2, kv_lens=(600, 529), dims=(128, 128), causal=True,
             window=(200, None), sink_tokens=9),
        Case(30, 560, (4, 1), kv_lens=(541,), dims=(256, 256)),
    ],
    ids=["64", "128", "256"],
)  # fmt: skip
def test_pages_of_any_multiple_of_8(case, size, arch):
    """Pages of hybrid models are included, such as 528 = 33 x 16."""
    results, _ = cases.run_reported(replace(case, page_size=size), "round-robin", arch=arch)
    for report in cases.judge(replace(case, page_size=size), results):
        assert report.ok, str(report)


def test_pages_of_one_key_are_refused(forced):
    """Pages of one key are not aligned for TMA."""
    q, pool = torch.zeros(1, 5, 1, 96).half(), torch.zeros(33, 1, 1, 96).half()
    table, lens = torch.arange(33).int()[None], torch.tensor([33], dtype=torch.int32)
    with pytest.raises(HardwareRefusal, match="128-byte aligned"):
        attention(q, pool, pool, page_table=table, kv_lens=lens)


def climb(log2_growth: float, rescale_log2: float) -> torch.Tensor:
    """O of a row whose maximum grows by 2 ** log2_growth in the last visited tile."""
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, 300, 1, 64), torch.ones(1, 300, 1, 64)
    q[..., 0] = k[:, 5, :, 0] = 1.0
    tensors = (tensor.half() for tensor in (q, k, v))
    scale = log2_growth * torch.log(torch.tensor(2.0)).item()
    return attention(*tensors, scale=scale, config=AttentionConfig(rescale_log2=rescale_log2))


def test_a_lag_that_fp16_holds():
    """Weights of at most 2 ** 15; a larger step rescales."""
    for growth in (14.5, 16.5):
        torch.testing.assert_close(climb(growth, 15.0), torch.ones(1, 1, 1, 64).half())


def test_a_lag_that_fp16_does_not_hold_overflows(forced):
    assert not climb(16.5, 17.0).isfinite().any()


def accepted(seed: int) -> tuple[Case, AttentionConfig, dict[str, bool]]:
    """A random problem of few tiles with random tunable fields that `make_plan` accepts."""
    generator = random.Random(seed)
    case = None
    while case is None or case.queries[0] > 5:
        case = space.case_of(random_row(space.SPACE, generator))
    tuning = AttentionConfig(head_dim=case.dims[0], v_head_dim=case.dims[1], out_dtype="fp32")
    while True:
        schedule = generator.choice(("base", "pingpong"))
        rings = {"k_stages": generator.randint(1, 6), "v_stages": generator.randint(1, 6)}
        wish = replace(
            tuning, **rings, schedule=schedule, rescale_log2=generator.choice((0.0, 4.0, 8.0))
        )
        with suppress(ValueError):
            make_plan(wish)
            return case, wish, {"pdl": generator.random() < 0.5}


@pytest.mark.parametrize("seed", range(218))
def test_what_is_accepted_runs(seed):
    case, config, options = accepted(seed)
    results, _ = cases.run_reported(case, "adversarial", seed, config=config, **options)
    for report in cases.judge(case, results):
        assert report.ok, f"{case} {config}: {report}"
