"""bench.py of steps without a GPU: problems, their bytes, the check before every time, peers on the
CPU, tables and files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcache.layouts.rows import Rows
from lab.bench.steps import (
    COPY,
    COPY_UNIT,
    MAX_SETS,
    Call,
    copies,
    page_table,
    rows_of,
    step_table,
)
from lab.flags.steps import FAMILIES, HIDDEN, STEPS
from lab.house.source import ROOT
from lab.problems.moe_steps import (
    GATHERED,
    LINEAR_ROUTERS,
    QUANTISERS,
    ROUTERS,
    tensors_of,
    torch_route,
)
from lab.problems.steps import normal, problems_of
from lab.tools.common import save_rows
from moe import reference, reference_routing

OF_EXPERTS = FAMILIES["moe"][0]


def problem_of(step, name="", tokens=3, hidden=64):
    (found,) = problems_of(STEPS[step], [step], [tokens], hidden, [name] if name else ())
    return found


def size(*tensors):
    return sum(x.nbytes for x in tensors if isinstance(x, torch.Tensor))


def taking(us: float) -> Callable[[], float]:
    """A sampler that returns `us` microseconds."""
    return lambda: us


# -- problems -------------------------------------------------------------------------------------


def test_problems_and_their_order():
    found = problems_of("moe", OF_EXPERTS, (1, 64), 64)
    assert [p.step for p in found] == sorted((p.step for p in found), key=OF_EXPERTS.index)
    assert len({(p.step, p.name, p.tokens) for p in found}) == len(found)
    assert len(found) == 2 * (len(QUANTISERS) + 1 + len(ROUTERS) + len(LINEAR_ROUTERS) + 2)
    named = problems_of("moe", OF_EXPERTS, (1,), 64, ["mxfp", "copies"])
    assert {p.name for p in named} == {"mxfp8", "mxfp4", GATHERED}
    with pytest.raises(ValueError, match="K = 24 in nvfp4"):
        problems_of("moe", ["quantise"], (1,), 24)


@pytest.mark.parametrize(
    "name", ["scale known", "scale of the tensor", "scale of each token", "mxfp8", "mxfp4"]
)
def test_bytes_of_quantising(name):
    problem = problem_of("quantise", name)
    x, scale = problem.draw(0, "cpu")
    fmt, _ = QUANTISERS[problem.name]
    results = tensors_of(reference.quantise(x, fmt, global_scale=scale))
    assert problem.nbytes == size(x, scale, *results)
    problem.check((x, scale), results)
    for index in range(2):
        wrong = [tensor.clone() for tensor in results]
        wrong[index].view(-1)[3] ^= 1
        with pytest.raises(ValueError, match="other bytes"):
            problem.check((x, scale), tuple(wrong))


def test_bytes_of_copies():
    """A single token: eight experts have one row each."""
    problem = problem_of("quantise", GATHERED, tokens=1)
    arguments = problem.draw(0, "cpu")
    x, scale, rows = arguments
    results = tensors_of(reference.quantise(x.expand(8, 64), "nvfp4", global_scale=scale))
    of_blocks = 8 * results[1].numel()
    places = (rows.slot_of_row, rows.row_of_slot, rows.offsets)
    assert problem.nbytes == size(x, scale, *places, results[0], *results[2:]) + of_blocks
    problem.check(arguments, results)
    with pytest.raises(ValueError, match="other bytes"):
        problem.check(arguments, (results[0] ^ 1, *results[1:]))


@pytest.mark.parametrize("step", ["route", "route_tokens", "permutation", "combine"])
def test_bytes_and_torch(step):
    """Torch's results pass the check, and wrong ones do not."""
    for problem in problems_of("moe", [step], [5], 64):
        arguments = problem.draw(1, "cpu")
        results = problem.peers["torch"](*arguments)
        assert problem.nbytes == size(*arguments, *results)
        problem.check(arguments, results)
        with pytest.raises(ValueError, match="wrong"):
            problem.check(arguments, tuple(tensor + 1 for tensor in results))


def test_bytes_of_the_cache_are_those_of_the_tensors():
    """Appending reads and writes values, entries, two tables, angles."""
    problem = problem_of("append", "fp8_584", 4)
    _, kv, positions, slots, cos, sin = problem.draw(0, "cpu")
    assert problem.nbytes == size(kv, positions, slots, cos[:4], sin[:4]) + 4 * 584
    problem = problem_of("gather", "bf16_512", 4)
    rows, indices, out = problem.draw(0, "cpu")
    assert problem.nbytes == 2 * out.nbytes + indices.nbytes
    assert rows.entries >= 8


