"""The scripts from outside: --help, what explain prints, exit codes, the files they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from workbench.commands import EXPLAIN, RUN
from workbench.house.source import ROOT
from workbench.place import choose_place

TINY = ("--shape", "1,5,7,1,1")


def test_explain_prints_the_whole_plan(run):
    plan = make_plan(AttentionConfig(head_dim=128, right=True, p_path="smem", k_stages=3))
    flags = ("--head-dim", "128", "--causal", "--p-path", "smem", "--k-stages", "3")
    result = run("explain.py", *flags)
    assert result.returncode == 0, result.stderr
    out = result.stdout
    words = set(out.replace(",", " ").split())
    assert {role.name for role in plan.roles.roles} <= words
    assert {edge.name for edge in plan.edges.edges} <= words
    assert {buffer.name for buffer in plan.smem.buffers} <= words
    assert {item.name for item in plan.tmem.ranges} <= words
    assert f"{plan.smem.bytes:,} of" in out


def test_the_readme_of_fmha_shows_the_live_plan(run):
    _, _, plan = run("explain.py").stdout.partition("\n\n")
    assert plan.startswith("Roles: ")
    assert plan.strip() in (ROOT / "fmha" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("explain.py", ("--head-dim", "512", "--p-path", "tmem"), "beside 256 of S"),
        ("dump.py", ("--k-stages", "99"), "limit 232448"),
        ("emulate.py", ("--head-dim", "63"), "head_dim 63"),
        ("emulate.py", ("--rope-dim", "3"), "3 is not an even number"),
        ("run.py", ("fmha", "--head-dim", "63"), "head_dim 63"),
        ("run.py", ("fmha", "--k-stages", "99"), "limit 232448"),
        ("run.py", ("fmha", "--window", "x"), "'x' is not L or L,R"),
        ("run.py", ("gqa", "--head-dim", "96"), "head_dim 96"),
        ("run.py", ("gqa", "--cluster", "3"), "cluster 3"),
        ("run.py", ("gqa", "--kv-len", "many"), "'many' is not a list"),
        ("run.py", ("gqa", "--batch", "3", "--kv-len", "5,6"), "one length, or as many"),
    ],
)
def test_refusals_are_one_line_with_the_value(script, flags, words, run):
    result = run(script, *flags)
    assert result.returncode == 2, result.stdout + result.stderr
    assert words in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(("flags", "config"), [
    ((), AttentionConfig()),
    (("--causal",), AttentionConfig(right=True)),
    (("--window", "8,", "--sink-tokens", "2"), AttentionConfig(left=True, sink_tokens=True)),
    (("--window", ",8", "--softcap", "3"), AttentionConfig(right=True, softcap=True)),
    (("--head-dim", "192,128", "--dtype", "fp16"),
     AttentionConfig(head_dim=192, v_head_dim=128, dtype="fp16")),
    (("--varlen", "--raw", "--out-dtype", "bf16"),
     AttentionConfig(varlen_q=True, varlen_k=True, normalize=False, out_dtype="bf16")),
    (("--varlen", "q", "--page-size", "32", "--sinks"),
     AttentionConfig(varlen_q=True, page_size=32, kv_lens=True, sinks=True)),
    (("--q-offset", "4", "--kv-lens", "7", "--rope-dim", "16"),
     AttentionConfig(q_offset=True, kv_lens=True, rope_dim=16)),
    (("--pack", "--pdl", "--p-path", "smem", "--k-stages", "4", "--v-stages", "2",
      "--rescale-log2", "0"),
     AttentionConfig(pack_heads=True, pdl=True, p_path="smem", k_stages=4, v_stages=2,
                     rescale_log2=0.0)),
    (("--q-len", "4", "--q-heads", "8"), AttentionConfig(pack_heads=True)),
    (("--q-len", "4", "--q-heads", "8", "--no-pack"), AttentionConfig()),
    (("--batch", "4", "--q-len", "512", "--kv-len", "512", "--q-heads", "32", "--kv-heads", "32"),
     AttentionConfig(schedule="pingpong")),
])  # fmt: skip
def test_flags_spell_the_config(flags, config):
    from workbench.cases import attention as _cases

    options = EXPLAIN["fmha"].parser("").parse_args(flags)
    assert _cases.config_of(_cases.case_of(options)) == config


def test_run_fmha_measures(run, tmp_path):
    report = tmp_path / "rows.json"
    result = run("run.py", "fmha", *TINY, "--check", "--json", report)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "backend: emulate (for the checker)" in result.stdout
    assert "no findings in 1 launch; rules: hardware" in result.stdout
    assert "all within tolerance" in result.stdout
    written = json.loads(report.read_text())
    (launch,) = written["checks"]["launches"]
    assert launch["roles"] == {"4": "mma", "5": "load", **dict.fromkeys("0123", "softmax")}
    (row,) = written["rows"]
    assert row["ok"]
    assert row["max_error"] > 0
    assert 0 < row["of_limit"] <= 1
    roles = {role.name for role in make_plan(AttentionConfig()).roles.roles}
    assert set(row["roles"]) == roles
    assert row["config"] == "head_dim 64, bf16"
    assert all(count > 0 for count in row["roles"].values())


def test_run_fmha_checks_in_the_emulator_alone():
    asked = RUN["fmha"].parser("").parse_args(["--check"])
    assert choose_place(asked).backend == "emulate"


def test_run_fmha_takes_every_kind_of_flag(run):
    """One launch with a bit of everything that goes together."""
    flags = "--shape 2,3,40,4,2 --window 20, --sink-tokens 3 --q-offset 30 --sinks --softcap 4"
    more = "--page-size 16 --kv-lens 40,33 --varlen q --rope-dim 8 --out-dtype fp32 --pdl"
    result = run("run.py", "fmha", *flags.split(), *more.split(), "--backend", "emulate")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all within tolerance" in result.stdout
    assert "d64 bf16>fp32 w20.- first3 cap4 page16 rope8" in result.stdout


def test_run_fmha_fails_out_of_tolerance(run):
    result = run("run.py", "fmha", *TINY, "--backend", "emulate", "--tolerance", "1e-6")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 of 1 out of tolerance" in result.stdout


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_run_fmha_excuses_no_special_value(value):
    from workbench.run import fmha as _run_fmha

    case = _run_fmha.Case(5, 7)
    exact, _ = _run_fmha.references(case)
    assert _run_fmha.judge(case, (exact.o, exact.lse), slack=1.0)["of_limit"] == 0.0
    wrong = exact.o.clone()
    wrong[0, 3, 0, 17] = value
    assert _run_fmha.judge(case, (wrong, exact.lse), slack=1e9)["of_limit"] == float("inf")


def test_emulate_writes_the_timeline(run, tmp_path):
    findings = tmp_path / "findings.json"
    result = run(
        "emulate.py", "fmha", *TINY, "--out", tmp_path / "timeline", "--check-json", findings
    )
    assert result.returncode == 0, result.stderr
    assert "no findings in 1 launch; rules: hardware" in result.stdout
    assert json.loads(findings.read_text())["errors"] == 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    agents = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {f"warp {warp}" for warp in range(6)} <= agents
    assert _is_png(tmp_path / "timeline.png")


def test_dump_writes_the_ptx(run, tmp_path, whole_ptxas):
    result = run("dump.py", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    (ptx,) = tmp_path.glob("*.ptx")
    assert ".target sm_100a" in ptx.read_text()
    assert "tensor core" in result.stdout


def _is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG\r\n")
