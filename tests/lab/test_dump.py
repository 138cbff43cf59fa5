"""`dump.py`: files, figures and the grids, compared with counts by hand."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from cycle_model.sass import tools as sass
from cycle_model.sass.tools import parse
from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.portable.plan import PortablePlan
from lab.commands import DUMP
from lab.problems import gqa
from lab.problems import moe_plan as moe
from lab.sass import loops
from moe.config import TILE_ROWS, GroupedConfig
from moe.sm100.plan import make_plan
from tests.lab.test_sass import listing

pytestmark = pytest.mark.usefixtures("whole_ptxas")
needs_tools = pytest.mark.skipif(not sass.tools_found(), reason=sass.HOW_TO_GET_TOOLS)

SMALL = "gqa --kv-len 512 --kv-heads 2 --q-heads 16 --head-dim 64"  # 8 columns


@pytest.fixture
def dumped(written, tmp_path):
    """Return (printed text, content of --json); files lie in tmp_path."""
    return lambda flags: written(f"dump.py {flags}", "--out", tmp_path)


def files_of(folder: Path, stem: str, arch: str) -> None:
    """Check that PTX, cubin and SASS of one kernel exist."""
    names = {path.suffix: path for path in folder.glob(f"{stem}*")}
    assert set(names) == {".ptx", ".cubin", ".sass"}
    assert f".target {arch}" in names[".ptx"].read_text()


def test_ptx_of_attention(printed, tmp_path):
    out = printed("dump.py", "--out", tmp_path)
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".target sm_100a" in ptx.read_text()
    assert "tensor core" in out


def test_figures_of_attention(dumped):
    out, figures = dumped("--causal")
    assert figures["config"]["right"]
    assert figures["ptx"]["tensor core"] > 0
    if sass.tools_found():
        assert "Softmax loops, per warp and tile" in out
        assert {loop["masked"] for loop in figures["loops"]} == {False, True}
        assert figures["stack"] == 0


def test_a_step(dumped, tmp_path):
    _, figures = dumped("append --names 'K and V'")
    assert figures["ptx"]["memory"] > 0
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".target sm_100a" in ptx.read_text()


# -- decode ---------------------------------------------------------------------------------------


@needs_tools
@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_figures_of_a_step_on_hopper(dumped, tmp_path, kv_dtype):
    """16 keys of 64 columns, K and V: the instructions that a warp must issue, without spills."""
    out, found = dumped(f"{SMALL} --arch sm_90a --kv-dtype {kv_dtype}")
    files_of(tmp_path, "gqa_sm_90a_head_dim_64_", "sm_90a")
    row_bytes = 64 * {"bf16": 2, "e4m3": 1}[kv_dtype]
    loop = found["loop"]
    assert loop["HMMA"] == 2 * 64 // 16  # K Q^T and V^T P, 16 columns of the head at a time
    assert loop["LDSM"] == 2 * 16 * row_bytes // 512  # a fragment has 16 x 32 bytes
    assert loop["LDGSTS"] == 2 * 16 * row_bytes // (32 * 16)  # 16 bytes a lane
    assert loop["MOVM"] == 2  # P of 16 keys and 8 columns, two 8 x 8 matrices
    assert found["ptx"]["mma.sync"] == loop["HMMA"]
    assert found["sass"]["HMMA"] == loop["HMMA"]  # one loop in the kernel
    assert sum(found["sass"].values()) == found["instructions"]
    assert (found["stack"], found["spills"], loop["spills"]) == (0, 0, 0)
    assert found["smem_bytes"] == PortablePlan(DecodeConfig(**found["config"])).smem_bytes
    assert out.startswith("gqa_lowlatency for sm_90a: head_dim 64, bf16, ")
    assert f"{found['registers']} registers, 0 bytes of stack, 0 spills, " in out
    assert "Loop over keys, per warp and step of 16 keys: " in out


@needs_tools
def test_the_softmax_loop_of_blackwell(dumped):
    """A thread has one key of a tile: an exponential per column, and one for the shrink factor."""
    _, found = dumped(f"{SMALL} --arch sm_100a")
    assert found["loop"]["MUFU"] == 8 + 1
    assert found["unit"] == "tile of 128 keys"
    assert found["ptx"]["tensor core"] > 0
    assert found["ptx"]["mma.sync"] == found["loop"]["HMMA"] == 0


@needs_tools
def test_the_grid_has_a_row_per_config_and_says_what_made_it(monkeypatch, dumped):
    cells = (("sm_90a", "bf16", 64, 8), ("sm_90a", "e4m3", 256, 64), ("sm_100a", "bf16", 64, 8))
    monkeypatch.setattr(gqa, "GRID", cells)
    table, (head, *rows) = dumped(f"{SMALL} --grid")
    assert datetime.date.fromisoformat(head["date"])
    assert "nvidia-cutlass-dsl" in head["versions"]
    keys = ("arch", "kv_dtype", "head_dim", "columns")
    assert [tuple(row[key] for key in keys) for row in rows] == list(cells)
    hopper, refused, blackwell = rows
    assert refused["refused"] == "4 row tiles of 16 instead"  # because of registers for O
    for row in (hopper, blackwell):
        assert row["ptxas"].startswith("1")
        assert row["spills"] == 0
        assert DecodeConfig(**row["config"]).cluster == 4  # 4 tiles of 128 keys
    assert blackwell["warps"] == 7
    assert re.search(r"sm_90a +e4m3 +256 +64 +- .* 4 row tiles of 16 instead", table)
    numbers = [str(hopper[name]) for name in ("warps", "stages", "registers")]
    assert re.search(rf"sm_90a +bf16 +64 +8 +4 +{' +'.join(numbers)} +0 +0 ", table)


def test_the_grid_covers_what_a_kernel_may_be_compiled_for():
    case = gqa.case_of(DUMP["gqa"].parser("").parse_args("--kv-heads 4 --q-len 2".split()))
    found = list(gqa.cases_of(case))
    assert len(found) == 2 * 2 * 4 * 4
    assert all(one.q_heads * one.q_len == columns * 4 for one, columns in found)
    assert {one.head_dim for one, _ in found} == {64, 128, 256, 512}
    _, figures = gqa.cell_of(gqa.replace(case, head_dim=96, arch="sm_90a"), 8)
    with pytest.raises(NotImplementedError, match="head_dim 96"):
        figures(Path())


STEPS = """
    .L_x_0:
    LDGSTS.E.BYPASS.128 [R1], [R2.64]
    .L_x_1:
    HMMA.16816.F32.BF16 R4, R8, R12, R4 * 16
    LDGSTS.E.BYPASS.128 [R1], [R2.64] * 4
    LDSM.16.M88.4 R8, [R3] * 8
    LDL R5, [R1]
    @P0 BRA `(.L_x_1)
    @P1 BRA `(.L_x_0)
    EXIT