@pytest.mark.parametrize(("step", "name"), [
    ("append", "fp8_584"), ("append", "bf16_512"), ("append", "K and V"), ("append", "fp8_656"),
    ("gather", "fp8_584"), ("gather", "bf16_512"), ("gather", "fp8_656"),
])  # fmt: skip
def test_peers_agree_and_checks_notice(step, name):
    problem = problem_of(step, name)
    pools = []
    for peer in problem.peers.values():
        arguments = problem.draw(5, "cpu")
        outputs = peer(*arguments)
        problem.check(arguments, outputs)
        pools.append(changed_by(step, arguments))
    assert torch.equal(*pools)
    pools[-1].bitwise_not_()
    with pytest.raises(ValueError, match="wrong"):
        problem.check(arguments, outputs)


def changed_by(step, arguments):
    if step == "gather":
        return arguments[2].view(torch.uint8)
    first = arguments[0]
    return (first if isinstance(first, Rows) else first[0]).pool


def test_arguments_differ_between_sets():
    for problem in problems_of("moe", OF_EXPERTS, [4], 64):
        first, again, other = (problem.draw(seed, "cpu")[0] for seed in (0, 0, 1))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


def test_torch_routes_as_the_reference():
    for experts, biased, options in ROUTERS.values():
        logits = normal(0, "cpu", 50, experts).float() + torch.rand(50, experts) / 64
        bias = torch.rand(experts) if biased else None
        ids, weights = torch_route(logits, bias, **options)
        expected = reference_routing.route(logits, bias=bias, **options)
        assert torch.equal(ids, expected[0])
        torch.testing.assert_close(weights, expected[1])


def test_kernels_pass_in_the_emulator():
    for problem in problems_of("moe", OF_EXPERTS, [2], 64):
        arguments = problem.draw(0, "cpu")
        problem.check(arguments, problem.peers["moe"](*arguments))


# -- time -----------------------------------------------------------------------------------------


def test_rotation_is_larger_than_the_cache():
    problem = problem_of("combine", tokens=64, hidden=7168)
    cache = 50 << 20
    assert (problem.sets(cache) - 1) * problem.nbytes > 2 * cache


@pytest.mark.parametrize("nbytes", [99, 60 * COPY_UNIT + 1])
def test_copies_move_the_bytes(nbytes):
    halves = [launch().numel() for launch in copies(nbytes, 2, "cpu")]
    assert len(halves) == 2
    assert nbytes <= 2 * halves[0] <= max(nbytes + 32, nbytes * 1.05)


def test_rows_of_a_problem():
    """A wrong or failing peer has no time; a timed one has a share of the copy's rate."""
    problem = problem_of("permutation")
    right = problem.peers["torch"]

    def refuse(*_):
        raise RuntimeError("no\nmore")

    def rows(**peers):
        times = iter([8.0, 4.0])

        def sample(launches):
            for launch in launches:
                launch()
            return taking(next(times))

        return rows_of(replace(problem, peers=peers), problem.nbytes, sample, "cpu")

    mine, torch_row, copy = rows(moe=right, torch=refuse)
    assert (mine["us"], copy["us"], mine["share"], copy["share"]) == (8.0, 4.0, 0.5, 1.0)
    assert mine["tbs"] == pytest.approx(problem.nbytes / 8.0 * 1e-6)
    assert (mine["sets"], mine["cold"]) == (4, True)
    assert torch_row["refused"] == "RuntimeError: no"
    assert "us" not in torch_row
    mine, torch_row, copy = rows(moe=lambda ids: (ids, ids, ids), torch=right)
    assert mine["refused"].startswith("ValueError: wrong")
    assert (torch_row["us"], copy["us"], torch_row["share"]) == (8.0, 4.0, 0.5)
    assert [row["peer"] for row in (mine, torch_row, copy)] == ["moe", "torch", COPY]
    assert "refused" not in copy


def test_few_bytes_stay_warm():
    problem = replace(problem_of("permutation"), peers={"moe": lambda ids: (ids,)})
    problem = replace(problem, check=lambda arguments, outputs: None)
    mine, _ = rows_of(problem, 1 << 20, lambda launches: taking(1.0), "cpu")
    assert (mine["sets"], mine["cold"]) == (MAX_SETS, False)


