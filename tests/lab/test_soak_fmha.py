"""soak.py fmha: random problems, reports and repetition of failures, early ends of a run.

The kernel is replaced by the reference with its roundings, whole or with a fault; one test runs it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import threading
from contextlib import nullcontext
from itertools import islice
from unittest.mock import Mock

import pytest
import torch

from fmha import reference
from kernelkit.compile import store
from lab.problems.attention import Case, judge, references
from lab.soak import attention as soak_attention
from lab.soak import campaign
from lab.soak.attention import FEATURES, SIZES, Draws
from lab.soak.campaign import compiled, replays, run_together
from lab.tools.place import Place

PLACE = "--backend emulate --arch sm_90a"
SMALL = SIZES["small"]


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """kernel(fault): attention is the reference with the kernel's roundings, and then fault(O)."""
    monkeypatch.setattr(campaign, "OUT", tmp_path)

    def replace(fault=lambda o: None):
        def attention(q, k, v, **options):
            known = {name: options[name] for name in OPTIONS if name in options}
            rounded = reference.rounded(q, k, v, **known)
            fault(rounded.o)
            raw = () if options["normalize"] else (rounded.row_max,)
            return rounded.o, rounded.lse, *raw

        monkeypatch.setattr(soak_attention, "attention", attention)

    return replace


OPTIONS = [field.name for field in dataclasses.fields(reference.Options)]


# -- random problems ------------------------------------------------------------------------------


def test_every_feature_is_drawn():
    draws = Draws(0, "sm_90a", SMALL)
    cases = [draws.problem(one, n) for one in islice(draws.kernels(), 50) for n in range(3)]
    for name, has in FEATURES.items():
        assert any(map(has, cases)) == (name != "rows of 100k keys"), name
    assert len(set(cases)) == len(cases)


def test_a_seed_draws_the_same_problems_for_one_config():
    draws, others = Draws(3, "sm_90a", SMALL), Draws(3, "sm_90a", SMALL)
    for one in islice(draws.kernels(), 6):
        problems = [draws.problem(one, n) for n in range(3)]
        again = others.kernel(one.number)
        assert problems == [others.problem(again, n) for n in range(3)]
    assert Draws(4, "sm_90a", SMALL).kernel(one.number) != one


def test_what_the_plan_refuses_is_counted():
    draws = Draws(0, "sm_90a", SMALL)
    drawn = [*islice(draws.kernels(), 40)]
    assert drawn[-1].number == len(drawn) - 1 + draws.refused.total() > 40
    assert any("query rows" in words for words in draws.refused)


def test_long_problems_have_rows_of_128k_keys():
    draws = Draws(0, "sm_90a", SIZES["long"])
    cases = [draws.problem(one, n) for one in islice(draws.kernels(), 4) for n in range(3)]
    rows = FEATURES["rows of 100k keys"]
    assert any(rows(case) for case in cases)
    assert max(max(case.queries) for case in cases) > 2000


def test_what_a_case_puts_in_memory():
    case = Case(3, 50, (2, 1), climb=9.0, tokens_first=True, sinks=True, sink_value=-math.inf)
    _, k, _ = case.inputs()
    norms = k[0, :, 0].float().norm(dim=-1)
    assert norms[40:].mean() > 3 * norms[:10].mean()
    assert case.inputs()[0].stride(1) > case.inputs()[0].stride(2)
    around = torch.as_strided(k, (64,), (1,), 0)
    assert around.isnan().all()
    assert case.options()["sinks"].tolist() == [-math.inf, -2.0]
    down = dataclasses.replace(case, climb=-9.0, page_size=8, kv_lens=(50,))
    pool, table = down.inputs()[1], down.page_table()[0].tolist()
    pages = pool[table[:7]].flatten(0, 1)[:, 0].float()
    assert pages[:10].norm(dim=-1).mean() > 3 * pages[40:50].norm(dim=-1).mean()
    assert pages[50:].isnan().all()
    assert pool.isnan().all((1, 2, 3)).sum() == 3


# -- runs -----------------------------------------------------------------------------------------


def test_what_is_right_passes(written, kernel):
    kernel()
    text, document = written(f"soak.py fmha {PLACE} --seed 2 --configs 8 --problems 24")
    assert "24 problems of 8 kernels, 0 failed" in text
    rows = {row["feature"]: row for row in document["features"]}
    assert rows["all"]["problems"] == 24
    assert 0 < rows["all"]["output"] <= 1
    assert len(rows) >= 20


def test_a_failure_is_repeated_by_the_command_that_it_prints(run, kernel):
    kernel(lambda o: o.mul_(1.05))
    first = run(f"soak.py fmha {PLACE} --seed 5 --configs 2 --problems 4 --small")
    assert first.returncode == 1
    path = campaign.OUT / "soak_fmha_failures.json"
    failures = json.loads(path.read_text(encoding="utf-8"))
    assert failures
    assert "O: OUT OF TOLERANCE" in failures[0]["wrong"][0]
    command = failures[0]["command"]
    assert f"FAILED {command}" in first.stdout
    words = shlex.join(shlex.split(command.removeprefix("python scripts/")))
    again = run(words)
    assert again.returncode == 1
    assert failures[0]["case"] in again.stdout
    kernel()
    assert run(words).returncode == 0


