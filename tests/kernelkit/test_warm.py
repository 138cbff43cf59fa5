"""Warm-ups list every kernel that can be chosen for the sizes, and compile each once."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

import fmha.warm
import gqa_lowlatency.warm
import kvcache.movement.warm
import moe.warm
import q8_0.warm
from kernelkit.call.launch import Target, launch
from kernelkit.compile import compiler as kernel_compile
from kernelkit.compile.compiler import collecting
from kernelkit.compile.keys import KernelKey
from kernelkit.compile.warm import kernels_over, warm
from kvcache import gqa, preset
from lab.commands import EXPLAIN
from lab.problems.moe import layer_of
from moe import ArrangedExperts, Router, pack
from q8_0.blocks import LAYOUTS
from q8_0.product.launch import config_for
from q8_0.weights import empty
from tests.kernelkit.scale_kernel import compile_scale

SAMPLES = 300


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("arch", "options"), [
    ("sm_90a", {}),
    ("sm_100a", {"window_left": 128}),
    ("sm_90a", {"window_left": 4096, "sink_tokens": 4}),
    ("sm_90a", {"batch_invariant": True}),
    ("sm_90a", {"pdl": True, "kv_ready_before_pdl": True}),
    ("sm_100a", {"cluster": 4}),
    ("sm_100a", {}),
    ("sm_89", {}),
    ("sm_120a", {"batch_invariant": True}),
    ("sm_120a", {"pdl": True}),
])  # fmt: skip
@pytest.mark.parametrize("heads", [(64, 8), (8, 1)])
def test_decode_chooses_no_other(arch, options, heads, monkeypatch):
    """This also holds for devices that run fewer wide clusters at once than the emulator, which has
    no limit."""
    chance = random.Random(1)

    def arguments(batch: int, keys: int) -> gqa_lowlatency.arguments.Arguments:
        kv = on_meta(batch, keys, heads[1], 128)
        q = on_meta(batch, heads[0], 128)
        return gqa_lowlatency.arguments.Arguments(q, kv, kv, arch=arch, **options)

    batches, lengths = range(1, 65), range(1, 40_000)
    keys = gqa_lowlatency.warm.kernels_for(arguments(1, 1), batches, lengths)
    known = {key.config for key in keys}
    at_once = {1: 132, 2: 66, 4: 32, 8: 15, 16: 0}
    choose = gqa_lowlatency.choose
    monkeypatch.setattr(choose, "clusters_at_once", lambda device, width: at_once[width])
    for _ in range(SAMPLES):
        longest = chance.choice((200, 3000, 39_999))
        given = arguments(chance.choice(batches), chance.randint(1, longest))
        for backend in ("emulate", "cuda"):
            assert gqa_lowlatency.choose.choose_config(given, Target(backend, arch)) in known


@pytest.mark.parametrize("options", [{}, {"pdl": True}])
@pytest.mark.parametrize("heads", [(64, 8), (15, 5)])
def test_decode_knows_gpus_of_all_sizes(heads, options):
    """Without clusters, a Jetson and the largest GPU are of one architecture."""
    choose, warm, arch = gqa_lowlatency.choose, gqa_lowlatency.warm, "sm_120a"
    q, kv = on_meta(1, heads[0], 128), on_meta(1, 5000, heads[1], 128)
    arguments = gqa_lowlatency.arguments.Arguments(q, kv, kv, arch=arch, **options)
    known = {key.config for key in warm.kernels_for(arguments, (1, 2, 9), (100, 2000, 5000))}
    wished, found = choose.wished_config(arguments, arch), set()
    for batch, keys, sms in itertools.product((1, 2, 9), (100, 2000, 5000), range(1, 189)):
        load = choose.Load(keys, batch * heads[1], sms=sms)
        found.add(choose.config_for(wished, arch, load))
    assert found <= known
    assert len(found) > 1


@pytest.mark.parametrize("heads", [(64, 8), (4, 4), (16, 1)])
@pytest.mark.parametrize("options", [{}, {"schedule": "pingpong"}, {"pack_heads": True}], ids=str)
def test_attention_chooses_no_other(heads, options):
    chance = random.Random(1)

    def arguments(batch: int, tokens: int) -> fmha.arguments.Arguments:
        q, kv = on_meta(batch, tokens, heads[0], 128), on_meta(batch, 77, heads[1], 128)
        return fmha.arguments.Arguments(q, kv, kv, causal=True, arch="sm_100a", **options)

    batches, lengths = range(1, 65), range(1, 9000)
    keys = fmha.warm.kernels_for(arguments(1, 1), batches, lengths)
    for _ in range(SAMPLES):
        tokens = chance.randint(1, chance.choice((130, 600, 8999)))
        config = fmha.choose.choose_config(arguments(chance.choice(batches), tokens))
        assert KernelKey(fmha.plan.kernel_of(config, "sm_100a"), config, "sm_100a") in keys


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
def test_a_layer_of_experts_chooses_no_other(fmt):
    experts = pack(torch.zeros(8, 512, 256).bfloat16(), torch.zeros(8, 256, 256).bfloat16(), fmt)
    x, logits, chance = on_meta(1, 256), on_meta(1, 8), random.Random(1)

    def kernels(*tokens: int) -> list[KernelKey]:
        given = x, experts, logits, Router(2)
        return moe.warm.kernels_for(*given, tokens, arch="sm_100a")

    known = set(kernels(*range(1, 5000)))
    for _ in range(SAMPLES // 10):
        assert set(kernels(chance.randint(1, chance.choice((40, 600, 4999))))) <= known
    assert len(known) > len(kernels(1))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("flags", "tokens"), [
    ("--experts 257 --top-k 9 --hidden 7168 --intermediate 2048", 3000),
    ("--model gpt-oss-120b --experts 128 --top-k 4 --bias", 5000),
])  # fmt: skip
def test_arranged_experts_choose_no_other(flags, tokens, arch):
    """Tiles fill waves of CTAs: neighbouring sizes may differ, while sizes on both sides of them
    agree."""
    asked = EXPLAIN["moe"].parser("").parse_args(f"--activations bf16 {flags}".split())
    layer = layer_of(asked)
    w13, w2 = (layer.mixed_product(name) for name in ("w13", "w2"))
    experts = ArrangedExperts(w13.w, w2.w, w13.bias, w2.bias)
    x, logits = on_meta(1, layer.hidden), on_meta(1, layer.experts)

    def kernels(*counts: int) -> list[KernelKey]:
        given = x, experts, logits, layer.router
        return moe.warm.kernels_for(*given, counts, arch=arch, activation=layer.form)

    known = set(kernels(*range(1, tokens)))
    for count in (*range(1, 64), *random.Random(1).sample(range(64, tokens), SAMPLES)):
        assert set(kernels(count)) <= known
    assert {key.config.pdl for key in known if hasattr(key.config, "teams")} == {True}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("arch", "sizes"), [
    ("sm_90a", (8192, 2048)), ("sm_89", (72, 2048)), ("sm_103a", (8191, 2048)),
    ("sm_120a", (8192, 2080)), ("sm_80", (129, 64)),
])  # fmt: skip
def test_a_matrix_in_q8_0_chooses_no_other(arch, sizes, layout):
    """Sizes are those of prompts; for few tokens the choices are listed one by one."""
    weights, chance = empty(*sizes, layout, "meta"), random.Random(1)
    most = 20_000
    given = weights, ["bf16"], range(16, most), True, (arch, 132)
    known = {key.config for key in q8_0.warm.kernels_for(*given)}
    for tokens in (*range(17, 150), *(chance.randint(150, most - 1) for _ in range(SAMPLES // 3))):
        dtype, bias = chance.choice((torch.bfloat16, torch.float32)), chance.random() < 0.5
        out = on_meta(tokens, weights.rows, dtype=dtype)
        assert config_for(weights, out, arch, bias=bias) in known


@pytest.mark.parametrize("layout", [gqa(2, 8, 128), preset("deepseek-v4-flash")], ids=["gqa", "v4"])
def test_a_cache_names_its_kernels(layout):
    keys = kvcache.movement.warm.kernels_for(layout, ["bf16"], "sm_90a")
    sources = {key.source.rpartition(".")[2] for key in keys}
    assert {"slots_kernel", "checksum_kernel"} < sources
    assert ("append_kernel" in sources) == (layout.name != "gqa")
    assert len(keys) == len(set(keys))


# ---- what all of them use


def test_thresholds_are_found():
    """The number of probes grows with the number of thresholds, not with the sizes."""
    asked = []

    def kernels_at(size: int) -> list[str]:
        asked.append(size)
        return ["all", f"tile {(size > 7) + (size > 900)}", *["long"] * (size > 4000)]

    found = kernels_over(range(1, 100_000), kernels_at)
    assert sorted(found) == ["all", "long", "tile 0", "tile 1", "tile 2"]
    assert len(asked) == len(set(asked)) < 100
    assert kernels_over([], kernels_at) == []


def test_a_size_that_is_alone_between_thresholds_is_found():
    for alone in range(1, 50):
        found = kernels_over(range(50), lambda size, alone=alone: [(size > alone) - (size < alone)])
        assert 0 in found, alone


def test_each_kernel_is_made_once_with_progress(monkeypatch, capsys):
    made, seen = [], []
    monkeypatch.setattr(kernel_compile, "_compiled", {})
    monkeypatch.setattr(kernel_compile, "_make", lambda *key: made.append(key) or object())
    keys = [KernelKey("kernelkit.merge.kernel", n, "sm_90a") for n in (1, 2, 1)]
    done = warm(keys, lambda number, count, key, seconds: seen.append((number, count, key)))
    assert [config for config, _, _ in made] == [1, 2]
    assert seen == [(1, 2, keys[0]), (2, 2, keys[1])]
    assert str(done).startswith("2 kernels in ")
    warm(keys, True)
    assert "[2/2]" in capsys.readouterr().err
    assert len(made) == 2


def test_without_memory_nothing_is_launched():
    kv = on_meta(1, 16, 2, 64)
    with collecting() as keys:
        gqa_lowlatency.launch.forward(gqa_lowlatency.arguments.Arguments(
            on_meta(1, 2, 64), kv, kv, arch="sm_90a"
        ))  # fmt: skip
    assert [key.arch for key in keys] == ["sm_90a"]
    x = on_meta(2, 64, dtype=torch.float32)
    with pytest.raises(NotImplementedError, match="device meta"):
        launch(compile_scale("sm_90a"), (x, x, 1.0), Target("none", "sm_90a"), x.device)
