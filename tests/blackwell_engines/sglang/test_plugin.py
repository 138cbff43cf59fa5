"""Values that the plugin reports to SGLang, cases that it refuses, and contents of a captured
graph.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

import blackwell_engines.sglang
from blackwell_engines.sglang.pool import keys_of, page_table, pages_of
from kernelkit.call.launch import emulation
from tests.blackwell_engines.requests import LayerShape
from tests.blackwell_engines.sglang.engine import (
    BACKENDS,
    CHOICES,
    HOOKS,
    Engine,
    ForwardMode,
    layer_of,
)

E4M3 = torch.float8_e4m3fn


def test_sglang_is_not_imported_with_the_package():
    assert "sglang" not in sys.modules


def test_the_entry_point_registers_once(plugin):
    for _ in range(2):
        blackwell_engines.sglang.register()
    assert CHOICES.count(blackwell_engines.sglang.NAME) == 1
    steps, drafts = HOOKS
    assert steps == ("handle_model_specific_adjustments", blackwell_engines.sglang.pass_lists)
    assert drafts == (
        blackwell_engines.sglang.DRAFTS,
        blackwell_engines.sglang.with_drafts,
        "around",
    )
    engine = Engine(plugin, LayerShape())
    made = BACKENDS[blackwell_engines.sglang.NAME](engine.runner)
    assert type(made) is plugin.BlackwellKernelsBackend


def test_the_entry_point_is_declared(pyproject):
    points = pyproject["project"]["entry-points"]["sglang.srt.plugins"]
    assert points == {"blackwell_kernels": "blackwell_engines.sglang:register"}


@pytest.mark.parametrize(
    ("arch", "page_size", "dtype", "gathers"),
    [
        ("sm_100a", 1, None, True),
        ("sm_90a", 4, None, True),
        ("sm_90a", 8, None, False),
        ("sm_90a", 256, None, False),
        ("sm_100a", 528, None, False),
        ("sm_100a", 64, E4M3, False),
        ("sm_90a", 1, E4M3, True),
        ("sm_89", 1, None, False),
        ("sm_120a", 2, None, False),
    ],
)
def test_keys_of_prompts_are_gathered_where_no_kernel_reads_them(
    arch, page_size, dtype, gathers, plugin
):
    with emulation(arch=arch):
        shape = LayerShape(head_dim=128, kv_dtype=dtype)
        assert Engine(plugin, shape, page_size=page_size).backend.gathers == gathers


@pytest.mark.parametrize(
    ("shape", "page_size", "arch", "match"),
    [
        (LayerShape(head_dim=128, kv_dtype=E4M3), 16, "sm_89", "K and V in e4m3 with mma.sync"),
        (
            LayerShape(head_dim=64, kv_dtype=E4M3),
            1,
            "sm_100a",
            "page_size 1 on sm_100a with 64 bytes",
        ),
        (
            LayerShape(head_dim=128, kv_dtype=torch.float8_e5m2),
            16,
            "sm_90a",
            "dtype torch.float8_e5m2 of k and v",
        ),
        (LayerShape(dtype=torch.float32), 16, "sm_90a", "dtype torch.float32"),
        (LayerShape(head_dim=24), 16, "sm_90a", "head_dim 24"),
    ],
)
def test_pools_that_are_refused(shape, page_size, arch, match, plugin):
    with emulation(arch=arch), pytest.raises(NotImplementedError, match=match):
        Engine(plugin, shape, page_size=page_size)


def test_a_unified_pool_is_refused(plugin):
    runner = Engine(plugin, LayerShape()).runner
    runner.kv_index_translator.is_translating = True
    with pytest.raises(NotImplementedError, match="unified pool"):
        plugin.BlackwellKernelsBackend(runner)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"attn_type": SimpleNamespace(value="decoder_bidirectional")},
            "kind decoder_bidirectional",
        ),
        ({"xai_temperature_len": 7}, "xai_temperature_len 7"),
        ({"logit_cap": 30.0, "logit_capping_method": "rsqrt"}, "logit_capping_method 'rsqrt'"),
    ],
)
def test_layers_that_are_refused(changes, match, plugin, engines_by_definition):
    engine = Engine(plugin, LayerShape())
    engine.layers = [layer_of(LayerShape(), **changes)]
    engine.admit(1, 9)
    with pytest.raises(NotImplementedError, match=match):
        engine.step({1: 9})


def test_an_fp8_layer_without_scales_is_named(plugin, engines_by_definition):
    """A layer without scales uses 1.0, with a warning; SGLang's values for a missing scale are
    refused.
    """
    for scales in ((-1.0, 0.5), (0.5, float("nan"))):
        engine = Engine(plugin, LayerShape(head_dim=128, kv_dtype=E4M3, scales=scales))
        engine.admit(1, 9)
        with pytest.raises(ValueError, match=r"layer 0: ._scale is (-1.0|nan), expected a pos"):
            engine.step({1: 9})
    shape = LayerShape(head_dim=128, kv_dtype=E4M3, scales=(1.0, 1.0))
    engine = Engine(plugin, shape)
    engine.layers = [layer_of(shape, v_scale_float=None)]
    engine.admit(1, 9)
    with pytest.warns(UserWarning, match="layer 0: v_scale not set, 1.0 is used: the checkpoint"):
        engine.step({1: 8})


@pytest.mark.parametrize(
    ("mode", "changes", "match"),
    [
        ("DLLM_EXTEND", {}, "a batch of"),
        ("DECODE", {"seq_lens_cpu": None}, "a batch without seq_lens_cpu"),
        ("EXTEND", {"extend_seq_lens_cpu": None}, "a batch without extend_seq_lens_cpu"),
        ("DECODE", {"spec_info": SimpleNamespace()}, "steps of a draft model"),
        ("EXTEND", {"encoder_lens": torch.tensor([3])}, "encoders before the decoder's tokens"),
        ("TARGET_VERIFY", {"spec_info": SimpleNamespace(draft_token_num=1)}, "branches of drafts"),
        (
            "TARGET_VERIFY",
            {"spec_info": SimpleNamespace(ragged_verify_layout=1)},
            "drafts of unequal number",
        ),
    ],
)
def test_batches_that_are_refused(mode, changes, match, plugin):
    engine = Engine(plugin, LayerShape(), page_size=2)
    engine.admit(1, 9)
    batch = engine.forward_batch({1: 1}, ForwardMode[mode])
    vars(batch).update(changes)
    with pytest.raises(NotImplementedError, match=match):
        engine.backend.init_forward_metadata(batch)


@pytest.mark.parametrize(
    ("mode", "spec_info", "match"),
    [
        ("EXTEND", None, "a graph of"),
        ("DECODE", SimpleNamespace(), "steps of a draft model"),
        ("TARGET_VERIFY", SimpleNamespace(draft_token_num=2), "a graph of branches"),
        ("TARGET_VERIFY", SimpleNamespace(draft_token_num=9, topk=1), "a graph of 9 drafts"),
    ],
)
def test_graphs_that_are_refused(mode, spec_info, match, plugin):
    engine = Engine(plugin, LayerShape())
    engine.admit(1, 12)
    engine.backend.init_cuda_graph_state(4, 36)
    batch = engine.forward_batch({1: 9}, ForwardMode[mode], spec_info)
    with pytest.raises(NotImplementedError, match=match):
        engine.backend.init_forward_metadata_out_graph(batch)


def test_an_option_that_is_refused(plugin):
    engine = Engine(plugin, LayerShape())
    engine.admit(1, 9)
    batch = engine.forward_batch({1: 1}, ForwardMode.DECODE)
    engine.backend.init_forward_metadata(batch)
    q = torch.zeros(1, 256).bfloat16()
    with pytest.raises(NotImplementedError, match="k_rope: attention supports"):
        engine.backend.forward_decode(q, None, None, engine.layers[0], batch, k_rope=q)


class Arguments(SimpleNamespace):
    """The part of `ServerArgs` that `pass_lists` asks for: fields, as declarations change them."""

    def fields(self) -> dict[str, str]:
        found = {
            "attention_backend": "triton", "prefill_attention_backend": None,
            "decode_attention_backend": None, "model_path": "a/model", **self.given,
        }  # fmt: skip
        for fields in self.declared:
            found |= fields
        return found


@pytest.mark.parametrize(
    ("given", "architecture", "seen"),
    [
        ({"attention_backend": "blackwell_kernels"}, "GptOssForCausalLM", "triton"),
        ({"attention_backend": "blackwell_kernels"}, "LlamaForCausalLM", "blackwell_kernels"),
        ({"attention_backend": "fa3"}, "GptOssForCausalLM", "fa3"),
        (
            {"attention_backend": "blackwell_kernels", "model_path": "instance://10.0.0.1"},
            "GptOssForCausalLM",
            "blackwell_kernels",
        ),
        (
            {"attention_backend": "fa3", "decode_attention_backend": "blackwell_kernels"},
            "GptOssForCausalLM",
            "fa3",
        ),
    ],
)
def test_lists_of_backends_are_passed(given, architecture, seen, plugin):
    """SGLang's list for a model finds a backend that it names, and only that step does."""
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
    arguments = Arguments(given=given, declared=[], model_config=config)
    found: list[dict[str, str]] = []
    before = arguments.fields()
    blackwell_engines.sglang.pass_lists(arguments, lambda args: found.append(args.fields()))
    assert found[0]["attention_backend"] == seen
    assert arguments.fields() == before
    if "decode_attention_backend" in given:
        assert found[0]["decode_attention_backend"] == "triton"


