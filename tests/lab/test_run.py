"""`run.py`: its output and files, its exit codes, the cases and layers that flags describe."""

from __future__ import annotations

import re
import shlex

import pytest

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from lab.commands import EXPLAIN, RUN
from lab.flags import kvcache as cache_flags
from lab.problems import fmha, moe
from lab.problems.moe import Layer, layer_of
from lab.tools.place import choose_place
from lab.verbs import life
from lab.verbs.run import measure
from moe import Router, SwiGLU, reference, unpack
from moe.reference_routing import route

TINY = "fmha --shape 1,5,7,1,1"
GQA = (
    "gqa --batch 2 --kv-len 40,3 --kv-heads 1 --q-heads 3 --q-len 2 --head-dim 64 --dtype fp16 "
    "--kv-dtype e4m3 --out-dtype fp32 --page-size 8 --window 20 --sink-tokens 3 "
    "--softcap 4 --sinks --cluster 2 --pdl --arch sm_90a"
)
MOE = "moe --tokens 2 --hidden 128 --intermediate 64 --experts 3 --top-k 2"
KVCACHE = "kvcache --layers 1 --kv-heads 1 --block-tokens 16 --steps 0 --arch sm_90a"


# -- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "config"), [
    ("", AttentionConfig()),
    ("--causal", AttentionConfig(right=True)),
    ("--window 8, --sink-tokens 2", AttentionConfig(left=True, sink_tokens=True)),
    ("--window ,8 --softcap 3", AttentionConfig(right=True, softcap=True)),
    ("--head-dim 192,128 --dtype fp16",
     AttentionConfig(head_dim=192, v_head_dim=128, dtype="fp16")),
    ("--varlen --raw --out-dtype bf16",
     AttentionConfig(varlen_q=True, varlen_k=True, normalize=False, out_dtype="bf16")),
    ("--varlen q --page-size 32 --sinks",
     AttentionConfig(varlen_q=True, page_size=32, kv_lens=True, sinks=True)),
    ("--q-offset 4 --kv-lens 7 --rope-dim 16",
     AttentionConfig(q_offset=True, kv_lens=True, rope_dim=16)),
    ("--pack --pdl --k-stages 4 --v-stages 2 --rescale-log2 0",
     AttentionConfig(pdl=True, k_stages=4, v_stages=2, rescale_log2=0.0)),
    ("--q-len 4 --q-heads 8", AttentionConfig(group=8)),
    ("--q-len 4 --q-heads 8 --no-pack", AttentionConfig()),
    ("--batch 4 --q-len 512 --kv-len 512 --q-heads 32 --kv-heads 32",
     AttentionConfig(schedule="pingpong")),
])  # fmt: skip
def test_flags_spell_the_config(flags, config):
    options = EXPLAIN["fmha"].parser("").parse_args(flags.split())
    assert fmha.config_of(fmha.case_of(options)) == config


def test_attention_is_measured(written):
    out, found = written(f"run.py {TINY} --check")
    assert "backend: emulate (for the checker)" in out
    assert "no findings in 1 launch; rules: hardware" in out
    assert "all within tolerance" in out
    (launch,) = found["checks"]["launches"]
    assert launch["roles"] == {
        **dict.fromkeys("0123", "softmax"), **dict.fromkeys("4567", "correction"),
        "8": "mma", "9": "load_qk", "10": "load_v", "11": "store",
    }  # fmt: skip
    (row,) = found["rows"]
    assert row["ok"]
    assert row["max_error"] > 0
    assert 0 < row["of_limit"] <= 1
    assert set(row["roles"]) == {role.name for role in make_plan(AttentionConfig()).roles.roles}
    assert row["config"] == "head_dim 64, bf16"
    assert all(count > 0 for count in row["roles"].values())


