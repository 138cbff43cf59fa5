"""bench.py kvcache without a GPU: problems, their bytes, the check in front of every time, peers on
the CPU, tables and files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kvcache.layouts.rows import Rows
from workbench.house.source import ROOT


def problem_of(step, name, count):
    from workbench.cases.steps import problems_of

    (found,) = problems_of("kvcache", [step], [count], 0, [name])
    return found


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A sample of so many microseconds."""

    us: float

    def __call__(self):
        return self.us


@pytest.mark.parametrize(
    ("step", "name"),
    [("append", "fp8_584"), ("append", "bf16_512"), ("append", "K and V"),
     ("gather", "fp8_584"), ("gather", "bf16_512"),
     ("append", "fp8_656"), ("gather", "fp8_656")],
)  # fmt: skip
def test_peers_agree_and_checks_notice(step, name):
    problem = problem_of(step, name, 3)
    pools = []
    for peer in problem.peers.values():
        arguments = problem.draw(5, "cpu")
        outputs = peer(*arguments)
        problem.check(arguments, outputs)
        pools.append(written(step, arguments))
    assert torch.equal(*pools)
    pools[-1].bitwise_not_()
    with pytest.raises(ValueError, match="wrong"):
        problem.check(arguments, outputs)


def written(step, arguments):
    if step == "gather":
        return arguments[2].view(torch.uint8)
    first = arguments[0]
    return (first if isinstance(first, Rows) else first[0]).pool


def test_bytes_are_those_of_the_tensors():
    """What is read and written of appended rows: values, entries, two tables, angles."""
    problem = problem_of("append", "fp8_584", 4)
    _, kv, positions, slots, cos, sin = problem.draw(0, "cpu")
    moved = sum(x.nbytes for x in (kv, positions, slots, cos[:4], sin[:4])) + 4 * 584
    assert problem.nbytes == moved
    rows, indices, out = problem_of("gather", "bf16_512", 4).draw(0, "cpu")
    assert problem_of("gather", "bf16_512", 4).nbytes == 2 * out.nbytes + indices.nbytes
    assert rows.entries >= 8


def test_rows_with_shares():
    from workbench.bench.steps import COPY, rows_of

    problem = problem_of("gather", "bf16_512", 2)
    times = iter((2.0, 8.0, 1.0))
    rows = rows_of(problem, 0, lambda calls: Fixed(next(times)), "cpu")
    assert [row["peer"] for row in rows] == ["kvcache", "torch", COPY]
    assert [row["share"] for row in rows] == [0.5, 0.125, 1.0]


def test_without_a_gpu(run, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "k.json"
    chosen = ("--rows", 1, "2k", "--steps", "append", "--json", file)
    result = run("bench.py", "kvcache", *chosen)
    assert result.returncode == 0, result.stderr
    assert "No CUDA GPU here" in result.stdout
    head, *rows = json.loads(file.read_text())
    assert head["kind"] == "setting"
    assert [row["tokens"] for row in rows] == [1, 2048] * 4


def test_the_file_of_a_run_is_shown(run):
    file = ROOT / "results" / "kvcache_h100.json"
    result = run("bench.py", "kvcache", "--show", file, "--markdown", "--steps", "append")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("NVIDIA H100")
    assert lines[1].startswith("| step | 1 | 128 | 2048 | 8192 | 32768 |")
    assert sum("append" in line for line in lines) == 4
