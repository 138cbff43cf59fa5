"""examples/gpt_oss with kernels replaced by definitions: a model in fp32 compared with
transformers'.

`test_gpt_oss_kernels.py` runs the kernels.
"""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import save_file
from torch._dynamo.testing import CompileCounter
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from examples.gpt_oss import __main__ as command_line
from examples.gpt_oss import floors, report
from examples.gpt_oss.compare import Comparison, Difference, state_dict
from examples.gpt_oss.config import CONFIGS, named, of_folder
from examples.gpt_oss.engine import Engine, Flight, TokenStep, Took
from examples.gpt_oss.experts import Mxfp4Experts, plain_of
from examples.gpt_oss.model import Elementwise, Model, frequencies
from examples.gpt_oss.weights import Drawn, Stored, load
from kvcache import preset
from lab.house.source import ROOT
from tests.examples import gpt_oss_models as models
from tests.examples.gpt_oss_models import NEW, ROOM, TINY

CPU = torch.device("cpu")
DIGITS = 2e-5  # of logits around 1; one key too many changes them by 1e-2


@pytest.fixture
def by_definition(monkeypatch):
    models.by_definition(monkeypatch)


@pytest.fixture(scope="module")
def in_fp32():
    return models.tiny("bf16", torch.float32)


@torch.no_grad()
def their_logits(theirs, job):
    ids = torch.tensor([job.prompt + job.found[:-1]])
    return theirs(ids, use_cache=False).logits[0, -len(job.found) :]


# A piece ends within a window, at its end, and after it; and prefills in tables of fixed sizes.
@pytest.mark.parametrize(("chunk", "padded"), [(64, 0), (7, 0), (64, 64), (19, 64)])
def test_logits(by_definition, in_fp32, chunk, padded):
    """Logits of a prompt in pieces, and of every new token, are those of transformers."""
    model, theirs = in_fp32
    given, options = models.prompts((21, 5, 40)), {"chunk": chunk, "padded": padded}
    for job in models.served(model, given, requests=4, keep_logits=True, **options):
        exact = their_logits(theirs, job)
        assert (torch.stack(job.logits) - exact).abs().max() < DIGITS
        assert job.found == exact.argmax(-1).tolist()


def test_requests_do_not_mind_each_other(by_definition, in_fp32):
    """There are more requests than places, with different lengths; one shares its beginning with
    another.
    """
    model, given = in_fp32[0], models.prompts((21, 5, 17, 40))
    expected = models.alone(model, given)
    jobs = models.served(model, given, requests=2)
    assert [job.found for job in jobs] == expected
    assert [job.hit for job in jobs] == [0, 0, 0, 0, 32]
    for options in ({"share": False}, {"share": False, "padded": 64}):
        unshared = models.served(model, given, requests=3, **options)
        assert [job.found for job in unshared] == expected
        assert not any(job.hit for job in unshared)


@pytest.mark.parametrize("padded", [0, 64])
def test_a_prompt_takes_one_step(by_definition, in_fp32, padded):
    """A prompt leaves a checkpoint where another one begins, but does not end there for it."""
    model, (first, second) = in_fp32[0], models.prompts((40,))
    expected = models.alone(model, [first, second])
    engine = Engine(model, tokens=ROOM, requests=1, padded=padded)
    jobs = [engine.submit(name, prompt, NEW) for name, prompt in (("a", first), ("b", second))]
    while engine.step():
        pass
    assert [job.found for job in jobs] == expected
    assert [job.hit for job in jobs] == [0, 32]
    assert [each.tokens for each in engine.took if each.kind == "prefill"] == [40, 6]


def test_the_host_is_a_step_behind(by_definition, in_fp32, monkeypatch):
    """A step is launched before the tokens of the one before it are read."""
    order: list[str] = []
    for of, name in ((TokenStep, "run"), (Flight, "tokens")):
        plain = getattr(of, name)
        call = lambda self, plain=plain, name=name: (order.append(name), plain(self))[1]  # noqa: E731
        monkeypatch.setattr(of, name, call)
    models.alone(in_fp32[0], models.prompts((21,))[:1])
    assert order == ["run", *["run", "tokens"] * (NEW - 2), "tokens"]


def test_a_token_that_ends_a_text(by_definition, in_fp32, monkeypatch):
    model, (prompt, _) = in_fp32[0], models.prompts((21,))
    found = models.alone(model, [prompt])[0]
    values = {**TINY.values, "eos_token_id": found[2]}
    stopping = Model(type(TINY)("tiny", values), model.weights, ROOM)
    assert models.alone(stopping, [prompt])[0] == found[: found.index(found[2]) + 1]


