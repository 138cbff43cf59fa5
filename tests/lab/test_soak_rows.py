"""soak.py rows: random problems, faults that are noticed, repetition of failures."""

from __future__ import annotations

import dataclasses
import json
from itertools import islice

import pytest
import torch

from lab.soak import campaign
from lab.soak.rows import family as subjects
from lab.soak.rows.family import FEATURES, Draws, Trial
from lab.soak.rows.subject import CONTENTS, moved, spoil

ITERABLE = (list, tuple, type({}.values()))
PLACE = "--backend emulate --arch sm_90a"
SUBJECTS = pytest.mark.parametrize("subject", subjects.SUBJECTS, ids=lambda one: one.name)


def kernels_of(subject, count=6, arch=None):
    """Return (draws, the first kernels of a subject)."""
    draws = Draws(0, arch or subject.archs[0], True, subjects=(subject,))
    return draws, [*islice(draws.kernels(), count)]


def bits(value) -> list[bytes]:
    """Bytes of all tensors in a value."""
    if isinstance(value, torch.Tensor):
        return [value.contiguous().view(torch.uint8).numpy().tobytes()]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, each.name) for each in dataclasses.fields(value)]
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for each in parts for leaf in bits(each)] if isinstance(parts, ITERABLE) else []


def test_every_feature_is_drawn():
    draws = Draws(0, "sm_90a", True)
    cases = [draws.problem(one, n) for one in islice(draws.kernels(), 60) for n in range(4)]
    for name, has in FEATURES.items():
        assert any(map(has, cases)), name
    assert cases[:8] == [
        draws.problem(one, n) for one in islice(draws.kernels(), 2) for n in range(4)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16,
                                   torch.float8_e4m3fn, torch.uint8, torch.int32])  # fmt: skip
@pytest.mark.parametrize("contents", CONTENTS)
def test_a_row_is_replaced_and_no_other(dtype, contents):
    before = torch.randn(3, 8).mul(4).to(dtype)
    after = before.clone()
    spoil(after[1], contents)
    assert not torch.equal(after[1].view(torch.uint8), before[1].view(torch.uint8))
    assert torch.equal(after[::2].view(torch.uint8), before[::2].view(torch.uint8))


@SUBJECTS
def test_a_problem_has_the_same_numbers_again_and_a_row_that_changes(subject):
    draws, kernels = kernels_of(subject)
    for kernel in kernels:
        problem = draws.problem(kernel, 0)
        assert problem.subject == subject.name
        first, again = problem.given(), problem.given()
        assert bits(first) == bits(again)
        problem.spoil(again)
        assert bits(first) != bits(again)


@SUBJECTS
def test_kernels_are_known_without_memory(subject):
    draws, (kernel,) = kernels_of(subject, 1)
    keys = draws.keys(kernel, range(2))
    assert keys
    assert {key.arch for key in keys} == {draws.arch}


def test_tensors_within_dataclasses_are_moved():
    problem = {"pair": (torch.ones(1), [torch.ones(2)]), "number": 3}
    there = moved(problem, "meta")
    assert there["pair"][0].is_meta
    assert there["pair"][1][0].is_meta
    assert there["number"] == 3


def test_what_is_right_passes_and_a_failure_is_repeated(run, monkeypatch, tmp_path):
    monkeypatch.setattr(campaign, "OUT", tmp_path)
    monkeypatch.setattr(Trial, "step", lambda self, *inputs: (torch.ones(2),))
    words = f"soak.py rows {PLACE} --seed 3 --configs 2 --problems 4"
    assert run(words).returncode == 0
    monkeypatch.setattr(Trial, "step", lambda self, *inputs: (torch.rand(2),))
    assert run(words).returncode == 1
    failure = json.loads((tmp_path / "soak_rows_failures.json").read_text(encoding="utf-8"))[0]
    assert failure["wrong"] == ["bits of other rows differ"]
    again = run(failure["command"].removeprefix("python scripts/"))
    assert again.returncode == 1
    assert failure["case"] in again.stdout
