"""soak.py mla: random attention to latent keys, and reports of wrong results; test_soak_fmha.py
tests the rest of a campaign.

Kernels are replaced by the definition with their roundings, whole or with a fault; one test runs
one.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kernelkit.compile.arch import written_for
from lab.problems.latent import MANY, Case, Dense
from lab.soak import campaign
from lab.soak import latent as soak
from lab.soak.latent import FEATURES, SIZES, Draws, Trial
from mla.attention import reference
from mla.attention.choose import KERNELS

PLACE = "--backend emulate --arch sm_90a"
ARCHS = ("sm_90a", "sm_89")


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """kernel(fault): a call is the reference with the kernel's roundings, then fault(o)."""
    monkeypatch.setattr(campaign, "OUT", tmp_path)

    def replace(fault=lambda o: None):
        def step(self, *inputs):
            found = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("lab.problems.latent._verdicts", lambda *given: found.append(given))
                self.case.judge(_zeros(self.case), "cpu")
            q, sources, options, *_ = found[0]
            made = reference.rounded(q, sources, **options)
            fault(made.o)
            return made.o, made.lse

        def reports(self):
            o, lse = self.first
            if isinstance(self.case, Dense):
                return self.case.judge((o, lse))
            o, lse = o.squeeze(1), lse.squeeze(2)
            if self.case.batch:
                lead = (self.case.batch, -1)
                o, lse = o.unflatten(0, lead), lse.unflatten(0, lead).transpose(1, 2)
            return self.case.judge((o, lse))

        monkeypatch.setattr(Trial, "step", step)
        monkeypatch.setattr(Trial, "reports", reports)

    return replace


def _zeros(case: Case):
    """Results of the right shape."""
    (q, *_), _ = case.inputs()
    lead = q.shape[:-1]
    lse = q.new_zeros(lead).transpose(1, 2) if q.ndim == 4 else q.new_zeros(lead)
    return q.new_zeros(*lead, 512), lse


def drawn(arch: str, kernels: int, problems: int, size: str = "small") -> list[Case]:
    draws = Draws(0, arch, SIZES[size])
    return [draws.problem(one, n) for one in islice(draws.kernels(), kernels)
            for n in range(problems)]  # fmt: skip


def test_every_feature_is_drawn():
    cases = [*drawn("sm_90a", 100, 4), *drawn("sm_90a", 40, 3, "usual")]
    cases += drawn("sm_100a", 20, 1)
    for name, has in FEATURES.items():
        assert any(map(has, cases)), name


@pytest.mark.parametrize("arch", ARCHS)
def test_a_seed_draws_the_same_problems_whose_kernels_are_known(arch):
    draws, others = Draws(3, arch, SIZES["small"]), Draws(3, arch, SIZES["small"])
    for one in islice(draws.kernels(), 8):
        problems = [draws.problem(one, n) for n in range(3)]
        assert problems == [others.problem(others.kernel(one.number), n) for n in range(3)]
        wanted = KERNELS[written_for(arch)][dict(one.case.options)["kernel"]]
        keys = draws.keys(one, range(3))
        assert len(keys) <= 3
        assert all((key.arch, key.source) == (arch, wanted) for key in keys)


def test_problems_are_as_large_as_their_size_allows():
    for case in drawn("sm_90a", 30, 3):
        tokens = case.tokens if isinstance(case, Dense) else 1
        assert case.heads * tokens <= SIZES["small"].rows
        if isinstance(case, Dense):
            assert max(case.lens) <= SIZES["small"].keys
        elif dict(case.options).get(MANY):
            assert "parts" not in dict(case.options)


def test_what_is_right_passes(written, kernel):
    kernel()
    text, document = written(f"soak.py mla {PLACE} --seed 3 --configs 6 --problems 18")
    assert "18 problems of 6 kernels, 0 failed" in text
    rows = {row["feature"]: row for row in document["features"]}
    assert rows["all"]["problems"] == 18
    assert 0 < rows["all"]["output"] <= 1


def test_what_is_wrong_is_told(run, kernel):
    kernel(lambda o: o.mul_(1.05))
    done = run(f"soak.py mla {PLACE} --configs 2 --problems 6")
    assert done.returncode == 1
    assert "O: OUT OF TOLERANCE" in done.stdout
    assert "python scripts/soak.py mla --seed 0 --problem " in done.stdout


def test_what_the_checker_finds_is_told(run, kernel, monkeypatch):
    kernel()
    found = SimpleNamespace(reports=[SimpleNamespace(errors=["ERROR: race"])])
    monkeypatch.setattr(
        campaign, "emulation", lambda options: nullcontext(found if options.check else Mock())
    )
    done = run(f"soak.py mla {PLACE} --configs 1 --problems 1 --check")
    assert done.returncode == 1
    assert "ERROR: race" in done.stdout
    assert f"{PLACE} --check" in done.stdout


def test_a_kernel_runs_under_the_checker(printed):
    arch = "sm_120a"
    number = next(
        one.number
        for one in Draws(0, arch, SIZES["small"]).kernels()
        if isinstance(one.case, soak.Dense)
    )
    command = f"soak.py mla --backend emulate --arch {arch} --check"
    text = printed(f"{command} --problem {number}.0 {number}.1")
    assert "2 problems of 1 kernels, 0 failed" in text
