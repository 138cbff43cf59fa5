"""The kernel, through the API and the emulator, against the fp64 definition.

Every case runs under every policy, and the bits must not depend on it.
"""

from __future__ import annotations

import pytest
import torch

from tests.fmha import cases
from tests.fmha.cases import MATRIX, POLICIES, QUICK, Case


def by_group(chosen: tuple[Case, ...]) -> list:
    """Cases with ids; those that share a compiled kernel share a worker."""
    return [
        pytest.param(case, id=str(case), marks=pytest.mark.xdist_group(f"fmha-{case.group}"))
        for case in chosen
    ]


@pytest.fixture(autouse=True)
def poisoned_outputs():
    """torch.empty returns NaN, so that what the kernel leaves unwritten is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def check(case: Case) -> None:
    results = [cases.run(case, policy) for policy in POLICIES]
    for report in cases.judge(case, results[0]):
        assert report.ok, str(report)
    for policy, other in zip(POLICIES[1:], results[1:], strict=True):
        assert cases.same_bits(results[0], other), f"{policy} changes bits"


@pytest.mark.parametrize("case", by_group(QUICK))
def test_case(case):
    check(case)


@pytest.mark.matrix
@pytest.mark.parametrize("case", by_group(MATRIX))
def test_matrix(case):
    check(case)


@pytest.mark.xdist_group("fmha-bf16-True-False-True")
def test_raw_rows_without_keys_are_minus_infinity():
    case = QUICK[-1]  # lengths 70 and 1 under 130 causal rows: most rows see nothing
    raw, lse, row_max = cases.run(case, "round-robin")
    unseen = torch.isneginf(lse)
    assert unseen[1, :, :60].all()
    assert unseen[2, :, :129].all()
    assert not unseen[0].any()
    assert torch.equal(unseen, torch.isneginf(row_max))
    assert not raw.transpose(1, 2)[unseen].any()


@pytest.mark.xdist_group("fmha-fp16-False-False-False")
def test_raw_output_of_fp16_does_not_overflow():
    q, k, v = Case(8, 300, dtype="fp16").inputs()
    v.fill_(60000.0)
    raw, lse, row_max = cases.attention(q, k, v, normalize=False)
    assert raw.dtype == torch.float32
    assert raw.max() > torch.finfo(torch.float16).max
    assert torch.allclose(cases.normalised(raw, lse, row_max), v[:1, :1].float(), rtol=1e-3)
