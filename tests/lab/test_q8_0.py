"""`run.py`, `explain.py` and `dump.py q8_0`: results of both layouts, plans compared with launches,
and figures of a kernel.
"""

from __future__ import annotations

import re

import pytest

from cycle_model.sass import tools as sass
from kernelkit.call.launch import emulation
from lab.commands import EXPLAIN, RUN
from lab.flags import q8_0 as flags
from lab.problems import q8_0 as cases
from q8_0.launch import ARCHS

SMALL = "--shapes 24x64 --tokens 3 17 --operations matvec product"
ALL = "--shapes 40x256 136x64 --tokens 1 3 17 --bias"


@pytest.mark.parametrize("given", [SMALL, f"{SMALL} --dtype fp16 --bias --arch sm_89 --check", ALL])
def test_both_layouts_are_right(written, given):
    out, found = written(f"run.py q8_0 {given}")
    rows, options = found["rows"], RUN["q8_0"].parser("").parse_args(given.split())
    assert {row["arch"] for row in rows} == {options.arch or ARCHS[0]}
    assert {row["operation"] for row in rows} == set(options.operations)
    assert [row["wrong"] for row in rows] == [""] * len(rows)
    assert all(row["launches"] == 1 and row["instructions"] > 0 for row in rows)
    for row in rows:
        assert (row["error"] > 0) == (row["operation"] in cases.PRODUCTS)
    assert {"soa", "interleaved"} <= {row["peer"] for row in rows}
    assert ("no findings in 4 launches" in out) == options.check
    assert ("checks" in found) == options.check


def test_a_wrong_result_is_an_exit_code(run, monkeypatch):
    monkeypatch.setattr(cases, "LARGEST_ERROR", 0.0)
    result = run("run.py q8_0 --shapes 24x64 --tokens 3 --operations matvec")
    assert result.returncode == 1
    assert result.stdout.count("of the largest result off fp64") == 2


def test_other_bits_in_the_other_layout_are_noticed(run, monkeypatch):
    made = []

    def moved(*operands, **options):
        made.append(cases.matvec.__wrapped__(*operands, **options))
        return made[-1] + len(made) * 2.0**-20

    moved.__wrapped__ = cases.matvec
    monkeypatch.setattr(cases, "matvec", moved)
    given = "--shapes 24x64 --tokens 3 --operations matvec --dtype fp32"
    result = run(f"run.py q8_0 {given}")
    assert result.returncode == 1
    assert "wrong: bits differ from soa" in result.stdout


def problems(command, given: str) -> list[cases.Problem]:
    return cases.some_of(command["q8_0"].parser("").parse_args(given.split()))


def test_a_bias_is_of_products():
    assert {(p.operation, p.bias) for p in problems(EXPLAIN, "--bias")} == {
        *((name, True) for name in cases.PRODUCTS if name not in flags.HOPPER),
        *((name, False) for name in ("repack", "dequantise", "quantise")),
    }
    (one,) = problems(EXPLAIN, "--operations product --tokens 64 --shapes 8x32 --dtype fp32 --bias")
    assert one.nbytes == 8 * 34 + 64 * 34 + 4 * 64 * 8 + 4 * 8


# -- explain --------------------------------------------------------------------------------------


def grids_of(text: str) -> list[int]:
    """CTAs of every kernel."""
    found = re.findall(r"^  grid +(\d+)(?: x (\d+))? CTA", text, re.MULTILINE)
    return [int(x) * int(y or 1) for x, y in found]


@pytest.mark.parametrize("given", [
    "--shapes 136x64 --tokens 3 17",
    "--shapes 136x256 40x32 --tokens 1 2 9 16 17 130 --dtype fp32",
])  # fmt: skip
def test_the_grids_are_those_of_the_launches(printed, monkeypatch, given):
    """Kernels are not compiled, and launches are only recorded."""
    launched = []

    def noted(kernel, arguments, target, device):
        launched.append(arguments[1] * (arguments[2] if len(arguments) > 2 else 1))

    for module in ("q8_0.launch", "q8_0.product.launch"):
        monkeypatch.setattr(f"{module}.launch", noted)
        monkeypatch.setattr(f"{module}.compile_kernel", lambda config, arch: None)
    with emulation(arch="sm_89"):
        for problem in problems(EXPLAIN, given):
            for call in cases.Inputs.empty(problem).calls(problem, arch="sm_89").values():
                call()
    monkeypatch.undo()
    assert grids_of(printed(f"explain.py q8_0 {given} --arch sm_89")) == launched
    assert len(launched) > 8