def test_the_demonstration_has_80_columns_and_names_each_case(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    roles = dict.fromkeys(("softmax", "correction", "mma", "load_qk", "load_v", "store"), 62_784)
    errors = dict.fromkeys(("max_error", "reference_error", "relative", "lse_error"), 1e-3)
    names = [str(case).replace("-", " ") for case in fmha.DEMONSTRATION]
    rows = [
        {"case": name, "backend": "emulate", "of_limit": 0.5, "ok": True, "seconds": 99.9,
         "roles": roles, **errors}
        for name in names
    ]  # fmt: skip
    options = RUN["fmha"].parser("").parse_args([])
    fmha.tell(rows, options, choose_place(options))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert all(sum(line.startswith(f" {name[:15]}") for line in lines) == 2 for name in names)


def test_the_checker_is_the_emulators():
    asked = RUN["fmha"].parser("").parse_args(["--check"])
    assert choose_place(asked).backend == "emulate"


def test_attention_takes_every_kind_of_flag(printed):
    """A single launch has many compatible options."""
    flags = "--shape 2,3,40,4,2 --window 20, --sink-tokens 3 --q-offset 30 --sinks --softcap 4"
    more = "--page-size 16 --kv-lens 40,33 --varlen q --rope-dim 8 --out-dtype fp32 --pdl"
    out = printed(f"run.py fmha {flags} {more} --backend emulate")
    assert "all within tolerance" in out
    assert "d64 bf16>fp32 w20.- first3 cap4 page16 rope8" in out


def test_a_launch_for_a_profiler_is_compared_with_nothing(written, monkeypatch):
    monkeypatch.delattr(fmha, "references")
    out, document = written(f"run.py {TINY} --backend emulate --unjudged")
    assert "nothing was compared" in out
    assert "tolerance" not in out
    assert "max_error" not in document["rows"][0]


@pytest.mark.parametrize(("flags", "words"), [
    (f"{TINY} --backend emulate", "1 of 1 out of tolerance"),
    ("gqa --kvL 9 --kvH 1 --qH 1 --D 64 --arch sm_90a", "out of tolerance"),  # older spellings
])  # fmt: skip
def test_out_of_tolerance_is_a_failure(run, flags, words):
    result = run(f"run.py {flags} --tolerance 1e-6")
    assert result.returncode == 1, result.stdout + result.stderr
    assert words in result.stdout


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_special_value_is_excused(value):
    problem = fmha.Attention(fmha.Case(5, 7))
    inputs = problem.draw(0, "cpu")
    exact, _ = fmha.references(problem.case, inputs)
    assert problem.judge(inputs, "", (exact.o, exact.lse), 1.0)["of_limit"] == 0.0
    wrong = exact.o.clone()
    wrong[0, 3, 0, 17] = value
    assert problem.judge(inputs, "", (wrong, exact.lse), 1e9)["of_limit"] == float("inf")


# -- decode, and a step ---------------------------------------------------------------------------


def test_a_bit_of_everything_in_decode(written):
    out, found = written(f"run.py {GQA} --check")
    assert "no findings in 1 launch; rules: hardware" in out
    assert "within tolerance" in out
    assert found["checks"]["errors"] == 0
    row = found["row"]
    assert row["ok"]
    assert 0 < row["of_limit"] <= 1
    assert row["instructions"] > 1000
    assert (row["backend"], row["arch"]) == ("emulate", "sm_90a")
    assert row["case"].startswith("2x40,3 h3/1 b2 d64 fp16/e4m3 pages(8) sinks window(20)")


def test_a_step_runs_and_is_compared(written):
    _, found = written("run.py append --names bf16_512 --rows 3 --check")
    (row,) = found["rows"]
    assert (row["tokens"], row["launches"], row["wrong"]) == (3, 1, "")
    assert found["checks"]["errors"] == 0


# -- experts --------------------------------------------------------------------------------------


def layer(flags: str) -> Layer:
    return layer_of(EXPLAIN["moe"].parser("").parse_args(shlex.split(flags)))


def test_a_bit_of_everything_in_a_layer_of_experts(written):
    flags = "--format nvfp4 --granularity 16 --activation deepseek-v4 --scoring sigmoid"
    more = "--dtype fp16 --x-scale token --h-scale 250 --amax --check"
    out, found = written(f"run.py {MOE} {flags} {more}")
    assert "within tolerance" in out
    assert found["checks"]["errors"] == 0
    row = found["row"]
    assert row["case"] == (
        "T2 H128 I64 E3 k2 nvfp4 fp16 deepseek-v4 sigmoid granularity(16) x(token) h(250.0) amax"
    )
    assert row["case"] in out
    assert (row["backend"], row["arch"]) == ("emulate", "sm_100a")
    assert row["launches"] >= 6
    assert f"no findings in {row['launches']} launches; rules: hardware" in out
    assert 0.05 < row["reference"] < 0.4  # for random numbers in four bits
    assert row["relative"] == pytest.approx(row["reference"], rel=0.02)
    assert row["apart"] < 0.02
    top = re.search(r"largest \|h\|: ([\d.]+), which --h-scale ([\d.]+)", out)
    assert float(top[1]) * float(top[2]) == pytest.approx(2688, rel=1e-3)
    # Each weight has 4.5 bits with its scale factors, and there are two global scales an expert.
    assert row["packed_bytes"] == 3 * (3 * 64 * 128 * 9 // 16 + 2 * 8)


@pytest.mark.parametrize(("share", "code"), [(1.0, 0), (1.06, 1), (0.0, 1), (float("nan"), 1)])
def test_what_is_tolerated_of_experts(monkeypatch, run, share, code):
    """The reference itself passes; a result beyond its tolerance does not."""

    def fused(x, experts, logits, router, *, activation, **options):
        routed = route(logits, **vars(router))
        given = {"fmt": experts.fmt, **vars(activation)}
        return reference.layer(x, *unpack(experts), routed, **given) * share

    monkeypatch.setattr(moe, "fused_moe", fused)
    result = run(f"run.py {MOE} --format mxfp8")
    assert result.returncode == code, result.stdout
    assert ("out of tolerance" in result.stdout) == bool(code)


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
    assert first.config.row_scale  # a scale of each token, by default
    late = layer("--x-scale tensor --h-scale token --dtype fp16")
    assert (late.product("w13").out, late.product("w2").config.row_scale) == ("fp16", True)
    assert not late.product("w13").config.row_scale


def test_long_work_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr("ptxemu.machine.scheduler._CHECK_SECONDS", 0.0)
    options = RUN["fmha"].parser("").parse_args(["--shape", "2,5,7,1,1", "--backend", "emulate"])
    place, heard = choose_place(options), []
    (problem,) = fmha.cases_of(options, place)
    measure(problem, place, options, lambda done, total: heard.append((done, total)))
    assert {total for _, total in heard} == {2}


# -- the cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("watched", ["", "--canary --check"])
def test_the_life_of_requests(written, watched):
    out, found = written(f"run.py {KVCACHE} --draft 2 --events {watched}")
    assert "every entry equals the reference, byte for byte" in out
    assert "attention is within tolerance" in out
    assert "BlockStored" in out
    assert found["ok"]
    assert not watched or found["checks"]["errors"] == 0
    rows = {row["what"]: row for row in found["rows"]}
    assert rows["admit B, 43 tokens"]["hit"] == rows["admit D, 43 tokens"]["hit"] == 32
    assert rows["a token for each, after the fork"]["copies"] == 1
    assert rows["offload B"]["copies"] == 3
    assert rows["fetch B"]["copies"] == 1  # two blocks are still there
    assert rows["offload B"]["moved"] == 3 * 16 * 2 * 128
    assert {"a step of B: NotResident", "a request that needs everything: PoolExhausted"} < set(
        rows
    )
    assert all(row["entries"] and not row["wrong"] for row in rows.values())
    assert 0 < rows["a token for each, at the end"]["of_limit"] <= 1
    assert found["counters"]["blocks_copied_on_write"] == 1
    assert found["metrics"]["requests"] == 3


def test_a_wrong_byte_is_a_failure(monkeypatch, run):
    before = life.Model.write

    def write(self, step):
        tables = before(self, step)
        self.cache.rows("k", 0).data()[step.requests[0].blocks[0], 1, 5] ^= 1
        return tables

    monkeypatch.setattr(life.Model, "write", write)
    monkeypatch.setattr(life.Model, "attend", lambda *_: [])
    result = run(f"run.py {KVCACHE}")
    assert result.returncode == 1
    assert "wrong bytes" in result.stdout
    assert "no attention here" in result.stdout


def test_attention_out_of_tolerance_is_a_failure(monkeypatch, run):
    monkeypatch.setattr(life, "MOST_FULL", 1e-6)
    monkeypatch.setattr(life, "story", lambda life, _: [(life.admit, ("A", [1, 2], 9))])
    result = run(f"run.py {KVCACHE}")
    assert result.returncode == 1
    assert "attention is out of tolerance" in result.stdout


@pytest.mark.parametrize("flags", [
    "--model deepseek-v4-flash --record bf16 --layers 1 --canary",
    "--model deepseek-v4-flash --layers 1 --draft 3 --canary",
    "--model gpt-oss-120b --layers 1",
    "--window 16 --draft 1 --check --canary",
])  # fmt: skip
def test_caches_of_models(printed, flags):
    assert "attention is within tolerance" in printed(f"run.py kvcache {flags} --steps 1")


def test_what_no_kernel_writes_is_named():
    layout, left = life.reduced(cache_flags.layout("deepseek-v4-pro", "fp8"), 2)
    assert left == ["csa_tail", "index_tail", "hca_tail", "index"]
    assert [stream.name for stream in layout.streams] == ["csa", "hca"]
    assert {array.copies for array in (*layout.streams, *layout.rings)} == {2}