def test_bits_that_differ_and_errors_are_failures(run, kernel):
    calls = []

    def fault(o):
        calls.append(o)
        if o.numel() and len(calls) % 2 == 0:
            o.view(-1)[0] += 1e-3
        if len(calls) > 8:
            raise RuntimeError("no more")

    kernel(fault)
    text = run(f"soak.py fmha {PLACE} --seed 1 --configs 2 --problems 8").stdout
    assert "bits differ from run to run" in text
    assert "RuntimeError: no more" in text


def test_an_interrupted_run_says_what_it_did(run, kernel):
    calls = []

    def fault(o):
        calls.append(o)
        if len(calls) == 6:
            raise KeyboardInterrupt

    kernel(fault)
    done = run(f"soak.py fmha {PLACE} --configs 2 --problems 8")
    assert done.returncode == 0
    assert "interrupted" in done.stdout
    assert "2 problems of 1 kernels, 0 failed" in done.stdout


def test_time_ends_a_run(printed, kernel):
    kernel()
    text = printed(f"soak.py fmha {PLACE} --configs 3 --problems 9 --minutes 1e-9")
    assert "--minutes are over" in text
    assert "0 problems of 1 kernels" in text


def test_a_problem_of_a_refused_kernel_is_refused(run):
    draws = Draws(0, "sm_90a", SMALL)
    number = next(n for n in range(100) if draws.kernel(n) is None)
    done = run(f"soak.py fmha {PLACE} --problem {number}.0")
    assert done.returncode == 2
    assert f"kernel {number} is refused" in done.stderr


class Stub:
    """A trial on the CPU with another computation."""

    change = soak_attention.Trial.change

    def __init__(self):
        self.case = Case(4, 4, kv_lens=(4,))
        self.inputs = tuple(torch.arange(1.0, 5.0) for _ in range(3))
        self.arguments = {"kv_lens": torch.tensor([4], dtype=torch.int32)}
        self.made = []
        self.first = self.results()

    def results(self):
        self.made.append((self.inputs[0] * self.inputs[2] * self.arguments["kv_lens"],))
        return self.made[-1]


@pytest.mark.parametrize("follows", [True, False])
def test_a_replay_has_to_follow_the_contents(monkeypatch, follows):
    one = Stub()

    class Graph:
        def replay(self):
            captured = one.made[1][0]
            captured.copy_(one.results()[0] if follows else captured)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", nullcontext)
    before = one.first[0]
    assert replays(one) == follows
    assert not torch.equal(one.first[0], before)


def test_who_differs_beside_others_is_named(monkeypatch):
    for name in ("_sleep", "synchronize", "Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, Mock())
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    right, wrong = Stub(), Stub()
    wrong.first = (wrong.first[0] + 1,)
    assert run_together([right, wrong, Stub()]) == [True, False, True]


def test_processes_need_a_cache_between_them(monkeypatch):
    monkeypatch.setenv(store.VARIABLE, "off")
    with pytest.raises(ValueError, match="--jobs 1"):
        next(compiled([], list, 2, 1.0))


def test_processes_hand_kernels_over(monkeypatch, tmp_path):
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    draws = Draws(0, "sm_90a", SMALL)
    kernels = [*islice(draws.kernels(), 2)]

    def keys(kernel):
        return draws.keys(kernel, range(2))

    found = [*compiled(kernels, keys, 2, 600.0)]
    assert {one.number for one, _, _ in found} == {one.number for one in kernels}
    assert all(seconds > 0 and not wrong for _, seconds, wrong in found)
    assert len(store.from_environment().listed()) == 2
    assert not [*compiled(kernels, keys, 1, 0.0)]


def test_the_first_kernel_does_not_wait_for_what_others_are_asked(monkeypatch, tmp_path):
    monkeypatch.setenv(store.VARIABLE, str(tmp_path / "cache"))
    first, second = islice(Draws(0, "sm_90a", SMALL).kernels(), 2)
    arrived = threading.Event()

    def keys(kernel):
        assert kernel is first or arrived.wait(60.0)
        return []

    found = compiled([first, second], keys, 1, 60.0)
    assert next(found)[0] is first
    arrived.set()
    assert [one for one, _, _ in found] == [second]


def test_the_kernel_runs_in_the_emulator(printed):
    text = printed(f"soak.py fmha {PLACE} --configs 1 --problems 3 --compile")
    assert "3 problems of 1 kernels, 0 failed" in text


@pytest.mark.parametrize("backend", ["cuda", "emulate"])
def test_results_of_a_gpu_are_judged_by_its_sums(monkeypatch, backend):
    judging = Mock(return_value=[])
    monkeypatch.setattr(soak_attention, "judge", judging)
    one = object.__new__(soak_attention.Trial)
    one.place, one.case, one.first, one.inputs = Place(backend, "sm_90a", ""), None, (), ()
    one.reports()
    assert judging.call_args.kwargs == {"aligned_sums": backend == "cuda"}


def test_references_are_computed_where_the_inputs_are():
    case = Case(5, 70, (2, 1), sinks=True, rope_dim=8, q_lens=(2, 3), kv_lens=(70, 9), batch=2)
    exact, rounded = references(case, case.inputs("cpu"))
    assert exact.o.device == rounded.lse.device == torch.device("cpu")
    assert all(report.ok for report in judge(case, (rounded.o, rounded.lse), case.inputs()))
