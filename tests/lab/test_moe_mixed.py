"""run.py, explain.py, dump.py and nsight.py moe for layers whose activations have no block scales:
bf16, or e4m3.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.names import kernel_name
from kernelkit.plan import hw
from lab.commands import EXPLAIN
from lab.problems import mixed_plan
from lab.problems import moe as layers
from lab.problems.mixed_gemm import PLANS
from lab.problems.moe import layer_of
from lab.verbs.nsight import KERNELS
from moe import reference, unpack, unpack_biases
from moe.config import GroupedConfig
from moe.mixed.choose import BY_AVERAGE
from moe.mixed.config import MixedConfig
from moe.reference_routing import route

MIXED = "moe --activations bf16 --format mxfp4"
SMALL = f"{MIXED} --tokens 2 --hidden 128 --intermediate 64 --experts 3 --top-k 2"
FP8 = "moe --activations e4m3 --format mxfp4"
GPT_OSS = f"{MIXED} --model gpt-oss-120b --experts 128 --top-k 4 --tokens 64 --bias"
ON_HOPPER = f"{GPT_OSS} --arch sm_90a"
BOTH = pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
needs_tools = pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)


def layer(flags: str):
    return layer_of(EXPLAIN["moe"].parser("").parse_args(flags.split()[1:]))


# -- run ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "more"), [
    ("sm_90a", "--bias --activation gpt-oss"), ("sm_90a", "--format nvfp4"),
    ("sm_100a", "--bias --activation gpt-oss"),
])  # fmt: skip
def test_a_layer_runs_and_is_judged(written, arch, more):
    out, found = written(f"run.py {SMALL} {more} --arch {arch} --check")
    assert "within tolerance" in out
    assert layers.NUMBERS in out
    assert found["checks"]["errors"] == 0
    row = found["row"]
    assert row["case"].endswith("activations(bf16)" + " bias" * ("--bias" in more))
    assert (row["arch"], row["launches"]) == (arch, 2), "the choice, and all after it"
    assert 0.05 < row["reference"] < 0.3  # for random numbers in four bits
    assert 0 < row["apart"] < torch.finfo(torch.bfloat16).eps


def test_a_layer_in_e4m3(written):
    """Tokens are rounded when they are sorted; h is rounded, too, with the scale in the flag."""
    flags = SMALL.replace("bf16", "e4m3")
    out, found = written(f"run.py {flags} --bias --h-scale 8 --check")
    assert "within tolerance" in out
    assert found["checks"]["errors"] == 0
    row = found["row"]
    assert " h(8.0) activations(e4m3) bias" in row["case"]
    assert (row["arch"], row["launches"]) == ("sm_90a", 6)
    assert row["apart"] < 0.01 < row["reference"]
    words = layers.FP8
    assert words in " ".join(out.split())


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (1.01, 1), (float("nan"), 1)])
def test_what_is_tolerated(monkeypatch, run, share, code):
    """A hundredth is far less than the error of four bits, and still out of tolerance."""
    wanted = layer(SMALL)
    packed = wanted.packed()

    def fused(x, experts, logits, router, *, activation, **options):
        routed = route(logits, **vars(router))
        given = {"biases": unpack_biases(packed), **vars(activation)}
        return reference.layer(x, *unpack(packed), routed, **given).bfloat16() * share

    monkeypatch.setattr(layers, "fused_moe", fused)
    result = run(f"run.py {SMALL}")
    assert result.returncode == code, result.stdout


@pytest.mark.parametrize(("flags", "words"), [
    ("run.py moe --activations bf16 --format mxfp8", "--format mxfp8: nvfp4 or mxfp4 with"),
    ("run.py moe --activations bf16 --amax", "--amax True: with --activations bf16 only"),
    ("run.py moe --activations bf16 --h-scale 3", "--h-scale 3.0: with --activations bf16"),
    ("run.py moe --activations e4m3", "--format nvfp4: mxfp4 with --activations e4m3"),
    (f"run.py {FP8} --h-scale token", "--h-scale token: with --activations e4m3 each token has"),
    (f"run.py {FP8} --x-scale 2", "--x-scale 2.0: with --activations e4m3 each token has a scale"),
    (f"dump.py {FP8} --carry", "--carry True: with --activations e4m3 each token"),
    (f"explain.py {FP8} --split 3", "split 3: one of (1, 2, 4)"),
    (f"explain.py {FP8} --split 2 --tile-rows 128", "split 2 with tile_rows 128: 1 beyond 64"),
    ("run.py moe --arch sm_90a", "--arch sm_90a: sm_100a with --activations quantised"),
    ("explain.py moe --arch sm_90a", "--arch sm_90a: sm_100a with --activations quantised"),
    ("run.py moe --activations bf16 --dtype fp16", "x is torch.float16, expected "),
    ("run.py moe --activations bf16 --tile-rows 100", "tile_rows 100: one of [8, 16, 32"),
    ("explain.py moe --activations bf16 --tile-n 128", "--tile-n 128: with --activations bf16"),
    ("explain.py moe --teams 2", "--teams 2: needs --activations bf16"),
    ("dump.py moe --activations bf16 --teams 4 --tile-rows 128 --arch sm_90a",
     "tile_rows 128 with 4 warpgroups"),
    ("dump.py moe --activations bf16 --teams 3", "teams 3 of 1 x 64 rows of weights on sm_100a"),
])  # fmt: skip
def test_refused(run, flags, words):
    result = run(flags)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"refused: {words}")


# -- explain --------------------------------------------------------------------------------------


def rows_of(text: str, title: str) -> dict[str, str]:
    """Name -> text of a section."""
    section = text.partition(f"\n{title}\n")[2].partition("\n\n")[0]
    return dict(re.split(r"  +", line.strip(), maxsplit=1) for line in section.splitlines())


@BOTH
def test_figures_by_hand(printed, arch):
    """256 rows of 128 experts, 5760 packed rows of 2880: 45 units of 64."""
    text = printed(f"explain.py {GPT_OSS} --arch {arch}")
    config = layer(GPT_OSS).mixed_product("w13", arch).config
    gathered = "gather, " * (arch == "sm_100a")
    assert text.startswith(f"moe mixed GEMM for {arch}: mxfp4, swiglu, limit, bias, {gathered}")
    assert text.count("moe mixed GEMM") == (1 if gathered else 2)
    rows, plan = rows_of(text, "The walk over tiles"), PLANS[arch](config)
    assert rows["product"] == "128 x [5760, 2880] in mxfp4 by [256, 2880] in bf16"
    assert rows["output"].startswith("[256, 2880] in bf16, a bias, SwiGLU of pairs: 8 rows of gate")
    assert rows["output"].endswith("clamped at 7")
    words = f"{config.tile_n} rows of an expert's matrix x {config.tile_rows} rows of x ("
    assert rows["tile"].startswith(words)
    assert "2 rows per expert on average" in rows["tile"]
    assert rows["K"].startswith("45 units of 64, 4 MMAs each")
    assert rows["ring"].startswith(f"{plan.stages} stages of ")
    sms = hw.SMS_OF[arch]
    assert rows["grid"].startswith(f"{sms} CTAs on {sms} SMs")
    assert rows_of(text, "Weights")["a value"] == "4.25 bits as stored"
    assert all(f"  {role.name} " in text for role in plan.roles.roles)
    assert all(f"  {edge.name} " in text for edge in plan.edges.edges)
    assert f"Shared memory: {plan.smem.bytes:,} of" in text


def test_what_is_chosen_and_what_would_be(printed):
    def walk(more: str) -> dict[str, str]:
        return rows_of(printed(f"explain.py {ON_HOPPER} {more}"), "The walk over tiles")

    chosen, second = walk(""), walk("--product w2")
    assert "would choose" not in chosen["tile"] + chosen["warpgroups"]
    assert second["output"] == "[256, 2880] in bf16, a bias"
    assert second["rows of x"] == "in order"
    asked = walk("--tile-rows 32 --teams 2 --parts 1")
    assert "which would choose 8" in asked["tile"]
    assert asked["warpgroups"].startswith("2, each 1 x 64 rows of the matrix (sizes would choose")
    assert "limited by products" in walk("--tokens 8192 --tile-rows 128")["warpgroups"]
    assert "No rows: no launch." in printed(f"explain.py {MIXED} --tokens 0")


def test_in_e4m3_and_with_shares_of_k(printed):
    """A single token with one expert: 23 tiles of 128 rows, 45 units of K."""
    text = printed(f"explain.py {FP8} --model gpt-oss-120b --experts 1 --top-k 1 --tokens 1")
    rows = rows_of(text, "The walk over tiles")
    assert rows["product"] == "1 x [5760, 2880] in mxfp4 by [1, 2880] in e4m3"
    assert rows["output"].startswith("[1, 2880] in e4m3, SwiGLU")
    assert rows["K"].startswith("45 units of 64, 2 MMAs each")
    assert rows["split"].startswith("2 CTAs per tile (45 tiles by sizes, ")
    assert rows["grid"].startswith("90 CTAs on 132 SMs, 2 per tile, ")
    text = printed(f"explain.py {FP8} --model gpt-oss-120b --split 1 --experts 1 --top-k 1")
    assert "sizes would choose 2" in rows_of(text, "The walk over tiles")["split"]
    assert "convert weights to e4m3, products" in text


# -- dump -----------------------------------------------------------------------------------------


@needs_tools
@pytest.mark.usefixtures("whole_ptxas")
def test_figures_of_the_main_loop(written, tmp_path):
    """Each thread has eight elements for 16 of K and 64 rows: four products of pairs."""
    out, found = written(f"dump.py {ON_HOPPER} --teams 2 --parts 1", "--out", tmp_path / "files")
    assert (found["product"], found["config"]["teams"], found["spills"]) == ("w13", 2, 0)
    assert found["loop"]["HGMMA"] == 1
    assert found["loop"]["bf16 products"] == 4
    assert found["loop"]["spills"] == 0
    assert found["turn"] == 128
    assert found["serialised"] is False
    assert "wgmma serialised: no" in out
    assert found["sass"]["tensor core"] >= found["turn"] / 16
    assert found["smem_bytes"] == PLANS["sm_90a"](MixedConfig(**found["config"])).smem.bytes
    assert "Main loop, per warp and 16 of K, 1 x 64 rows of weights: " in out


@needs_tools
@pytest.mark.usefixtures("whole_ptxas")
def test_figures_of_the_main_loop_in_e4m3(written, tmp_path):
    """A word holds eight elements of a row for 32 of K: two words of magnitudes, by one PRMT
    each."""
    flags = f"dump.py {FP8} --product w2 --tile-rows 8 --teams 2 --parts 1"
    out, found = written(flags, "--out", tmp_path / "files")
    assert found["loop"]["QGMMA"] == 1
    assert (found["loop"]["HGMMA"], found["loop"]["spills"], found["turn"]) == (0, 0, 128)
    assert found["serialised"] is False
    assert "Main loop, per warp and 32 of K, 1 x 64 rows of weights: " in out


@needs_tools
@pytest.mark.usefixtures("whole_ptxas")
def test_figures_of_the_main_loop_on_blackwell(written, tmp_path):
    """The products of pairs are the same; a store to tensor memory has 64 of K."""
    flags = f"{GPT_OSS} --tile-rows 16 --teams 2 --parts 1"
    out, found = written(f"dump.py {flags}", "--out", tmp_path / "files")
    assert (found["arch"], found["spills"], found["turn"]) == ("sm_100a", 0, 128)
    assert found["loop"]["STTM"] == 1 / 4
    assert found["loop"]["bf16 products"] == 4
    assert found["loop"]["spills"] == 0
    assert "Main loop, per warp and 16 of K, 1 x 64 rows of weights: " in out


@BOTH
def test_the_grid_covers_every_tile(arch):
    grid = mixed_plan.configs(arch)
    assert len(set(grid)) == len(grid)
    for config in grid:
        PLANS[arch](config)
    chosen = {rows for key, sizes in BY_AVERAGE.items() if key[0] == arch
              for rows in itertools.chain(*sizes.values())}  # fmt: skip
    assert {config.tile_rows for config in grid} == chosen
    assert {config.fmt for config in grid} == {"mxfp4", "nvfp4"}
    rows = {"bf16", "e4m3"} if arch == "sm_90a" else {"bf16"}
    assert {config.x for config in grid} == rows


@needs_tools
@pytest.mark.usefixtures("whole_ptxas")
def test_a_grid_is_a_table(monkeypatch, written, tmp_path):
    monkeypatch.setattr(mixed_plan, "configs", lambda arch: (MixedConfig(tile_rows=8),))
    table, (_, row) = written(f"dump.py {MIXED} --arch sm_90a --grid", "--out", tmp_path)
    assert row["config"] == {"tile_rows": 8}
    assert f" {sum(row['loop'].values()):.1f} " in table


# -- nsight ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [MixedConfig(), GroupedConfig()])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_a_profiler_finds_every_product(config, arch):
    assert re.search(KERNELS["moe"], kernel_name(KernelKey("moe.kernel", config, arch)))
