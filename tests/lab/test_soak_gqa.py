"""soak.py gqa: random problems, and reports of wrong results; test_soak_fmha.py tests the rest of a
campaign.

Kernels are replaced by the definition with their roundings, whole or with a fault; one test runs
one.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from gqa_lowlatency import reference
from lab.problems.decode import Case
from lab.soak import campaign
from lab.soak.decode import FEATURES, SIZES, Draws, Trial

PLACE = "--backend emulate --arch sm_90a"
ARCHS = ("sm_90a", "sm_100a")
SMALL = SIZES["small"]


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """kernel(fault): a step is the reference with the kernel's roundings, then fault(o)."""
    monkeypatch.setattr(campaign, "OUT", tmp_path)

    def replace(fault=lambda o: None):
        def step(self, *inputs):
            found = reference.rounded(*inputs, **self.options, arch=self.place.arch)
            fault(found.o)
            return found.o, found.lse

        monkeypatch.setattr(Trial, "step", step)

    return replace


def drawn(arch: str, kernels: int, problems: int, size: str = "small") -> list[Case]:
    draws = Draws(0, arch, SIZES[size])
    return [draws.problem(one, n) for one in islice(draws.kernels(), kernels)
            for n in range(problems)]  # fmt: skip


def test_every_feature_is_drawn():
    cases = [*drawn("sm_90a", 90, 3), *drawn("sm_90a", 20, 10, "long")]
    for name, has in FEATURES.items():
        assert any(map(has, cases)), name


@pytest.mark.parametrize("arch", ARCHS)
def test_a_seed_draws_the_same_problems_whose_kernels_are_known(arch):
    draws, others = Draws(3, arch, SMALL), Draws(3, arch, SMALL)
    for one in islice(draws.kernels(), 8):
        problems = [draws.problem(one, n) for n in range(3)]
        assert problems == [others.problem(others.kernel(one.number), n) for n in range(3)]
        keys = draws.keys(one, range(3))
        assert len(keys) <= 3
        assert all(key.arch == arch and key.config.dtype == one.case.dtype for key in keys)


@pytest.mark.parametrize("size", SIZES)
def test_problems_are_as_large_as_their_size_allows(size):
    cases = drawn("sm_90a", 20, 3, size)
    assert max(max(case.lengths) for case in cases) <= SIZES[size].keys
    assert max(sum(case.lengths) * case.heads[1] for case in cases) <= SIZES[size].rows


@pytest.mark.parametrize("keys", ["lens", "dense", 8])
def test_tensors_are_the_same_on_every_device(keys):
    """Shapes and strides are equal on a device without memory."""
    case = Case((40, 0, 33), (4, 2), keys=keys, kv_dtype="e4m3")
    for here, elsewhere in zip(case.inputs(), case.inputs("meta"), strict=True):
        assert (here.shape, here.stride()) == (elsewhere.shape, elsewhere.stride())
        assert here.dtype == elsewhere.dtype


def test_scores_lie_as_far_below_zero_as_they_should():
    case = Case((50,), (2, 1), depth=16.0, scale=1.0, amplitude=0.0)
    q, k, _ = case.inputs()
    scores = torch.einsum("bthd,bnhd->bhtn", q.float(), k[:, :50].float().repeat(1, 1, 2, 1))
    assert torch.equal(scores, torch.full_like(scores, -256.0))


def test_what_is_right_passes(written, kernel):
    kernel()
    text, document = written(f"soak.py gqa {PLACE} --seed 3 --configs 5 --problems 15")
    assert "15 problems of 5 kernels, 0 failed" in text
    rows = {row["feature"]: row for row in document["features"]}
    assert rows["all"]["problems"] == 15
    assert 0 < rows["all"]["output"] <= 1


def test_what_is_wrong_is_told(run, kernel):
    kernel(lambda o: o.mul_(1.05))
    done = run(f"soak.py gqa {PLACE} --configs 2 --problems 6")
    assert done.returncode == 1
    assert "O: OUT OF TOLERANCE" in done.stdout
    assert "python scripts/soak.py gqa --seed 0 --problem " in done.stdout


def test_a_kernel_runs_in_the_emulator(printed):
    text = printed(f"soak.py gqa {PLACE} --configs 1 --problems 2")
    assert "2 problems of 1 kernels, 0 failed" in text