def test_a_compiled_model(by_definition, in_fp32, monkeypatch):
    """torch.compile sees the operations between the kernels; its backend here runs the graphs
    eagerly.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model, given = in_fp32[0], models.prompts((21, 5))
    compiled = Model(TINY, model.weights, ROOM, compiled=True)
    assert models.alone(compiled, given) == models.alone(model, given)


def test_what_is_compiled_serves_any_number_of_tokens(monkeypatch):
    """A single token has its own graph; hidden sizes and heads are constants."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compiled, plain = Elementwise.compiled(), Elementwise()
    for tokens, graphs in ((9, 2), (4, 2), (1, 4), (700, 4), (1, 4), (2, 4), (33, 4)):
        x, more, weight = torch.randn(tokens, 16), torch.randn(tokens, 16), torch.randn(16)
        heads, angles = torch.randn(tokens, 6, 8)[:, :-2], torch.randn(tokens, 2, 2, 4)
        given = x, more, weight, 1e-5
        for found, expected in zip(compiled.add_norm(*given), plain.add_norm(*given), strict=True):
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(compiled.rotated(heads, angles), plain.rotated(heads, angles))
        assert counter.frame_count == graphs, tokens


def test_what_an_engine_refuses(in_fp32):
    engine = Engine(in_fp32[0], requests=1, tokens=8)
    for prompt, new in (([], 1), ([1], 0), ([1] * 6, 3)):
        with pytest.raises(ValueError, match=f"{len(prompt)} tokens and {new} new ones"):
            engine.submit("a", prompt, new)
    with pytest.raises(ValueError, match="graphs are for GPUs"):
        Engine(in_fp32[0], requests=1, tokens=8, graph=True)
    with pytest.raises(ValueError, match="4097 positions: tiny has 4096"):
        Model(TINY, in_fp32[0].weights, 4097)


# ---- sizes and weights


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_transformers(name):
    config = named(name)
    values = {k: v for k, v in config.values.items() if k != "model_type"}
    theirs = GptOssConfig(**values)
    assert config.sliding == tuple(each == "sliding_attention" for each in theirs.layer_types)
    speed, scale = frequencies(config)
    wanted, wanted_scale = ROPE_INIT_FUNCTIONS["yarn"](theirs, CPU)
    torch.testing.assert_close(speed, wanted)
    assert scale == pytest.approx(wanted_scale)
    if name == "120b":
        assert config.layout().block_bytes == preset("gpt-oss-120b").block_bytes
        assert (theirs.num_hidden_layers, theirs.num_local_experts) == (36, 128)


def test_another_name():
    with pytest.raises(ValueError, match="'7b': models are 20b, 120b, tiny"):
        named("7b")


def test_drawn_weights_are_those_of_a_seed():
    first, again, other = (Drawn(TINY, CPU, seed) for seed in (1, 1, 2))
    name, shape = "lm_head.weight", (96, 64)
    assert torch.equal(first.tensor(name, shape), again.tensor(name, shape))
    assert not torch.equal(first.tensor(name, shape), other.tensor(name, shape))
    held = plain_of(first.packed(0), torch.bfloat16)
    assert torch.equal(held.gate_up, plain_of(again.packed(0), torch.bfloat16).gate_up)
    # Rows have a length around 1, so that a layer adds as much as it is given.
    assert 0.5 < float(held.gate_up.float().norm(dim=1).mean()) < 2
    assert first.plain(0) is None


def test_decided_weights_forgive_roundings(by_definition):
    """Logits in bf16 are close to those in fp32 (for 12 layers of other weights they differ by 0.2
    in the norm); greedy tokens are the same, and all different.
    """
    config, jobs = type(TINY)("deep", {**TINY.values, "num_hidden_layers": 6}), []
    for dtype in (torch.float32, torch.bfloat16):
        weights = load(config, Drawn(config, CPU, 1, decided=True), experts="bf16", dtype=dtype)
        model = Model(config, weights, ROOM)
        jobs += models.served(model, [[*range(9)]], requests=1, keep_logits=True)
    apart = Difference.of(*[job.logits[0][None] for job in jobs])
    assert apart.relative < 0.03
    assert jobs[0].found == jobs[1].found
    assert len(set(jobs[0].found)) == NEW


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with experts in bf16, with transformers' names."""
    source = Drawn(TINY, CPU, normal=True)
    weights = load(TINY, source, experts="bf16")
    plain = [source.plain(number) for number in range(TINY.layers)]
    tensors = state_dict(TINY, weights, plain)
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, tmp_path / "a.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(dict(TINY.values)), encoding="utf-8")
    return tmp_path, weights


