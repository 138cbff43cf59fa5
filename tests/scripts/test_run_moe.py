"""run.py moe: what it prints and writes, its exit codes, where it runs, which layer flags spell."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from moe import Router, SwiGLU, reference
from ptxemu.report import Report
from workbench.cases import moe as _moe_layers
from workbench.commands import EXPLAIN, RUN
from workbench.run import moe as _run_moe

SMALL = "--tokens 2 --hidden 128 --intermediate 64 --experts 3 --top-k 2"


def ran(monkeypatch, capsys, flags: str, *more: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "120")
    code = RUN["moe"].main("", [*flags.split(), *map(str, more)])
    return code, *capsys.readouterr()


def layer(flags: str) -> _moe_layers.Layer:
    return _moe_layers.layer_of(EXPLAIN["moe"].parser("").parse_args(shlex.split(flags)))


def test_a_bit_of_everything(monkeypatch, capsys, tmp_path):
    report = tmp_path / "row.json"
    flags = f"{SMALL} --format nvfp4 --granularity 16 --activation deepseek-v4 --scoring sigmoid"
    more = "--dtype fp16 --x-scale token --h-scale 250 --amax --check --json"
    code, out, _ = ran(monkeypatch, capsys, f"{flags} {more}", report)
    assert code == 0, out
    assert "within tolerance" in out
    written = json.loads(report.read_text())
    assert written["checks"]["errors"] == 0
    row = written["row"]
    assert row["case"] == (
        "T2 H128 I64 E3 k2 nvfp4 fp16 deepseek-v4 sigmoid granularity(16) x(token) h(250.0) amax"
    )
    assert row["case"] in out
    assert (row["backend"], row["arch"]) == ("emulate", "sm_100a")
    assert row["launches"] >= 6
    assert f"no findings in {row['launches']} launches; rules: hardware" in out
    assert 0.05 < row["reference"] < 0.4  # of random numbers in four bits
    assert row["relative"] == pytest.approx(row["reference"], rel=0.02)
    assert row["apart"] < 0.02
    top = re.search(r"largest \|h\|: ([\d.]+), which --h-scale ([\d.]+)", out)
    assert float(top[1]) * float(top[2]) == pytest.approx(2688, rel=1e-3)
    # Each weight has 4.5 bits with its scale factors, and there are two global scales an expert.
    assert row["packed_bytes"] == 3 * (3 * 64 * 128 * 9 // 16 + 2 * 8)


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (1.06, 1), (0.0, 1), (float("nan"), 1)])
def test_what_is_tolerated(monkeypatch, capsys, share, code):
    """The reference itself passes; one that is further away than its own error allows does not."""

    def fused(x, experts, logits, router, *, activation, **options):
        routed = _run_moe.route(logits, **vars(router))
        given = {"fmt": experts.fmt, **vars(activation)}
        return reference.layer(x, *_run_moe.unpack(experts), routed, **given) * share

    monkeypatch.setattr(_run_moe, "fused_moe", fused)
    found, out, _ = ran(monkeypatch, capsys, f"{SMALL} --format mxfp8")
    assert found == code, out
    assert ("out of tolerance" in out) == bool(code)


def test_models_are_their_true_sizes():
    deepseek, gpt_oss = layer("--model deepseek-v4-pro"), layer("--model gpt-oss-120b --tokens 7")
    assert (deepseek.hidden, deepseek.intermediate) == (7168, 3072)
    assert deepseek.form == SwiGLU(1.0, 0.0, 10.0)
    assert deepseek.router == Router(2, "sqrtsoftplus", scale=2.5)
    assert (gpt_oss.hidden, gpt_oss.intermediate, gpt_oss.tokens) == (2880, 2880, 7)
    assert gpt_oss.form == SwiGLU(1.702, 1.0, 7.0)
    assert layer("--model gpt-oss-120b --hidden 256 --activation swiglu").form == SwiGLU()
    assert (deepseek.experts, deepseek.h_scale, layer("--format mxfp8").h_scale) == (2, 300.0, None)


def test_products_are_those_of_the_layer():
    first, second = (layer("--tokens 40 --amax").product(name) for name in ("w13", "w2"))
    assert (first.x.data.shape, first.w.data.shape) == ((80, 128), (6, 256, 128))
    assert (first.out, first.columns, first.most) == ("nvfp4", 128, 40)
    assert (second.x.data.shape, second.w.data.shape) == ((80, 64), (6, 256, 64))
    assert (second.out, second.columns, second.config.granularity) == ("bf16", 256, 0)
    assert first.config.amax > second.config.amax
    late = layer("--h-scale token --dtype fp16")
    assert (late.product("w13").out, late.product("w2").config.row_scale) == ("fp16", True)
    assert not late.product("w13").config.row_scale


@pytest.mark.parametrize(("flags", "words"), [
    ("--hidden 100", "K = 100 in nvfp4: a positive multiple of 16"),
    ("--intermediate 96 --granularity 64", "N = 192: a multiple of 128"),
    ("--top-k 7", "--top-k 7: 6 experts"),
    ("--experts 0", "--experts 0: at least 1"),
    ("--tokens -1", "--tokens -1: at least 0"),
    ("--format mxfp8 --h-scale 3", "--h-scale 3.0: mxfp8 has no global scale"),
    ("--tile-rows 100", "tile_rows 100: supported are (8, 16, 32, 64, 128, 256)"),
    ("--tile-rows 8", "tile_rows 8: an expert may have 9 rows"),
    ("--backend cuda", "no GPU of compute capability 10.x here"),
])  # fmt: skip
def test_refusals_name_value_and_limit(monkeypatch, capsys, flags, words):
    code, out, err = ran(monkeypatch, capsys, flags)
    assert (code, out) == (2, "")
    assert err.startswith("refused: ")
    assert words in err


def test_long_work_says_how_far_it_is():
    said = _run_moe.Stage("running", Report([1, 2])).__rich__()
    assert re.fullmatch(r"running, \d+ s, 2 launches done", said)
    assert _run_moe.Stage("packing").__rich__() == "packing, 0 s"