def test_a_call_keeps_its_results():
    call = Call(lambda x: (x + 1,), (torch.ones(2),))
    assert call.results is None
    assert call() is None
    assert torch.equal(call.results[0], torch.full((2,), 2.0))


# -- tables and files -----------------------------------------------------------------------------


def row(peer="moe", tokens=1, name="mxfp8", **changes):
    made = {"kind": "step", "step": "quantise", "name": name, "tokens": tokens, "nbytes": 4_000_000}
    made |= {"peer": peer, "sets": 2, "cold": tokens > 1, "us": 2.0, "spread": 0.01}
    made |= {"tbs": 2.0, "share": 0.5}
    return made | changes


def test_table_of_a_problem():
    refused = {k: v for k, v in row("torch").items() if k not in ("us", "tbs", "share", "spread")}
    title, heads, cells = step_table([row(), {**refused, "refused": "OutOfMemoryError: much"}])
    assert title == "quantise: mxfp8, 1 row, 4 MB"
    assert cells[0] == ["moe", "2.00", "2.000", "0.50", "1.0%", "warm"]
    assert cells[1] == ["torch", "-", "-", "-", "-", "OutOfMemoryError: much"]
    assert all(len(line) == len(heads) for line in cells)


def test_markdown_has_a_line_per_variant():
    rows = [row(), row(tokens=64, us=123.4, share=0.812), row("torch", 64, us=3.0), row("copy", 64)]
    lines = page_table([*rows, row(name="mxfp4", tokens=64)]).splitlines()
    assert lines[0] == "| step | 1 | 64 | of a copy | beside it |"
    assert lines[2] == "| quantise: mxfp8 | 2.0 | 123 | 0.81 | torch 3.0 |"
    assert lines[3] == "| quantise: mxfp4 | - | 2.0 | 0.50 | - |"


def test_shown_again(printed, tmp_path):
    file = tmp_path / "moe.json"
    head = {"kind": "setting", "date": "2026-01-02", "gpu": {"name": "Some GPU"}}
    rows = [row(), row("copy"), {**row(name="256 experts, 8"), "step": "permutation"}]
    save_rows(file, [head, *rows, {"kind": "after"}])
    assert json.loads(file.read_text())[0] == head
    shown = printed("bench.py moe --steps quantise --show", file)
    assert shown.splitlines()[-1] == "Some GPU, 2026-01-02"
    assert "mxfp8, 1 row," in shown
    assert "256 experts" not in shown
    page = printed("bench.py moe --markdown --names 256 --show", file)
    assert "| permutation: 256 experts, 8 |" in page


def test_the_file_of_a_gpu_is_shown(printed):
    file = ROOT / "results" / "kvcache_h100.json"
    lines = printed("bench.py kvcache --markdown --steps append --show", file).splitlines()
    assert lines[0].startswith("| step | 1 | 128 | 2048 | 8192 | 32768 |")
    assert sum("append" in line for line in lines) == 4


@pytest.mark.parametrize(("flags", "tokens"), [
    ("moe --tokens 1 4k --steps combine", [1, 4096]),
    ("kvcache --rows 1 2k --steps append", [1, 2048] * 4),
])  # fmt: skip
def test_without_a_gpu(monkeypatch, written, flags, tokens):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out, (head, *rows) = written(f"bench.py {flags}")
    assert out.startswith("No CUDA GPU here.")
    assert (head["kind"], head["hidden"]) == ("setting", 7168)
    assert [row["tokens"] for row in rows] == tokens
    assert {row["kind"] for row in rows} == {"static"}


def test_the_name_hands_options_on(printed):
    assert "default: 1 64 4k 32k" in printed("bench.py moe --help")


def test_results_hold_what_the_page_says():
    """The H200's file has every problem, checked, with the copy's time."""
    head, *rows = json.loads((ROOT / "results" / "moe_h200.json").read_text())
    assert head["gpu"]["name"].startswith("NVIDIA H200")
    steps = {(r["step"], r["name"], r["tokens"], r["peer"]): r for r in rows if r["kind"] == "step"}
    measured = [step for step in FAMILIES["moe"][0] if step != "route_tokens"]  # not yet measured
    for problem in problems_of("moe", measured, FAMILIES["moe"][1], HIDDEN):
        for peer in (*problem.peers, "copy"):
            found = steps.pop((problem.step, problem.name, problem.tokens, peer))
            assert found["nbytes"] == problem.nbytes
            assert found["us"] > 0
    assert not steps