def test_a_checkpoint(folder):
    path, weights = folder
    config = of_folder(path)
    found = load(config, Stored(path, CPU), experts="bf16")
    for mine, theirs in zip(found.layers, weights.layers, strict=True):
        assert torch.equal(mine.qkv, theirs.qkv)
        assert torch.equal(mine.experts.plain.down, theirs.experts.plain.down)
    packed = load(config, Stored(path, CPU))
    assert isinstance(packed.layers[0].experts, Mxfp4Experts)
    assert packed.nbytes < found.nbytes


def test_a_checkpoint_in_mxfp4(tmp_path):
    """The tensors are those of released checkpoints: blocks and scales of all experts of a
    layer.
    """
    source, prefix = Drawn(TINY, CPU), "model.layers.0.mlp.experts"
    tensors = {}
    for name, (rows, columns) in source._sizes().items():
        w, bias = source._matrix(f"0 {name}", (TINY.experts.experts, rows, columns))
        tensors[f"{prefix}.{name}_blocks"] = w.data.unflatten(2, (-1, 16))
        tensors[f"{prefix}.{name}_scales"], tensors[f"{prefix}.{name}_bias"] = w.scales, bias
    save_file(tensors, tmp_path / "a.safetensors")
    stored = Stored(tmp_path, CPU)
    assert stored.plain(0) is None
    ours, theirs = (plain_of(each.packed(0), torch.float32) for each in (source, stored))
    for name, tensor in vars(ours).items():
        assert torch.equal(tensor, getattr(theirs, name))
    with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'"):
        stored.tensor("lm_head.weight", (96, 64))


def test_what_weights_refuse(folder, tmp_path):
    source = Drawn(TINY, CPU)
    with pytest.raises(ValueError, match="experts 'fp8': one of"):
        load(TINY, source, experts="fp8")
    with pytest.raises(ValueError, match=r"shape \(96, 64\), config\.json says \(97, 64\)"):
        Stored(folder[0], CPU).tensor("lm_head.weight", (97, 64))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ValueError, match="a model of type 'llama'"):
        of_folder(tmp_path)


# ---- command line and report


def test_the_command_line(by_definition, tmp_path, capsys):
    """The experts are not representable in MXFP4, so that there is a quantisation error."""
    path = tmp_path / "found.json"
    flags = ["--experts", "bf16", "--normal-experts", "--batch", "2", "--requests", "3"]
    flags += ["--prompt-len", "40", "--shared-len", "32", "--new-tokens", str(NEW), "--compare"]
    assert command_line.main([*flags, "--device", "cpu", "--json", str(path)]) == 0
    said, found = capsys.readouterr().out, json.loads(path.read_text(encoding="utf-8"))
    assert "tokens that were shared: 32" in said
    assert found["rates"]["decode"]["tokens"] == 3 * (NEW - 1)
    assert found["comparison"]["logits"]["relative"] < 0.05
    assert found["comparison"]["rounding"]["relative"] > found["comparison"]["logits"]["relative"]


def test_commands_of_the_page_are_flags():
    page = (ROOT / "examples/gpt_oss/README.md").read_text(encoding="utf-8")
    known = command_line.parser().format_help()
    flags = re.findall(r"(?<![\w-])--(?!hw)([a-z][a-z-]+)", page)
    assert len(flags) > 20
    others = {"help", "nproc-per-node"}  # argparse's own, and torchrun's
    assert not [flag for flag in flags if f"--{flag}" not in known and flag not in others]
    commands = re.findall(r"^    python -m examples\.gpt_oss (.*)$", page, re.MULTILINE)
    assert [command_line.parser().parse_args(command.split()) for command in commands]


def test_what_the_command_line_refuses(capsys):
    assert command_line.main(["--device", "cpu", "--profile"]) == 2
    assert "no time on a CPU" in capsys.readouterr().err
    assert command_line.main(["--device", "cpu", "--repeats", "0"]) == 2
    assert "--repeats 0: at least 1" in capsys.readouterr().err


