"""An engine's steps launch only kernels that were compiled ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blackwell_engines.engines import warm
from blackwell_engines.engines.limits import Layer
from blackwell_engines.engines.warm import Sizes
from kernelkit.call.launch import emulation
from kernelkit.compile import compiler as kernel_compile
from tests.blackwell_engines.requests import LayerShape, imported
from tests.blackwell_engines.sglang import engine as sglang
from tests.blackwell_engines.sglang import test_driver as sglang_driver
from tests.blackwell_engines.vllm import engine as vllm
from tests.blackwell_engines.vllm import test_driver as vllm_driver

PAGE = 16
FP8 = LayerShape(kv_dtype=torch.float8_e4m3fn)


def layer_of(shape: LayerShape, page_size: int = PAGE) -> Layer:
    return Layer(
        shape.head_dim, shape.dtype, shape.kv_dtype or shape.dtype, page_size,
        window=shape.window, sinks=shape.sinks, softcap=bool(shape.softcap),
    )  # fmt: skip


def sizes_of(shape: LayerShape, keys: int) -> Sizes:
    return Sizes(shape.q_heads, shape.kv_heads, requests=4, tokens=70, keys=keys)


@pytest.fixture
def listed(monkeypatch):
    """Record the keys of kernels instead of compiling them."""
    monkeypatch.setattr(warm, "warm", lambda keys, progress: list(dict.fromkeys(keys)))


def test_names_of_kernels(listed):
    shape = LayerShape(head_dim=128, kv_dtype=torch.float8_e4m3fn)
    given = layer_of(shape), sizes_of(shape, 100), "sm_90a"
    kinds = [type(key.config).__name__ for key in warm.warmup(*given)]
    assert {*kinds} == {"DecodeConfig", "AttentionConfig", "PagesConfig"}
    assert kinds.count("PagesConfig") == 1
    both = warm.warmup(*given, own_keys=True, side_by_side=True)
    packed = [k.config for k in both if type(k.config).__name__ == "AttentionConfig"]
    assert {(c.varlen_k, c.is_fp8) for c in packed} == {(True, True), (True, False)}
    assert sum(type(key.config).__name__ == "PagesConfig" for key in both) == 2
    wide = warm.warmup(layer_of(LayerShape(head_dim=96)), *given[1:], written=False)
    assert {type(key.config).__name__ for key in wide} == {"AttentionConfig"}


def test_names_of_kernels_of_other_layers(listed):
    """Blocks of drafts of every length, windows with two sides, encoders, ranks that share keys."""
    layer, sizes = layer_of(LayerShape(window=3)), sizes_of(LayerShape(), 100)
    blocks = [
        key.config
        for key in warm.warmup(replace(layer, causal=False), replace(sizes, drafts=5), "sm_90a")
    ]
    few = {c.q_tokens for c in blocks if type(c).__name__ == "DecodeConfig"}
    many = [c for c in blocks if type(c).__name__ == "AttentionConfig"]
    assert few == {1, 2, 3, 4}  # a longer one ends before its window does
    assert not any(
        c.causal for c in blocks if type(c).__name__ == "DecodeConfig" and c.q_tokens > 1
    )
    assert {c.varlen_q for c in many} == {True, False}
    assert all(c.left and c.right for c in many)

    narrow = replace(layer_of(LayerShape()), out_dtype=torch.float8_e4m3fn)
    configs = [key.config for key in warm.warmup(narrow, sizes, "sm_90a", written=False)]
    assert {(c.out_dtype, c.out_scale) for c in configs} == {("e4m3", True)}

    heads = replace(layer_of(FP8), head_scales=True)
    moved = [
        k.config for k in warm.warmup(heads, sizes, "sm_90a") if "Pages" in type(k.config).__name__
    ]
    whole = warm.warmup(layer_of(FP8), sizes, "sm_90a")
    assert len(moved) == 1
    assert moved[0] not in [key.config for key in whole]

    encoder = replace(layer_of(LayerShape()), causal=False)
    given = {"written": False, "own_keys": True, "paged": False}
    kinds = {type(k.config).__name__ for k in warm.warmup(encoder, sizes, "sm_90a", **given)}
    assert kinds == {"AttentionConfig"}

    shared = warm.warmup(layer_of(LayerShape(sinks=True)), replace(sizes, ranks=2), "sm_90a")
    merged = [k.config for k in shared if type(k.config).__name__ == "MergeConfig"]
    assert [(c.sinks, c.capacity, c.lanes) for c in merged] == [(True, 4, 1)]
    read = [k.config for k in shared if type(k.config).__name__ == "AttentionConfig"]
    assert {(c.group, c.right, c.sinks) for c in read} == {(4, False, False), (2, True, False)}


@pytest.mark.parametrize("name", ["plain", "fp8", "gpt-oss", "head-dim-96"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_vllm_compiles_nothing_then(name, arch, monkeypatch):
    shape = vllm_driver.SHAPES[name]
    warm.warmup(layer_of(shape), sizes_of(shape, vllm.WIDTH * PAGE), arch)
    monkeypatch.setattr(kernel_compile, "_make", None)
    with emulation(arch=arch), imported(vllm) as plugin:
        vllm_driver.serve(vllm.Engine(plugin, shape))


@pytest.mark.parametrize(("arch", "window"), [("sm_90a", 9), ("sm_100a", None), ("sm_90a", 1)])
def test_vllm_compiles_nothing_for_drafts(arch, window, monkeypatch):
    """Drafts of any length, and blocks of them, in which tokens see one another."""
    shape = LayerShape(window=window)
    sizes = replace(sizes_of(shape, vllm.WIDTH * PAGE), drafts=2)
    for causal in (True, False):
        warm.warmup(replace(layer_of(shape), causal=causal), sizes, arch)
    monkeypatch.setattr(kernel_compile, "_make", None)
    with emulation(arch=arch), imported(vllm) as plugin:
        vllm_driver.drafts(vllm.Engine(plugin, shape, drafts=2))


@pytest.mark.parametrize(("page_size", "arch"), [(1, "sm_90a"), (16, "sm_100a")])
def test_sglang_compiles_nothing_then(page_size, arch, monkeypatch):
    shape = sglang_driver.SHAPES["plain"]
    warm.warmup(
        layer_of(shape, page_size), sizes_of(shape, sglang.POSITIONS), arch, written=False,
        own_keys=True, side_by_side=page_size == 1,
    )  # fmt: skip
    monkeypatch.setattr(kernel_compile, "_make", None)
    with emulation(arch=arch), imported(sglang) as plugin:
        sglang_driver.serve(sglang.Engine(plugin, shape, page_size=page_size))
