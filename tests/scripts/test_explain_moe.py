"""`explain.py moe`: its figures beside those of the plan and those worked out by hand."""

from __future__ import annotations

import math
import re
import shlex

import pytest

from moe.launch import grid
from moe.sm100.plan import ROLES, make_plan
from tests.scripts.test_run_moe import layer
from workbench.commands import EXPLAIN
from workbench.house.source import ROOT


@pytest.fixture
def explain(capsys):
    def printed(flags: str) -> str:
        assert EXPLAIN["moe"].main("", shlex.split(flags)) == 0
        return capsys.readouterr().out

    return printed


def row(text: str, name: str) -> str:
    """What stands beside a name."""
    (found,) = re.findall(rf"^  {re.escape(name)}  +(.*)$", text, re.MULTILINE)
    return found


@pytest.mark.parametrize("tile_rows", [8, 32, 128, 256])
def test_the_whole_plan_is_there(explain, tile_rows):
    flags = f"--tokens 8 --tile-rows {tile_rows}"
    text = explain(flags)
    plan = make_plan(layer(flags).product("w13").config)
    words = set(text.replace(",", " ").split())
    assert {role.name for role in ROLES.roles} <= words
    assert {edge.name for edge in plan.edges.edges} <= words
    assert {buffer.name for buffer in plan.smem.buffers} <= words
    assert {item.name for item in plan.tmem.ranges} <= words
    assert f"{plan.smem.bytes:,} of" in text
    assert row(text, "ring") == f"{plan.stages} stages"
    assert row(text, "tile").startswith(f"{tile_rows} rows of an expert x ")


def test_figures_by_hand(explain):
    """40 tokens, 2 of 6 experts: 80 rows, 256 packed columns; K = 256 is a stage of e2m1."""
    flags = "--tokens 40 --tile-rows 64 --activation deepseek-v4"
    text = explain(flags)
    first = text.splitlines()[:2]
    assert first[0].startswith("moe grouped GEMM for sm_100a: nvfp4, ")
    assert first[1].startswith("product with w13 of T40 H256 I128 E6 k2 nvfp4 ")
    assert row(text, "product") == "[80, 256] by expert x 6 x [256, 256]"
    what, layout = re.findall(r"^  output  +(.*)$", text, re.MULTILINE)
    assert what == (
        "[80, 128] in nvfp4, SwiGLU of pairs: 32 rows of gate, then of up, clamped at 10"
    )
    assert layout == "at most 6 blocks of 2 atoms, as those of x"
    assert "13.3 rows of an expert on average, 40 at most" in row(text, "tile")
    # A tile for every expert: none has more than 40 rows.
    assert row(text, "tiles") == (
        "2 of columns x 6 of rows at most, whatever the counts; at least 2 of rows"
    )
    assert row(text, "grid").startswith("12 CTAs on 148 SMs, ")
    assert row(text, "K") == "1 stage of 256, 128 bytes, 64 an MMA"
    assert row(text, "last stage") == "256 elements of K, 4 MMAs"
    # 256 rows of 128 bytes, as many factors as they have blocks of 16, and two global scales.
    assert row(text, "weights") == "36,872 bytes of an expert, 221,232 if 6 have rows"
    assert row(text, "x").startswith("at most 6 blocks of 128 rows, 4 atoms each; ")
    assert row(text, "w") == "2 blocks of an expert, 4 atoms each"


def test_a_tail_of_k_and_a_pair_of_ctas(explain):
    """K = 2880 is 11 stages of 256 and a quarter."""
    flags = "--model gpt-oss-120b --tokens 4096 --experts 4 --top-k 1 --tile-rows 256"
    text = explain(f"{flags} --product w2")
    assert row(text, "last stage") == "64 elements of K, 1 MMA"
    assert row(text, "K").startswith("12 stages of 256, ")
    assert row(text, "output").startswith("[4096, 2880] in bf16")
    assert "a pair of CTAs" in row(text, "tile")
    arguments = layer(flags).product("w2")
    columns = math.ceil(2880 / arguments.config.tile_n)
    # 4096 rows of 4 experts: 16 tiles of 256, and 3 more where no expert has a multiple of them.
    assert row(text, "tiles").startswith(f"{columns} of columns x 19 of rows at most")
    assert grid(arguments) == 148
    assert row(text, "grid").startswith("148 CTAs in 74 clusters of 2 on 148 SMs, ")


def test_what_is_chosen_and_what_would_be(explain):
    assert "would choose" not in row(explain("--tokens 40"), "tile")
    assert "which would choose 64" in row(explain("--tokens 40 --tile-rows 128"), "tile")


def test_columns_and_carry_are_those_of_the_flags(explain):
    text = explain("--tokens 600 --tile-rows 256 --tile-n 256 --carry --granularity 8")
    assert {"carry", "tile_rows 256", "tile_n 256"} <= set(text.splitlines()[0].split(", "))
    assert row(text, "tile").startswith("256 rows of an expert x 256 rows of its matrix, a pair ")


def test_no_rows_no_launch(explain):
    assert explain("--tokens 0").endswith("\nNo rows: no launch.\n")


@pytest.mark.parametrize(("flags", "words"), [
    ("--tile-rows 16 --tokens 17", "tile_rows 16: an expert may have 17 rows"),
    ("--hidden 72", "K = 72 in nvfp4"),
    ("--tokens 600 --carry --tile-rows 128", "carry with granularity 32"),
    ("--tile-n 64", "tile_n 64: supported are (128, 256)"),
    ("--format mxfp4 --x-scale token", "mxfp4 has no global scale"),
])  # fmt: skip
def test_refusals_name_value_and_limit(capsys, flags, words):
    assert EXPLAIN["moe"].main("", flags.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("refused: ")
    assert words in err


def test_the_readme_spells_commands_that_there_are():
    readme = (ROOT / "moe" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^    python scripts/(\S+) ([^#\n]*)", readme, re.MULTILINE)
    mine = [(name, flags) for name, flags in commands if not name.startswith("bench")]
    assert [name for name, _ in mine] == ["run.py", "explain.py", "dump.py"]
    for name, flags in mine:
        words = shlex.split(flags)
        assert words.pop(0) == "moe", name
        assert layer(shlex.join(word for word in words if word != "--check")).tokens
