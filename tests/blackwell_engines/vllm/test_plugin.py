"""Values that the plugin reports to vLLM, cases that it refuses; in a graph nothing reads from the
device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

import blackwell_engines.vllm
from blackwell_engines.vllm.cache import pages_of
from lab.house.source import ROOT
from tests.blackwell_engines.requests import LayerShape
from tests.blackwell_engines.vllm.engine import AttentionBackendEnum, Engine, cache_of

BF16, FP16 = torch.bfloat16, torch.float16


def test_vllm_is_not_imported_with_the_package():
    assert "vllm" not in sys.modules


def test_the_entry_point_registers_once(plugin):
    for _ in range(2):
        blackwell_engines.vllm.register()
    path = AttentionBackendEnum.__members__[blackwell_engines.vllm.NAME].value
    module, _, name = path.rpartition(".")
    assert getattr(sys.modules[module], name) is plugin.BlackwellKernelsBackend
    assert plugin.BlackwellKernelsBackend.get_name() == blackwell_engines.vllm.NAME


REGISTRY = """
from enum import Enum


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "flash"


def register_backend(name, path):
    member = object.__new__(AttentionBackendEnum)
    member._name_, member._value_ = name, path
    AttentionBackendEnum._member_map_[name] = member
"""


def test_the_name_is_unpickled_where_no_plugin_is_loaded(tmp_path):
    """The engine's process unpickles vLLM's configuration before it loads plugins."""
    registry = tmp_path / "vllm" / "v1" / "attention" / "backends" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(REGISTRY)
    path = os.pathsep.join((str(tmp_path), str(ROOT)))

    def run(words: str, given: bytes = b"") -> bytes:
        command = [sys.executable, "-c", f"import pickle, sys; {words}"]
        environ = os.environ | {"PYTHONPATH": path}
        return subprocess.run(
            command, input=given, capture_output=True, env=environ, check=True
        ).stdout

    pickled = run(
        "from blackwell_engines.vllm import attention_backend; "
        "sys.stdout.buffer.write(pickle.dumps(attention_backend()))"
    )
    said = run(
        "member = pickle.load(sys.stdin.buffer); from vllm.v1.attention.backends import registry; "
        "print(registry.AttentionBackendEnum[member.name] is member, member.name, member.value)",
        pickled,
    )
    expected = f"True {blackwell_engines.vllm.NAME} {blackwell_engines.vllm.BACKEND}"
    assert said.decode().strip() == expected


def test_the_entry_point_is_declared(pyproject):
    points = pyproject["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"blackwell_kernels": "blackwell_engines.vllm:register"}
    installed = [e for e in entry_points(group="vllm.general_plugins") if "blackwell" in e.name]
    assert all(point.value == points["blackwell_kernels"] for point in installed)


@pytest.mark.parametrize(
    ("head_size", "dtype", "cache", "capability", "reason"),
    [
        (128, BF16, "auto", (10, 0), None),
        (128, BF16, "auto", (8, 0), None),
        (64, FP16, "float16", (12, 0), None),
        (96, BF16, "auto", (9, 0), None),
        (512, BF16, "bfloat16", (10, 3), None),
        (128, BF16, "fp8", (9, 0), None),
        (256, BF16, "fp8_e4m3", (10, 0), None),
        (512, BF16, "auto", (8, 9), None),
        (512, BF16, "fp8", (9, 0), "head_dim 512 with K and V in e4m3"),  # prompts have no kernel
        (128, FP16, "fp8", (9, 0), "float16 of q with keys in e4m3"),
        (80, BF16, "fp8", (9, 0), "K and V in e4m3 with mma.sync"),
        (128, BF16, "fp8", (8, 6), "e4m3 keys on sm_86"),
        (128, BF16, "fp8", (8, 9), "K and V in e4m3 with mma.sync"),
        (128, BF16, "auto", (7, 5), "compute capability 7.5: supported are"),
        (128, BF16, "float16", (9, 0), "differ in dtype"),
        (128, BF16, "fp8_e5m2", (9, 0), "kv_cache_dtype 'fp8_e5m2': .* read e4m3 alone"),
    ],
)
def test_combinations(head_size, dtype, cache, capability, reason, plugin):
    found = plugin.BlackwellKernelsBackend.supports_combination(
        head_size, dtype, cache, 16, False, True, False, False,
        SimpleNamespace(major=capability[0], minor=capability[1]),
    )  # fmt: skip
    assert found is None if reason is None else re.search(reason, found)


def test_what_vllm_may_ask_for(plugin):
    backend, impl = plugin.BlackwellKernelsBackend, plugin.BlackwellKernelsImpl
    kinds = ("decoder", "encoder", "encoder_only", "encoder_decoder", "another")
    assert [backend.supports_attn_type(kind) for kind in kinds] == [True] * 4 + [False]
    assert backend.supports_non_causal()
    assert backend.supports_per_head_quant_scales()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    assert impl.supports_dcp
    assert impl.can_return_lse_for_decode


def test_alibi_is_refused_before_layers_are_made(plugin, monkeypatch):
    """vLLM names no slopes to its check of a configuration, but the model is known then."""
    model = SimpleNamespace(uses_alibi=True)
    config = SimpleNamespace(model_config=model)
    monkeypatch.setattr(plugin, "get_current_vllm_config_or_none", lambda: config)
    given = (64, BF16, "auto", 16, False, False, False, False, SimpleNamespace(major=9, minor=0))
    assert "ALiBi" in plugin.BlackwellKernelsBackend.supports_combination(*given)
    model.uses_alibi = False
    assert plugin.BlackwellKernelsBackend.supports_combination(*given) is None


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"alibi_slopes": [1.0]}, NotImplementedError, "ALiBi: .* TRITON_ATTN"),
        (
            {"attn_type": "encoder_decoder", "sliding_window": 9},
            NotImplementedError,
            "sliding_window 9 over keys of an encoder",
        ),
        ({"kv_cache_dtype": "int8_per_token_head"}, NotImplementedError, "kv_cache_dtype 'int8"),
        ({"sinks": torch.zeros(3)}, ValueError, r"sinks \(3,\), expected one for each of 4"),
    ],
)
def test_layers_that_are_refused(changes, error, match, plugin):
    with pytest.raises(error, match=match):
        plugin.BlackwellKernelsImpl(4, 64, 0.125, 2, **changes)


def test_steps_that_are_refused(plugin):
    engine = Engine(plugin, LayerShape())
    engine.admit(1, 10)
    common, _ = engine.metadata({1: 5})
    common.causal = torch.ones(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="causal is a tensor: the host"):
        engine.builder.build(0, common)


@pytest.mark.parametrize("scale", [-1.0, 0.0, float("nan"), float("inf")])
def test_an_fp8_layer_without_scales_is_named(scale, plugin):
    """The engine has -1.0 if the checkpoint sets no scale; then nothing is written or read."""
    engine = Engine(plugin, LayerShape(kv_dtype=torch.float8_e4m3fn, scales=(0.5, scale)))
    engine.layer.layer_name = "model.layers.3.self_attn.attn"
    rows, before = torch.ones(5, 2, 64).bfloat16(), engine.cache.clone()
    words = rf"layer model.layers.3.self_attn.attn: v_scale is {scale}, .*: the checkpoint sets no"
    with pytest.raises(ValueError, match=words):
        engine.impl.do_kv_cache_update(engine.layer, rows, rows, engine.cache, torch.arange(5))
    assert torch.equal(engine.cache, before)
    out = torch.zeros(5, 4, 64).bfloat16()
    engine.admit(1, 10)
    common, _ = engine.metadata({1: 5})
    with pytest.raises(ValueError, match=words):
        engine.impl.forward(
            engine.layer, out, rows, rows, engine.cache, engine.builder.build(0, common), out
        )


def test_a_run_that_measures_memory_is_given_zeros(plugin):
    engine, out = Engine(plugin, LayerShape()), torch.ones(5, 4, 64).bfloat16()
    engine.impl.forward(engine.layer, out, out, out, torch.tensor([]), None, out)
    assert not out.any()
    engine.impl.do_kv_cache_update(engine.layer, out, out, torch.tensor([]), torch.zeros(5))


def test_caches_that_are_refused():
    cache = cache_of(LayerShape(), 3, 16, "LBHNC")
    with pytest.raises(ValueError, match=r"kv_cache \(3, 2, 16, 128\), expected \[blocks"):
        pages_of(cache, 128)
    with pytest.raises(NotImplementedError, match="kv_cache_dtype 'fp8_e5m2'"):
        pages_of(cache, 64, "fp8_e5m2")
    with pytest.raises(
        ValueError, match=r"kv_cache is torch.bfloat16, but kv_cache_dtype is 'fp8'"
    ):
        pages_of(cache, 64, "fp8")


def test_pages_are_views():
    cache = cache_of(LayerShape(), 3, 16, "LBNHC")
    k, v = pages_of(cache, 64)
    assert k.shape == v.shape == (3, 16, 2, 64)
    assert k.data_ptr() == cache.data_ptr()
    assert v.data_ptr() == cache.data_ptr() + 64 * cache.itemsize


def test_what_is_decoded_reads_the_engines_own_tensors(plugin):
    """A captured graph's next replay reads what the engine wrote to its usual buffers."""
    engine = Engine(plugin, LayerShape())
    for name in (1, 2):
        engine.admit(name, 10)
    common, _ = engine.metadata({1: 1, 2: 1}, padded_requests=3)
    step = engine.builder.build(0, common)
    assert (step.requests, step.tokens, step.rest, step.starts) == (3, 1, 0, None)
    captured = engine.builder.build_for_cudagraph_capture(common)
    assert captured.bound > 100 * step.bound, "requests of a captured step grow"
    assert step.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert step.table.data_ptr() == common.block_table_tensor.data_ptr()


class _OnDevice(torch.Tensor):
    """A tensor that raises if the host reads its contents; its layout may be read."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        names = ("item", "tolist", "__bool__", "__int__", "__index__", "cpu", "numpy", "max")
        assert getattr(function, "__name__", "") not in names, f"the host waits for {function}"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_step_is_made_without_waiting(plugin):
    engine = Engine(plugin, LayerShape())
    for name in (1, 2, 3):
        engine.admit(name, 30)
    common, _ = engine.metadata({1: 1, 2: 1, 3: 9})
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(common, name, getattr(common, name).as_subclass(_OnDevice))
    step = engine.builder.build(0, common)
    assert (step.requests, step.tokens, step.rest, step.longest) == (2, 1, 9, 9)
    assert step.starts.as_subclass(torch.Tensor).tolist() == [0, 9]
