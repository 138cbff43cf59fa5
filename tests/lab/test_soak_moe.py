"""soak.py moe: random problems, their judges, repetition of failures; test_soak_fmha.py tests the
rest of a campaign.

Kernels are replaced by the definition with their roundings, whole or with a fault; one test runs
them.
"""

from __future__ import annotations

import json
import shlex
from itertools import islice

import pytest
import torch

from lab.problems import mixed_gemm
from lab.problems.mixed_gemm import Case, Layer
from lab.soak import campaign
from lab.soak.moe import FEATURES, SIZES, Draws, Trial
from moe.reference_routing import route

PLACE = "--backend emulate"
SMALL = SIZES["small"]


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """kernel(fault): products are those of the definition in fp32, and then fault(product)."""
    monkeypatch.setattr(campaign, "OUT", tmp_path)
    monkeypatch.setattr(mixed_gemm, "route", lambda *given, arch, **more: route(*given, **more))

    def replace(fault=lambda result: None):
        def step(self, *inputs):
            is_layer = isinstance(self.case, Layer)
            define = mixed_gemm.layer_definition if is_layer else mixed_gemm.definition
            found = define(self.case, self.given, torch.float32)
            dtype = torch.bfloat16 if is_layer else self.case.options()["out"]
            nobody = 0 if is_layer else self.case.room
            result = torch.cat(
                (found.to(dtype), found.new_full((nobody, found.shape[1]), torch.nan))
            )
            fault(result)
            return (result.to(dtype),)

        monkeypatch.setattr(Trial, "step", step)

    return replace


# -- random problems ------------------------------------------------------------------------------


def test_every_feature_is_drawn():
    draws = Draws(0, "sm_90a", SMALL)
    cases = [draws.problem(one, n) for one in islice(draws.kernels(), 90) for n in range(2)]
    for name, has in FEATURES.items():
        assert any(map(has, cases)), name
    assert len(set(cases)) > 0.9 * len(cases)  # some have no rows


def test_a_seed_draws_the_same_problems_for_one_kernel():
    draws, others = Draws(3, "sm_90a", SMALL), Draws(3, "sm_90a", SMALL)
    for one in islice(draws.kernels(), 8):
        problems = [draws.problem(one, n) for n in range(3)]
        again = others.kernel(one.number)
        assert problems == [others.problem(again, n) for n in range(3)]
        if isinstance(one.case, Case):
            assert {mixed_gemm.plan_of(case).config for case in problems} == {one.config}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_plan_refuses_what_is_drawn(arch):
    draws = Draws(0, arch, SMALL)
    drawn = [*islice(draws.kernels(), 60)]
    assert drawn[-1].number == 59
    assert not draws.refused


@pytest.mark.parametrize("size", SIZES)
def test_problems_are_as_large_as_their_size_allows(size):
    sizes = SIZES[size]
    draws = Draws(1, "sm_90a", sizes)
    for one in islice(draws.kernels(), 30):
        for case in (draws.problem(one, n) for n in range(3)):
            if isinstance(case, Layer):
                assert case.tokens <= sizes.rows
                assert max(case.hidden, case.intermediate) <= max(sizes.k, sizes.columns)
                continue
            assert len(case.counts) * case.k * case.rows_of_w <= max(
                sizes.weights, case.k * case.rows_of_w
            )
            assert case.rows * case.k * case.rows_of_w <= max(sizes.work, case.k * case.rows_of_w)


def test_the_kernels_of_a_layer_are_known_before_it_runs():
    draws = Draws(0, "sm_90a", SMALL)
    one = next(kernel for kernel in draws.kernels() if isinstance(kernel.case, Layer))
    keys = draws.keys(one, range(3))
    names = {key.module.rpartition(".")[2] for key in keys}
    assert {"topk_kernel", "permutation_kernel", "combine_kernel", "kernel"} <= names
    assert all(key.arch == "sm_90a" for key in keys)
    assert len({key.to_text() for key in keys}) == len(keys)
    product = next(kernel for kernel in draws.kernels() if isinstance(kernel.case, Case))
    (key,) = draws.keys(product, range(3))
    assert key.config == product.config


