"""bench.py q8_0 on a CPU: its problems, the contents of a row, and detection of wrong results."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from lab.bench import q8_0 as bench
from lab.commands import BENCH
from lab.flags.q8_0 import LAYOUTS, OPERATIONS

SMALL = bench.Problem("matvec", 8, 64, 2, LAYOUTS)


def problems(flags: str) -> list[bench.Problem]:
    options: argparse.Namespace = BENCH["q8_0"].parser("").parse_args(flags.split())
    return [*bench.problems_of(options)]


def test_problems_are_those_of_the_flags():
    found = problems("")
    assert {p.operation for p in found} == set(OPERATIONS)
    assert {(p.rows, p.cols) for p in found} == {(8192, 2048), (2048, 8192), (6144, 2048)}
    assert {p.tokens for p in found if p.operation == "product"} == {1024, 2048}
    assert {p.tokens for p in found if p.operation == "matvec"} == {1, 4, 16}
    assert [str(p) for p in problems("--operations repack --shapes 64x32")] == ["repack 64 x 32"]


def test_bytes_and_operations():
    """A block is 34 bytes; each element takes a multiplication and an addition."""
    (one,) = problems("--operations matvec --shapes 8192x2048 --tokens 1")
    assert one.nbytes == 8192 * 64 * 34 + 2 * 2048 + 2 * 8192
    assert one.operations == 2 * 8192 * 2048
    (moved,) = problems("--operations repack --shapes 8192x2048")
    assert (moved.nbytes, moved.operations) == (2 * 8192 * 64 * 34, 0)


def once(calls):
    """Call once; every sample is 1 us."""
    calls[0]()
    return lambda: 1.0


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "product"])
def test_a_row_for_every_peer(operation):
    """The kernels run in the emulator; times are invented: 1 us for every peer."""
    problem = replace(SMALL, operation=operation)
    rows = bench.rows_of(problem, 2, samples_of=once, device="cpu")
    peers = [row["peer"] for row in rows]
    ours = ["q8_0"] if operation == "quantise" else [*LAYOUTS]
    torch_too = [bench.TORCH] * (operation in ("matvec", "integer"))
    assert peers == [*ours, *torch_too, bench.COPY, bench.READ]
    assert not [row["refused"] for row in rows if "refused" in row]
    for row in rows:
        assert row["gbs"] == pytest.approx(problem.nbytes * 1e-3)
        assert row["of_copy"] == row["of_read"] == 1.0
        assert ("tops" in row) == (problem.operations > 0 and row["peer"] not in ("copy", "read"))


def test_wrong_results_are_noticed():
    inputs = bench.Inputs.drawn(SMALL, 0, "cpu")
    right = inputs.calls(SMALL)["soa"]()
    bench.check(SMALL, inputs, "soa", right)
    with pytest.raises(ValueError, match="off fp64"):
        bench.check(SMALL, inputs, "soa", right + 1)
    moved = replace(SMALL, operation="dequantise")
    wide = inputs.calls(moved)["soa"]()
    wide[0, 0] += 1
    with pytest.raises(ValueError, match="other bits"):
        bench.check(moved, inputs, "soa", wide)


def test_without_a_gpu_sizes_alone(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "rows.json"
    assert BENCH["q8_0"].main("", ["--shapes", "64x32", "--json", str(path)]) == 0
    assert "No CUDA GPU here" in capsys.readouterr().out
    assert '"kind": "static"' in path.read_text()