"""


def twice(text: str) -> str:
    """Append a copy of the loops."""
    return text.replace("    EXIT\n", "") + text.replace("_x_", "_y_")


def nonzero(counts: dict[str, float]) -> dict[str, float]:
    return {kind: count for kind, count in counts.items() if count}


def test_the_inner_loop_counts_per_step():
    (function,) = parse(listing(STEPS))
    config = DecodeConfig(head_dim=64)  # 8 products of 16 x 8 x 16 in a step: two steps here
    found = loops.decode_loop(function, config, "sm_90a")
    assert nonzero(found["loop"]) == {
        "HMMA": 8, "LDGSTS": 2, "LDSM": 4, "spills": 0.5, "branches": 0.5,
    }  # fmt: skip
    assert (found["stalls"], found["mufu_distance"]) == (sum(found["loop"].values()), 0)
    assert loops.decode_loop(function, config, "sm_100a")["loop"] == {}
    (two_loops,) = parse(listing(twice(STEPS)))
    assert loops.decode_loop(two_loops, config, "sm_90a")["loop"] == {}


@pytest.mark.parametrize(("elf", "version"), [
    ("toolkit=12.9\nTool Version: Cuda compilation tools, release 12.9, V12.9.83", "12.9.83"),
    ("64bit elf: type=2, abi=7, sm=90a, toolkit=129, flags = 0x5a0d5a", "12.9"),
    ("64-bit ELF: type=ET_EXEC, ABI=8, sm=90a, toolkit=13.0, flags", "13.0"),
    ("no elf", "unknown"),
])  # fmt: skip
def test_the_version_of_ptxas_is_in_the_cubin(monkeypatch, elf, version):
    monkeypatch.setattr(sass, "_output", lambda *command: elf)
    assert sass.ptxas_version(Path("any.cubin")) == version


# -- experts --------------------------------------------------------------------------------------


@needs_tools
def test_figures_of_a_product(dumped, tmp_path):
    """A sigmoid is an exponential and a reciprocal, for every pair of columns."""
    out, found = dumped("moe --tile-rows 128 --h-scale token")
    files_of(tmp_path, "moe_sm_100a_nvfp4", "sm_100a")
    assert (found["product"], found["config"]["out"]) == ("w13", "bf16")
    epilogue, config = found["epilogue"], GroupedConfig(**found["config"])
    assert epilogue["MUFU"] == 2 * 32 / 2
    assert epilogue["LDTM"] == 32 / config.subtile
    assert epilogue["spills"] == found["spills"] == found["stack"] == 0
    assert sum(found["sass"].values()) == found["instructions"]
    assert sum(epilogue.values()) * found["loaded"] / 32 <= found["instructions"]
    assert found["smem_bytes"] == make_plan(config).smem.bytes
    assert found["compile_seconds"] >= 0  # another test may have compiled it
    assert out.startswith("moe grouped GEMM for sm_100a: nvfp4")
    assert re.search(r"^compiled in \d+\.\d s$", out, re.MULTILINE)
    assert f"{found['registers']} registers, 0 bytes of stack, 0 spills, " in out
    assert "Epilogue, per warp and 128 x 32 subtile: " in out


@needs_tools
def test_the_grid_of_products(monkeypatch, dumped):
    monkeypatch.setattr(moe, "GRID", (GroupedConfig(), GroupedConfig(tile_rows=24)))
    table, (head, plain, other) = dumped("moe --grid")
    assert "nvidia-cutlass-dsl" in head["versions"]
    assert plain["config"] == {}
    assert plain["ptxas"].startswith("1")
    assert plain["epilogue"]["MUFU"] == 32
    assert (plain["warps"], plain["spills"]) == (7, 0)
    assert other["refused"].startswith("tile_rows 24: supported are")
    assert re.search(rf"nvfp4 .* {plain['registers']} +0 +0 ", table)
    assert re.search(r"nvfp4, tile_rows 24 .* tile_rows 24: supported are", table)


def test_the_grid_covers_every_tile_and_every_output():
    configs = set(moe.GRID)
    assert len(configs) == len(moe.GRID)
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


@pytest.mark.parametrize(("text", "loaded", "around"), [
    (TILES, 64, 1 + 3 + 1),
    # One loop for full tiles and one for others are counted together.
    (twice(TILES).replace("STL", "LDL"), 128, 10),
])  # fmt: skip
def test_the_epilogue_counts_per_subtile(text, loaded, around):
    (function,) = parse(listing(text))
    columns, epilogue, beside = loops.epilogue_of(function)
    assert (columns, beside) == (loaded, around)
    assert nonzero(epilogue) == {
        "LDTM": 1, "MUFU": 16, "FFMA2, FMUL2, FADD2": 32, "LDG, STG": 3, "spills": 0.5,
        "branches": 0.5,
    }  # fmt: skip


def test_no_epilogue_without_loads_of_tensor_memory():
    (none,) = parse(listing(TILES.replace("LDTM.x32", "LDS")))
    assert loops.epilogue_of(none) == (0, {}, 0)