def test_models_find_the_pools_in_the_backend(plugin):
    """SGLang's models read them there, to write keys with their own kernels."""
    engine = Engine(plugin, LayerShape())
    assert engine.backend.token_to_kv_pool is engine.pool
    assert engine.backend.req_to_token_pool.req_to_token is engine.req_to_token


def test_scales_of_a_file(plugin, engines_by_definition):
    """--quantization-param-path sets a number where a checkpoint sets a tensor, and no float."""
    shape = LayerShape(head_dim=128, kv_dtype=E4M3, scales=(0.5, 0.25))
    engine = Engine(plugin, shape, page_size=16)
    given = {"k_scale": 0.5, "v_scale": 0.25, "k_scale_float": None, "v_scale_float": None}
    engine.layers = [layer_of(shape, **given)]
    engine.admit(1, 30)
    engine.step({1: 20})
    engine.step({1: 1}, mode="DECODE")


def test_new_weights_in_place(plugin, engines_by_definition):
    """Sinks and scales that an engine loads again are those of the next step."""
    shape = LayerShape(sinks=True)
    engine = Engine(plugin, shape)
    engine.admit(1, 9)
    batch = engine.forward_batch({1: 8}, ForwardMode.EXTEND)
    engine.backend.init_forward_metadata(batch)
    request, sinks = engine.requests[1], torch.full((4,), -9.0).bfloat16()
    given = (request.q[:8].flatten(1), request.k[:8], request.v[:8], engine.layers[0], batch)
    before = engine.backend.forward(*given, sinks=sinks)
    sinks.copy_(shape.sink_logits)
    out = engine.backend.forward(*given, sinks=sinks)
    assert not torch.equal(before, out)
    request.judge(out.unflatten(1, (4, -1)), 0)


