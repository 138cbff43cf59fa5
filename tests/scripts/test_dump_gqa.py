"""`dump.py gqa`: files, figures and the grid, beside counts worked out by hand."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path

import pytest

from gqa_lowlatency.config import DecodeConfig
from gqa_lowlatency.sm90.plan import Plan90
from tests.scripts.test_sass import listing
from workbench.commands import DUMP
from workbench.dump import gqa as _dump_gqa
from workbench.sass import decode as _decode_sass
from workbench.sass import listing as _sass

pytestmark = pytest.mark.usefixtures("whole_ptxas")
needs_tools = pytest.mark.skipif(not _sass.tools_found(), reason=_sass.HOW_TO_GET_TOOLS)

SMALL = "--kv-len 512 --kv-heads 2 --q-heads 16 --head-dim 64"  # 8 columns


def dumped(flags: str, folder: Path) -> dict | list:
    """What main() leaves in JSON."""
    report = folder / "dump.json"
    arguments = [*flags.split(), "--out", str(folder), "--json", str(report)]
    assert DUMP["gqa"].main("", arguments) == 0
    return json.loads(report.read_text())


@needs_tools
@pytest.mark.parametrize("kv_dtype", ["bf16", "e4m3"])
def test_figures_of_a_step_on_hopper(capsys, tmp_path, kv_dtype):
    """16 keys of 64 columns, K and V: what a warp must issue, and nothing spilled."""
    found = dumped(f"{SMALL} --arch sm_90a --kv-dtype {kv_dtype}", tmp_path)
    names = {path.suffix: path for path in tmp_path.glob("gqa_sm_90a_head_dim_64_*")}
    assert set(names) == {".ptx", ".cubin", ".sass"}
    assert ".target sm_90a" in names[".ptx"].read_text()
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
    assert found["smem_bytes"] == Plan90(DecodeConfig(**found["config"])).smem_bytes
    printed = capsys.readouterr().out
    assert printed.startswith("gqa_lowlatency for sm_90a: head_dim 64, bf16, ")
    assert f"{found['registers']} registers, 0 bytes of stack, 0 spills, " in printed
    assert "Loop over keys, per warp and step of 16 keys: " in printed


@needs_tools
def test_the_softmax_loop_of_blackwell(tmp_path):
    """A thread has one key of a tile: an exponential per column, and one that shrinks."""
    found = dumped(f"{SMALL} --arch sm_100a", tmp_path)
    assert found["loop"]["MUFU"] == 8 + 1
    assert found["unit"] == "tile of 128 keys"
    assert found["ptx"]["tensor core"] > 0
    assert found["ptx"]["mma.sync"] == found["loop"]["HMMA"] == 0


@needs_tools
def test_the_grid_has_a_row_per_config_and_says_what_made_it(monkeypatch, capsys, tmp_path):
    cells = (("sm_90a", "bf16", 64, 8), ("sm_90a", "e4m3", 256, 64), ("sm_100a", "bf16", 64, 8))
    monkeypatch.setattr(_dump_gqa, "GRID", cells)
    found = dumped(f"{SMALL} --grid", tmp_path)
    head, *rows = found
    assert datetime.date.fromisoformat(head["date"])
    assert "nvidia-cutlass-dsl" in head["versions"]
    keys = ("arch", "kv_dtype", "head_dim", "columns")
    assert [tuple(row[key] for key in keys) for row in rows] == list(cells)
    hopper, refused, blackwell = rows
    assert refused["refused"] == "4 row tiles of 16 instead"  # of registers for O
    for row in (hopper, blackwell):
        assert row["ptxas"].startswith("1")
        assert row["spills"] == 0
        assert DecodeConfig(**row["config"]).cluster == 4  # 4 tiles of 128 keys
    assert blackwell["warps"] == 7
    table = capsys.readouterr().out
    assert re.search(r"sm_90a +e4m3 +256 +64 +- +refused", table)
    numbers = [str(hopper[name]) for name in ("warps", "stages", "registers")]
    assert re.search(rf"sm_90a +bf16 +64 +8 +4 +{' +'.join(numbers)} +0 +0 ", table)


def test_the_grid_covers_what_a_kernel_may_be_compiled_for():
    case = _dump_gqa.case_of(_options("--kv-heads 4 --q-len 2"))
    found = list(_dump_gqa.cases_of(case))
    assert len(found) == 2 * 2 * 3 * 4
    assert all(one.q_heads * one.q_len == columns * 4 for one, columns in found)
    assert {one.head_dim for one, _ in found} == {64, 128, 256}
    row = _dump_gqa.row_of(_dump_gqa.replace(case, head_dim=96, arch="sm_90a"), 8, Path())
    assert row["refused"].startswith("head_dim 96")


def _options(flags: str):
    return DUMP["gqa"].parser("").parse_args(flags.split())


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


def test_the_inner_loop_counts_per_step():
    (function,) = _sass.parse(listing(STEPS))
    config = DecodeConfig(head_dim=64)  # 8 products of 16 x 8 x 16 in a step: two steps here
    loop = _decode_sass.loop_of(function, config, "sm_90a")
    assert {kind: count for kind, count in loop.items() if count} == {
        "HMMA": 8, "LDGSTS": 2, "LDSM": 4, "spills": 0.5, "branches": 0.5,
    }  # fmt: skip
    assert _decode_sass.loop_of(function, config, "sm_100a") == {}
    (twice,) = _sass.parse(listing(STEPS.replace("    EXIT\n", "") + STEPS.replace("_x_", "_y_")))
    assert _decode_sass.loop_of(twice, config, "sm_90a") == {}


@pytest.mark.parametrize(("elf", "version"), [
    ("toolkit=12.9\nTool Version: Cuda compilation tools, release 12.9, V12.9.83", "12.9.83"),
    ("64bit elf: type=2, abi=7, sm=90a, toolkit=129, flags = 0x5a0d5a", "12.9"),
    ("64-bit ELF: type=ET_EXEC, ABI=8, sm=90a, toolkit=13.0, flags", "13.0"),
    ("no elf", "unknown"),
])  # fmt: skip
def test_the_version_of_ptxas_is_in_the_cubin(monkeypatch, elf, version):
    monkeypatch.setattr(_sass, "_output", lambda *command: elf)
    assert _sass.ptxas_version(Path("any.cubin")) == version


def test_a_refusal_comes_before_anything_is_compiled(run):
    result = run("dump.py", "gqa", "--head-dim", "96")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "refused: head_dim 96: supported are (64, 128, 256)\n"
