"""`dump.py moe`: files, figures and the grid, beside counts worked out by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moe.config import TILE_ROWS, GroupedConfig
from moe.sm100.plan import make_plan
from tests.scripts.test_sass import listing
from workbench.commands import DUMP
from workbench.dump import moe as _dump_moe
from workbench.sass import epilogue as _epilogue_sass
from workbench.sass import listing as _sass

pytestmark = pytest.mark.usefixtures("whole_ptxas")
needs_tools = pytest.mark.skipif(not _sass.tools_found(), reason=_sass.HOW_TO_GET_TOOLS)


def dumped(flags: str, folder: Path) -> dict | list:
    """What main() leaves in JSON."""
    report = folder / "dump.json"
    arguments = [*flags.split(), "--out", str(folder), "--json", str(report)]
    assert DUMP["moe"].main("", arguments) == 0
    return json.loads(report.read_text())


@needs_tools
def test_figures_of_a_product(capsys, tmp_path):
    """A sigmoid is an exponential and a reciprocal, for every pair of columns."""
    found = dumped("--tile-rows 128 --h-scale token", tmp_path)
    names = {path.suffix: path for path in tmp_path.glob("moe_sm_100a_nvfp4*")}
    assert set(names) == {".ptx", ".cubin", ".sass"}
    assert ".target sm_100a" in names[".ptx"].read_text()
    assert (found["product"], found["config"]["out"]) == ("w13", "bf16")
    epilogue = found["epilogue"]
    assert epilogue["MUFU"] == 2 * 32 / 2
    assert epilogue["LDTM"] == 32 / GroupedConfig(**found["config"]).subtile
    assert epilogue["spills"] == found["spills"] == found["stack"] == 0
    assert sum(found["sass"].values()) == found["instructions"]
    assert sum(epilogue.values()) * found["loaded"] / 32 <= found["instructions"]
    assert found["smem_bytes"] == make_plan(GroupedConfig(**found["config"])).smem.bytes
    assert found["compile_seconds"] >= 0  # another test may have compiled it
    printed = capsys.readouterr().out
    assert printed.startswith("moe grouped GEMM for sm_100a: nvfp4")
    assert re.search(r"^compiled in \d+\.\d s$", printed, re.MULTILINE)
    assert f"{found['registers']} registers, 0 bytes of stack, 0 spills, " in printed
    assert "Epilogue, per warp and 128 x 32 subtile: " in printed


@needs_tools
def test_the_grid_has_a_row_per_config_and_says_what_made_it(monkeypatch, capsys, tmp_path):
    refused = GroupedConfig(tile_rows=24)
    monkeypatch.setattr(_dump_moe, "GRID", (GroupedConfig(), refused))
    head, plain, other = dumped("--grid", tmp_path)
    assert "nvidia-cutlass-dsl" in head["versions"]
    assert plain["config"] == {}
    assert plain["ptxas"].startswith("1")
    assert plain["epilogue"]["MUFU"] == 32
    assert (plain["warps"], plain["spills"]) == (7, 0)
    assert other["refused"].startswith("tile_rows 24: supported are")
    table = capsys.readouterr().out
    assert re.search(rf"nvfp4 .* {plain['registers']} +0 +0 ", table)
    assert re.search(r"nvfp4, tile_rows 24 .* refused", table)


def test_the_grid_covers_every_tile_and_every_output():
    configs = set(_dump_moe.GRID)
    assert len(configs) == len(_dump_moe.GRID)
    for config in configs:
        make_plan(config)
    for tile_rows in TILE_ROWS:
        found = {(c.fmt, c.out, c.swiglu) for c in configs if c.tile_rows == tile_rows}
        assert found >= {
            ("nvfp4", "nvfp4", True), ("mxfp4", "mxfp4", True), ("mxfp8", "mxfp8", True),
            ("nvfp4", "bf16", True), ("nvfp4", "bf16", False),
        }  # fmt: skip
    assert {c.granularity for c in configs} == {0, 8, 16, 32, 64}


TILES = """
    .L_x_0:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0
    IMAD R1, R2, R3, R4 * 3
    .L_x_1:
    LDTM.x32 R4, tmem[UR4] * 2
    FMUL2 R4, R4.F32x2.HI_LO, R6 * 64
    MUFU.EX2 R4, R5 * 32
    STG.E.128 desc[UR4][R2.64], R4 * 6
    STL [R1], R5
    @P0 BRA `(.L_x_1)
    @P1 BRA `(.L_x_0)
    EXIT
"""


def test_the_epilogue_counts_per_subtile():
    (function,) = _sass.parse(listing(TILES))
    loaded, epilogue, around = _epilogue_sass.epilogue_of(function)
    assert (loaded, around) == (64, 1 + 3 + 1)
    assert {kind: count for kind, count in epilogue.items() if count} == {
        "LDTM": 1, "MUFU": 16, "FFMA2, FMUL2, FADD2": 32, "LDG, STG": 3, "spills": 0.5,
        "branches": 0.5,
    }  # fmt: skip


def test_several_epilogues_are_taken_together():
    """One for tiles that are full, one for those that are not."""
    twice = TILES.replace("    EXIT\n", "") + TILES.replace("_x_", "_y_").replace("STL", "LDL")
    (function,) = _sass.parse(listing(twice))
    loaded, epilogue, around = _epilogue_sass.epilogue_of(function)
    assert (loaded, around) == (128, 10)
    assert (epilogue["MUFU"], epilogue["spills"]) == (16, 0.5)
    (none,) = _sass.parse(listing(TILES.replace("LDTM.x32", "LDS")))
    assert _epilogue_sass.epilogue_of(none) == (0, {}, 0)


def test_a_refusal_comes_before_anything_is_compiled(capsys):
    assert DUMP["moe"].main("", ["--hidden", "100"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "refused: K = 100 in nvfp4: a positive multiple of 16\n"