@pytest.mark.parametrize("arch", ["sm_100a", "sm_89"])
def test_shared_memory_is_that_of_the_config(printed, arch):
    given = f"--operations product --tokens 2k 5k --arch {arch}"
    options = EXPLAIN["q8_0"].parser("").parse_args(given.split())
    keys = cases.some_of(options)[0].keys(arch)
    text = printed(f"explain.py q8_0 {given}")
    for key in keys:
        config = key.config
        assert f"Shared memory: {config.smem_bytes:,} of" in text
        rows = [(words[0], words[1]) for words in cases.memory(config)]
        begins = {name: int(words.strip("[) ").split(",  ")[0].replace(",", "").split()[0])
                  for words, name in rows}  # fmt: skip
        assert begins["rows"] == config.w_offset
        assert begins["scales"] == config.x_scale_offset
        assert begins.get("blocks", config.raw_offset) == config.raw_offset


def test_figures_by_hand(printed):
    text = printed(
        "explain.py q8_0 --operations integer --shapes 4096x4096 --tokens 4 --arch sm_89"
    )
    assert text.startswith("integer 4096 x 4096, 4 tokens, ")
    assert "q8_0.batch_kernel for sm_89: q8_1, layout soa, out bf16" in text
    rows = dict(re.findall(r"^  (\S.*?)  +(.*)$", text, re.MULTILINE))
    assert rows["grid"] == "256 CTAs for 128 SMs"  # 16 rows; 8 warps share their columns
    assert rows["products"] == "mma.sync m16n8k32 in int8"
    assert rows["tokens"] == "4, computed 8"
    assert "4,352 bytes at a time" in rows["step"]  # 16 rows x 8 blocks x 34 bytes
    text = printed("explain.py q8_0 --operations integer --tokens 1")
    assert "  dp4a" in text


# -- dump -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("whole_ptxas")
def test_figures_of_a_kernel(written, tmp_path):
    given = "--operations integer --tokens 1 --layouts soa --arch sm_89"
    out, found = written(f"dump.py q8_0 {given}", "--out", tmp_path)
    assert out.startswith("q8_0.matvec_kernel for sm_89: q8_1, layout soa, out bf16")
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".target sm_89" in ptx.read_text()
    assert found["ptx"]["memory"] > 0
    if sass.tools_found():
        assert (found["stack"], found["spills"]) == (0, 0)
        assert sum(found["sass"].values()) == found["instructions"]


def test_numbers_are_explained_for_hopper(printed):
    """Tiles and clusters of a product of numbers; a clear refusal for other GPUs."""
    given = "explain.py q8_0 --operations numbers --tokens 128 --layouts soa --arch"
    text = printed(f"{given} sm_90a")
    assert "1 of 128 tokens, 64 of 128 rows" in text
    assert "2 share K of a tile" in text
    problem = problems(EXPLAIN, "--operations numbers --tokens 17 --layouts soa")[0]
    with pytest.raises(NotImplementedError, match="accepts sm_90a; on other GPUs, `quantise` x"):
        problem.keys("sm_89")


# -- flags ----------------------------------------------------------------------------------------


def test_flags_name_what_there_is():
    """Flags are known without importing the packages."""
    assert (*cases.DTYPES,) == flags.DTYPES
    every = flags.OPERATIONS + flags.HOPPER
    assert set(cases.PRODUCTS) < set(every)
    for operation in every:
        problem = cases.Problem(operation, 8, 32, 1, flags.LAYOUTS)
        assert cases.Inputs.empty(problem).calls(problem)