def test_buffers_that_are_refused():
    with pytest.raises(ValueError, match=r"a buffer \(9, 2, 64\) of the pool with page_size 4"):
        pages_of(torch.zeros(9, 2, 64), 2, 4)


def test_a_graph_fills_the_tables_that_its_batch_reads(plugin):
    """The tables are the same memory at each step, filled by operations on the device alone."""
    engine = Engine(plugin, LayerShape(), page_size=2)
    engine.admit(1, 9)
    engine.admit(2, 9)
    engine.backend.init_cuda_graph_state(4, 4)
    batch = engine.forward_batch({1: 3, 2: 1}, ForwardMode.DECODE)
    seen = []
    for _ in range(2):
        engine.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        engine.backend.init_forward_metadata_in_graph(batch)
        step = engine.backend.batch.step
        seen.append((step.table.data_ptr(), step.seq_lens.data_ptr()))
    assert seen[0] == seen[1]
    assert step.seq_lens.tolist() == [3, 1]
    assert (step.table[0, :2] * 2).tolist() == engine.req_to_token[1, :4:2].tolist()
    assert engine.backend.get_cuda_graph_seq_len_fill_value() == 1


def test_tables():
    tokens = torch.tensor([[0, 0, 0, 0], [8, 9, 4, 5], [2, 3, 0, 0]], dtype=torch.int32)
    rows, lengths = torch.tensor([2, 1]), torch.tensor([1, 3], dtype=torch.int32)
    assert page_table(tokens, rows, 2, 2).tolist() == [[1, 0], [4, 2]]
    assert page_table(tokens, rows, 1, 3).dtype == torch.int32
    mapping = torch.arange(10).flip(0)
    mapping[4] = -1
    assert page_table(tokens, rows, 1, 3, mapping).tolist() == [[7, 6, 9], [1, 0, 0]]
    found = keys_of(tokens, rows, lengths, [1, 3])
    assert (found.slots.tolist(), found.starts.tolist()) == ([2, 8, 9, 4], [0, 1, 4])
    assert keys_of(tokens, rows, lengths, [1, 3], mapping).slots.tolist() == [7, 1, 0, 0]