def test_what_nobody_has_is_poison():
    case = Case((3, 0, 2), 64, 16, "nvfp4", bias=True, slots=2, room=4)
    inputs = case.inputs()
    named = inputs.rows[:5] // 2
    assert inputs.x[named.long()].isfinite().all()
    others = torch.ones(len(inputs.x), dtype=torch.bool).index_fill(0, named.long(), 0)
    assert inputs.x[others].isnan().all()
    assert (inputs.rows[5:] > 1 << 30).all()
    for tensor in (inputs.x, inputs.bias, inputs.w.factor):
        before = torch.as_strided(tensor, (64,), (1,), 0)
        behind = torch.as_strided(tensor, (64,), (1,), 64 + tensor.numel())
        assert before.isnan().all()
        assert behind.isnan().all()
    assert case.inputs().x.data_ptr() % 16 == 0


def test_a_row_that_nobody_has_is_not_written():
    case = Case((3, 1), 64, 16, room=2)
    inputs = case.inputs()
    found = mixed_gemm.definition(case, inputs, torch.float32).bfloat16()
    whole = torch.cat((found, torch.full((2, 16), torch.nan).bfloat16()))
    assert all(report.ok for report in mixed_gemm.judge(case, whole, inputs))
    whole[5, 3] = 0.0
    output, untouched = mixed_gemm.judge(case, whole, inputs)
    assert output.ok
    assert not untouched.ok
    assert untouched.coordinate == (5, 3)


# -- runs -----------------------------------------------------------------------------------------


def test_what_is_right_passes(written, kernel):
    kernel()
    text, document = written(f"soak.py moe {PLACE} --seed 3 --configs 5 --problems 15")
    assert "15 problems of 5 kernels, 0 failed" in text
    rows = {row["feature"]: row for row in document["features"]}
    assert rows["all"]["problems"] == 15
    assert 0 < rows["all"]["output"] <= 1
    assert rows["a layer"]["problems"] + rows["a product"]["problems"] == 15
    assert len(rows) >= 20


def test_a_failure_is_repeated_by_the_command_that_it_prints(run, kernel):
    kernel(lambda result: result.mul_(1.05))
    first = run(f"soak.py moe {PLACE} --seed 5 --configs 2 --problems 4 --small")
    assert first.returncode == 1
    path = campaign.OUT / "soak_moe_failures.json"
    failures = json.loads(path.read_text(encoding="utf-8"))
    assert "O: OUT OF TOLERANCE" in failures[0]["wrong"][0]
    command = failures[0]["command"]
    assert command.startswith("python scripts/soak.py moe --seed 5 --problem ")
    words = shlex.join(shlex.split(command.removeprefix("python scripts/")))
    again = run(words)
    assert again.returncode == 1
    assert failures[0]["case"] in again.stdout
    kernel()
    assert run(words).returncode == 0


def test_a_written_row_of_nobody_is_a_failure(run, kernel):
    def fault(result):
        result[-1:].nan_to_num_(nan=0.0)

    kernel(fault)
    text = run(f"soak.py moe {PLACE} --seed 2 --configs 1 --problems 8").stdout
    assert "rows of nobody: OUT OF TOLERANCE" in text


def test_other_contents_of_the_same_tensors():
    """A captured graph is replayed with such contents."""
    for case in (Case((3, 0, 2), 64, 16), Layer(4)):
        one = object.__new__(Trial)
        one.given, one.case = case.inputs(), case
        names = ("x", "offsets" if isinstance(case, Case) else "logits")
        before = {name: getattr(one.given, name).clone() for name in names}
        one.change()
        for name, tensor in before.items():
            assert not torch.equal(getattr(one.given, name), tensor)


@pytest.mark.parametrize("seed", [2, 1], ids=["product", "layer"])
def test_the_kernels_run_in_the_emulator(printed, seed):
    kernel = next(Draws(seed, "sm_90a", SMALL).kernels())
    assert isinstance(kernel.case, Layer) == (seed == 1)
    text = printed(f"soak.py moe {PLACE} --seed {seed} --configs 1 --problems 2 --compile")
    assert "2 problems of 1 kernels, 0 failed" in text