def test_a_table_of_kernels():
    name = "gqa_decode_sm90_d64_bf16_g8_lens_pdl_cluster4_cutlass_0"
    ours = report.Kernel(name, report.package_of(name), 4, 30.0)
    theirs = report.Kernel("moe_gemm<16>", report.package_of("moe_gemm<16>"), 2, 10.0)
    _, first, second, last = report.kernel_table([ours, theirs], 2, 36.0)
    assert first.split() == ["75.0%", "2.0", "15.0", "gqa_lowlatency", name]
    assert second.split()[:4] == ["25.0%", "1.0", "5.0", "torch"]
    assert last.startswith("ours: 75.0% (gqa_lowlatency 75.0%, torch 25.0%)")
    assert last.endswith("0.020 ms of kernels a step, 0.018 ms busy")
    assert report.covered([(5, 6), (0, 3), (2, 4), (1, 2)]) == 5
    many = report.kernel_table([theirs] * (report.SHOWN + 3), 1, 1.0)
    assert "3 others" in many[-2]


def test_floors(in_fp32):
    """Two layers, one of them sliding: one request has 100 tokens after 10, of which only the last
    has logits.
    """
    config, weights = TINY, in_fp32[0].weights
    work = floors.work_of(config, weights, [100], [10], experts_share=0.5)
    heads, row = 4 * config.q_heads * config.head_dim, 2 * 4 * config.kv_heads * config.head_dim
    window = config.window
    assert work[floors.ATTENTION] == (
        row * (110 + 110),
        heads * (100 * window + sum(range(11, 111))),
    )
    form = config.experts
    assert work[floors.EXPERTS][1] == (100 + 1) / 2 * form.router.top_k * 6 * form.hidden**2
    for share in (1.0, 0.25):
        shared = floors.work_of(config, weights, [100], [10], tokens_share=share)
        flop = 2 * weights.head.numel()
        for layer, behind in zip(weights.layers, (100 * share, 1), strict=True):
            flop += 2 * (layer.out.numel() + layer.router.numel()) * behind
            flop += 2 * layer.qkv.numel() * 100 * share
        assert shared[floors.DENSE][1] == flop
        assert shared[floors.ATTENTION] == (work[floors.ATTENTION][0],
                                            work[floors.ATTENTION][1] * share)  # fmt: skip
    dense = [x for layer in weights.layers for x in (layer.qkv, layer.out, layer.router)]
    assert work[floors.DENSE][0] == sum(each.nbytes for each in (*dense, weights.head))
    few = floors.work_of(config, weights, [1], [10])[floors.EXPERTS][0]
    assert few == pytest.approx(sum(layer.experts.nbytes for layer in weights.layers) / 2)


def test_parts_of_a_step():
    names = {"nvjet_sm90": "torch", "add": "torch", "a": "moe", "b": "kvcache"}
    kernels = [report.Kernel(name, package, 2, 40.0) for name, package in names.items()]
    work = {floors.DENSE: (8.0, 1.0), floors.EXPERTS: (1.0, 5.0)}
    found = floors.parts_of(kernels, 2, work, floors.Speed(1e6, 1e6))
    said = {part.name: (part.microseconds, part.floor) for part in found}
    assert said == {
        floors.EXPERTS: (20.0, 5.0), floors.ATTENTION: (0.0, None), floors.DENSE: (20.0, 8.0),
        floors.CACHE: (20.0, None), floors.REST: (20.0, None),
    }  # fmt: skip
    lines = floors.part_table(found)
    assert lines[1].split() == ["20.0", "5.0", "4.00", "experts"]
    assert lines[4].split() == ["20.0", "cache"]


def test_rates():
    found = report.rates([Took("decode", 2, 2, 0.5), Took("decode", 2, 2, 0.25)])
    assert set(found) == {"decode"}
    assert found["decode"].tokens_per_second == pytest.approx(4 / 0.75)


def test_lines_of_speed():
    """Speed is printed for a GPU only; the emulator's time is no speed."""
    ours = report.rates([Took("decode", 2, 2, 0.5)])
    assert report.speed_lines(ours, True) == [
        "decode: 2 tokens in 1 steps, 4.0 tokens/s, 500.00 ms a step"
    ]
    assert report.speed_lines(ours, False) == ["decode: 2 tokens in 1 steps"]
    same = Difference(0.0, 0.0, 1, 1)
    found = Comparison(same, None, (1,), 0.5, (100.0, 2.0))
    timed = report.comparison_lines(found, ours, True)
    assert timed[-1] == "transformers' decode: 2.0 tokens/s; ours is 2.00 x"
    assert report.comparison_lines(found, ours, False) == timed[:-1]
