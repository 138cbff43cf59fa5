"""`bench.py toolchains`: tables of what several compilers made, and the process of one of them."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from kernelkit.tune import stopwatch
from lab.bench import toolchains
from lab.bench.toolchain_cases import CASES
from lab.house.source import PACKAGES
from lab.report.toolchains import alike, cases_table, matrix_table

OLD, NEW, LATER = "4.8.0 cu12", "4.8.1 cu12", "4.8.1 cu13"


def compiled(toolchain, cubin, **more):
    return {"kind": "compiled", "case": "one", "arch": "sm_90a", "kernel": "k", "ptx": "8.8",
            "ptxas": "12.9", "registers": 40, "instructions": 1000, "cubin": cubin,
            "toolchain": toolchain, **more}  # fmt: skip


ROWS = [
    compiled(OLD, "a"),
    compiled(NEW, "a"),
    compiled(LATER, "b", instructions=900, ptxas="13.4"),
    {"kind": "compiled", "case": "one", "arch": "sm_110a", "kernel": "k", "toolchain": OLD,
     "failed": "no PTX, and no error"},
    {"kind": "timed", "case": "one", "toolchain": OLD, "us": 10.0},
    {"kind": "timed", "case": "one", "toolchain": LATER, "us": 9.0},
]  # fmt: skip


def test_equal_machine_code_has_the_times_of_the_first_toolchain():
    assert [alike(ROWS[:3], name) for name in (OLD, NEW, LATER)] == ["", OLD, ""]
    _, heads, lines = matrix_table(ROWS)
    found = [dict(zip(heads, line, strict=True)) for line in lines]
    assert [line["time"][:5] for line in found] == ["1.000", "1.000", "0.900"]
    assert [line["sm_110a"] for line in found] == ["0 of 1", "-", "-"]
    assert found[1]["machine code"] == f"that of {OLD}"


def test_a_case_has_the_figures_of_each_machine_code():
    assert cases_table(ROWS)[2] == [["one", "40", "1,000 / 900", "10.00 / 9.00", "0.900"]]


def test_a_process_says_why_a_case_failed(monkeypatch, tmp_path, capsys):
    class Wrong:
        def launches(self):
            raise ValueError("wrong: 3")

    class Right:
        def launches(self):
            return [lambda: None]

    asked = [{"prepare": 0}, {"prepare": 1}, {"sample": 2}]
    monkeypatch.setattr(toolchains.aot, "load", lambda folder, trust: 0)
    monkeypatch.setattr(toolchains, "CASES", (Wrong(), Right()))
    monkeypatch.setattr(stopwatch, "replay", lambda launches: lambda: 1.5)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(map(json.dumps, asked))))
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert toolchains.work(str(tmp_path)) == 0
    said = [*map(json.loads, capsys.readouterr().out.splitlines())]
    assert said == [{"failed": "ValueError: wrong: 3"}, {}, {"us": [1.5, 1.5]}]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_case_has_kernels(arch):
    for case in CASES[:8]:
        assert case.family in PACKAGES
        assert case.keys(arch)
