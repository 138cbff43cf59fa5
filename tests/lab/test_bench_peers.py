"""Adapters to other libraries in benchmarks: layouts by their definitions, and each adapter with a
stand-in for its library that computes in torch. No library and no GPU is needed.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lab.bench.fmha_peers import Problem, compared, inputs_of, sample_of
from lab.bench.gqa_peers import error_of
from lab.bench.moe_peers import ADAPTERS, Torch
from lab.bench.peers import (
    cudnn_graph,
    deepgemm,
    flash3,
    flashinfer_moe,
    glue,
    humming,
    marlin,
    marlin_build,
    marlin_layout,
)
from lab.bench.peers.run import Run, missing, values_of, versions
from lab.problems.moe_models import model_of, tokens_of, values
from moe.arguments import SwiGLU
from moe.models import of_model
from moe.packing import CheckpointWeight
from tests.lab.test_bench_moe import small


@pytest.fixture(scope="module")
def gpt_oss():
    return small("gpt-oss-20b")


@pytest.fixture(scope="module")
def tokens(gpt_oss):
    return tokens_of(gpt_oss, 5, "power-law")


@pytest.fixture(scope="module")
def expected(gpt_oss, tokens):
    """Results of every product, computed by torch."""
    torch_peer = Torch(gpt_oss)
    return {part: torch_peer.launch(part, tokens)().float() for part in ("w13", "w2")}


# -- what is common -------------------------------------------------------------------------------


def test_a_run_is_compared_by_its_finished_values():
    assert torch.equal(
        values_of(Run(lambda: torch.ones(2), lambda y: y * 3)), torch.full((2,), 3.0)
    )
    assert torch.equal(values_of(lambda: torch.ones(2)), torch.ones(2))
    assert missing("torch", "no_such_module") == "not installed: no_such_module"
    assert [*versions(["pytest", "no-such-distribution"])] == ["pytest"]


def test_every_adapter_says_why_it_cannot_run_without_a_gpu(gpt_oss, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module, _ in ADAPTERS.values():
        assert module.available()
        with pytest.raises((RuntimeError, NotImplementedError)):
            module.prepare(gpt_oss)


@pytest.mark.parametrize("block", [8, 48])
def test_blocks_have_one_expert_each(block):
    generator = torch.Generator().manual_seed(block)
    ids = torch.stack([torch.randperm(11, generator=generator)[:3] for _ in range(40)]).flatten()
    slot_of_row, offsets = ids.argsort(stable=True).int(), torch.zeros(12, dtype=torch.int32)
    offsets[1:] = torch.bincount(ids, minlength=11).cumsum(0)
    most = glue.most_blocks(len(ids), 11, block)
    found = glue.blocks_of(offsets, slot_of_row, block, most)
    assert len(found.experts) == most
    needed = [expert for expert in found.experts.tolist() if expert >= 0]
    assert found.padded.item() == len(needed) * block
    assert needed == sorted(needed)
    assert needed == [e for e in range(11) for _ in range(-(-int((ids == e).sum()) // block))]
    for expert, slots in zip(found.experts.tolist(), found.slots.view(most, block), strict=True):
        inside = slots[slots < len(ids)].long()
        assert (slots[len(inside) :] == len(ids)).all()
        assert (ids[inside] == expert).all()
    assert sorted(found.slots[found.slots < len(ids)].tolist()) == [*range(len(ids))]


# -- Marlin ---------------------------------------------------------------------------------------


def codes_by_hand(packed: torch.Tensor, rows: int) -> torch.Tensor:
    """Read Marlin's layout code by code: [rows, K]."""
    columns = packed.shape[0] * 16
    found = torch.full((rows, columns), -1)
    for tile, words in enumerate(packed.tolist()):
        for index, word in enumerate(words):
            group, thread, block = index // 128, index % 128 // 4, index % 4
            for nibble in range(8):
                # (row in the tile, column in the block) of the mma fragment of this thread
                element = (0, 2, 4, 6, 1, 3, 5, 7)[nibble]
                k = 2 * (thread % 4) + (element & 1) + (8 if element & 2 else 0)
                n = thread // 4 + (8 if element & 4 else 0)
                place = group * 64 + block * 16 + n
                found[place, tile * 16 + k] = word >> 4 * nibble & 15
    return found


def test_marlins_codes_are_where_its_kernel_looks():
    data = torch.randint(0, 256, (128, 24), dtype=torch.uint8)
    packed = marlin_layout.packed_codes(data)
    assert packed.dtype == torch.int32
    assert packed.shape == (3, 256)
    codes = torch.stack((data & 15, data >> 4), -1).flatten(1)
    assert torch.equal(codes_by_hand(packed, 128), codes.long())


def test_marlins_scales_and_biases_are_permuted():
    """The kernel reads 64 scale factors as 8 rows of 8, by columns and in pairs."""
    scales = torch.arange(64, dtype=torch.uint8)[:, None].repeat(2, 3).add(0)  # [N, K / 32]
    found = marlin_layout.permuted_scales(scales)
    assert found.shape == (3, 128)
    assert found[0, :8].tolist() == [0, 16, 8, 24, 32, 48, 40, 56]
    assert found[2, 64:72].tolist() == [0, 16, 8, 24, 32, 48, 40, 56]
    bias = marlin_layout.permuted_bias(torch.arange(64).view(1, 64))
    assert bias[0, :10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    assert bias[0, 32:36].tolist() == [32, 33, 40, 41]


@pytest.mark.parametrize(("size", "padded"), [
    ((2880, 2880), 2944), ((5760, 2880), 5760), ((2880, 2944), 2880), ((4096, 7168), 4096),
])  # fmt: skip
def test_marlin_gets_rows_that_it_can_tile(size, padded):
    assert marlin_layout.padded_rows(*size) == padded


def test_marlin_refuses_a_k_that_it_cannot_tile():
    with pytest.raises(NotImplementedError, match="K = 96: a multiple of 64"):
        marlin_layout.padded_rows(128, 96)


def test_only_kernels_of_mxfp4_are_compiled(tmp_path):
    header = """\
  COMMON_GET_IF(host::kU4)
  NVFP4_GET_IF(host::kFE2M1f)
  BIGGROUP_GET_IF(host::kFE4M3fn)
    MXFP4_GET_IF(host::kFE2M1f)
"""
    assert marlin_build.only_mxfp4(header) == "    MXFP4_GET_IF(host::kFE2M1f)\n"
    with pytest.raises(ValueError, match=r"no instantiations for MXFP4 as sglang 0\.5\.23"):
        marlin_build.only_mxfp4(header.replace("MXFP4", "MX4"))
    text = marlin_build.wrapper(tmp_path / "header.cuh", bias=True)
    assert "<bf16_t, false, true, true, false, false>" in text
    assert marlin_build.library(tmp_path, bias=False) != marlin_build.library(tmp_path, bias=True)


def test_blocks_of_marlin_are_as_large_as_experts_fill():
    assert [marlin.block_of(rows, 128) for rows in (4, 1000, 4096, 16384)] == [8, 16, 48, 64]


def marlin_function(*given) -> None:
    """The kernel of Marlin in torch, on its own layouts."""
    x, out, codes, bias, scales = given[:5]
    slots, experts, padded = given[10:13]
    block, top_k, e2m1 = given[16], given[17], given[20]
    rows, wide, columns = given[21:24]
    assert e2m1 == 2 | 1 << 8 | 1 << 16 | 1 << 49
    assert (rows, columns) == x.shape
    assert given[9].numel() >= 1
    sight = marlin_layout.permuted_scales(torch.arange(64, dtype=torch.uint8)[:, None])[0].long()
    order = marlin_layout.permuted_bias(torch.arange(32).view(1, 32))[0]
    for expert in {*experts[: int(padded) // block].tolist()}:
        plain = codes_by_hand(codes[expert], wide)
        data = (plain[:, ::2] | plain[:, 1::2] << 4).to(torch.uint8)
        factors = torch.empty_like(scales[expert]).view(-1, 64)
        factors[:, sight] = scales[expert].view(-1, 64)
        w = CheckpointWeight(data[None], factors.view(columns // 32, wide).mT[None])
        mine = slots.view(-1, block)[experts == expert].flatten().long()
        mine = mine[mine < rows * top_k]
        y = x[mine // top_k].float() @ values(w, "mxfp4")[0].float().T
        if bias.numel():
            added = torch.empty_like(bias[expert]).view(-1, 32)
            added[:, order] = bias[expert].view(-1, 32)
            y += added.flatten().float()
        out[mine] = y.bfloat16()


@pytest.fixture
def marlin_peer(gpt_oss, monkeypatch, tmp_path):
    loaded = SimpleNamespace(load_module=lambda path: SimpleNamespace(
        moe_wna16_marlin_gemm=marlin_function))  # fmt: skip
    monkeypatch.setitem(sys.modules, "tvm_ffi", loaded)
    monkeypatch.setenv(marlin_build.PLACE, str(tmp_path))
    properties = SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return marlin.Experts(gpt_oss)


@pytest.mark.parametrize("part", ["w13", "w2"])
def test_marlin_computes_the_same_product(marlin_peer, tokens, expected, part):
    y = values_of(marlin_peer.launch(part, tokens))
    assert error_of(y, expected[part]) < marlin_peer.max_error
    with pytest.raises(NotImplementedError, match="it gathers rows"):
        marlin_peer.launch("w13-ordered", tokens)


# -- Humming --------------------------------------------------------------------------------------


class HummingLayer(torch.nn.Module):
    """Humming's module of a product in torch: indexed or grouped, in bf16 or e4m3."""

    def __init__(self, *, shape_n, shape_k, weight_config, input_config, num_experts, has_bias,
                 torch_dtype, pad_n_to_multiple, pad_k_to_multiple):  # fmt: skip
        super().__init__()
        assert weight_config == {"quant_method": "mxfp4"}
        assert torch_dtype == torch.bfloat16
        self.multiples = pad_n_to_multiple, pad_k_to_multiple
        self.shape_n = shape_n
        self.size, self.experts, self.has_bias = (shape_n, shape_k), num_experts, has_bias
        self.humming_config = SimpleNamespace(to_str=str, dtype=input_config["dtype"], layer=self)

    def load_from_tensors(self, tensors):
        assert tensors["weight"].dtype == tensors["weight_scale"].dtype == torch.uint8
        w = CheckpointWeight(tensors["weight"], tensors["weight_scale"])
        assert w.data.shape == (self.experts, self.size[0], self.size[1] // 2)
        self.weight, self.bias = values(w, "mxfp4").float(), tensors.get("bias")
        assert (self.bias is not None) == self.has_bias

    def transform(self):
        pass

    def forward(self, inputs, *, compute_config, tuning_config, valid_shape_m, top_k,
                outputs, input_scale=None, sorted_ids=None, expert_ids=None, num_tokens_padded=None,
                expert_layout=None):  # fmt: skip
        quantised = self.humming_config.dtype == "float8e4m3"
        assert inputs.dtype == (torch.float8_e4m3fn if quantised else torch.bfloat16)
        x = inputs.float() if input_scale is None else inputs.float() * input_scale
        if compute_config == {"gemm_type": "grouped_contiguous"}:
            assert (expert_layout.dtype, top_k) == (torch.int64, 1)
            counts = expert_layout.diff()
            expert, row = torch.arange(self.experts).repeat_interleave(counts), torch.arange(len(x))
            slot = row
        else:
            block = int(re.search(r'"block_shape": \[(\d+)', tuning_config).group(1))
            place = torch.arange(int(num_tokens_padded))
            slot = sorted_ids[place].long()
            place, slot = place[slot < valid_shape_m], slot[slot < valid_shape_m]
            expert, row = expert_ids[place // block].long(), slot // top_k
        out = outputs.fill_(math.nan)
        y = torch.einsum("rk,rnk->rn", x[row], self.weight[expert])
        out[slot] = (y + self.bias[expert].float() if self.has_bias else y).bfloat16()
        return out


def may_process_input(config, x, activation_type="none", activation_impl=""):
    """Humming's launch around products in torch: SwiGLU by its C++ expression, and e4m3."""
    if activation_type != "none":
        both = x.float()
        a, b = (both[:, ::2], both[:, 1::2]) if "inter" in activation_type else both.chunk(2, -1)
        text = re.sub(r"([\d.])f\b", r"\1", activation_impl)
        names = {"fminf": lambda x, y: x.clamp(max=y), "fmaxf": lambda x, y: x.clamp(min=y)}
        x = eval(text, names | {"__expf": torch.exp, "a": a, "b": b}).bfloat16()
    if config.dtype == "bfloat16":
        return x, None, None
    data, scale = glue.quantised(x)
    return data, None, scale[:, None]


@pytest.fixture
def humming_package(monkeypatch):
    config = ModuleType("humming.config")
    config.ComputeConfig = lambda gemm_type: SimpleNamespace(to_str=lambda: gemm_type)
    kernel = ModuleType("humming.kernel.humming")
    warmed = []
    kernel.HummingKernel = SimpleNamespace(
        prepare_kernels=lambda layer, compute, tuning: warmed.append((compute, tuning))
    )

    def heuristic(config, shape_m, gemm_type):
        return {"block_shape": [8 if shape_m < 64 else 16, 64, 64], "gemm": gemm_type}

    members = {
        "humming": {},
        "humming.layer": {"HummingLayer": HummingLayer},
        "humming.tune": {"get_heuristics_config": heuristic},
        "humming.forward": {"may_process_input": may_process_input},
        "humming.kernel": {},
    }
    for name, found in members.items():
        module = ModuleType(name)
        vars(module).update(found)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "humming.config", config)
    monkeypatch.setitem(sys.modules, "humming.kernel.humming", kernel)
    return warmed


@pytest.mark.parametrize("activations", ["bf16", "e4m3"])
@pytest.mark.parametrize("form", [humming.INDEXED, humming.GROUPED])
def test_humming_computes_the_same_products(
    humming_package, gpt_oss, tokens, expected, form, activations
):
    peer = humming.Experts(gpt_oss, form, activations)
    mine, other = ("w13", "w13-ordered")[:: 1 if form == humming.INDEXED else -1]
    for part in (mine, "w2"):
        error = error_of(values_of(peer.launch(part, tokens)), expected[part.partition("-")[0]])
        assert error < peer.max_error, part
    with pytest.raises(NotImplementedError, match=r"rows in order|it gathers"):
        peer.launch(other, tokens)


@pytest.mark.parametrize("form", [humming.INDEXED, humming.GROUPED])
def test_humming_computes_the_same_layer(humming_package, gpt_oss, tokens, form):
    y = Torch(gpt_oss).launch("layer", tokens)().float()
    peer = humming.Experts(gpt_oss, form, "bf16")
    assert error_of(values_of(peer.launch("layer", tokens)), y) < peer.max_error


@pytest.mark.parametrize(("tight", "multiples"), [(False, (256, 128)), (True, (128, 64))])
def test_hummings_weights_are_padded(humming_package, gpt_oss, tight, multiples):
    peer = humming.Experts(gpt_oss, humming.INDEXED, "bf16", tight)
    assert {layer.multiples for layer in peer.layers.values()} == {multiples}


def test_humming_compiles_for_all_counts_at_once(humming_package, gpt_oss):
    peer = humming.Experts(gpt_oss, humming.GROUPED, "bf16")
    peer.warm([1, 64])
    assert [compute for compute, _ in humming_package] == ["grouped_contiguous"] * 2
    assert [kernel["block_shape"][0] for *_, kernel in humming_package[0][1]] == [8, 16]


@pytest.mark.parametrize("form", [SwiGLU(), SwiGLU(alpha=1.702, beta=1.0, limit=7.0)])
def test_hummings_expression_is_swiglu(form):
    both = torch.randn(3, 8).bfloat16() * 5
    config = SimpleNamespace(dtype="bfloat16")
    how = {"activation_type": "binary_interleaved", "activation_impl": humming.expression(form)}
    y = may_process_input(config, both, **how)[0]
    assert error_of(y, glue.swiglu_in_torch(both, form, True).float()) < 0.005


# -- FlashInfer and DeepGEMM ----------------------------------------------------------------------


def cutlass_fused_moe(x, ids, weights, *, fc1_expert_weights, fc2_expert_weights, output_dtype,
                      quant_scales, use_w4_group_scaling, output, fc1_expert_biases=None,
                      fc2_expert_biases=None, **form):  # fmt: skip
    """FlashInfer's layer in torch: rows of up, then of gate; nothing is interleaved."""
    assert use_w4_group_scaling
    assert output_dtype == torch.bfloat16
    first, second = (
        values(CheckpointWeight(data, scales), "mxfp4").float()
        for data, scales in zip((fc1_expert_weights, fc2_expert_weights), quant_scales, strict=True)
    )
    alpha, beta, limit = (form[f"swiglu_{name}"][0] for name in ("alpha", "beta", "limit"))
    output.zero_()
    for token, (experts, shares) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            up, gate = (first[expert] @ x[token].float() + fc1_expert_biases[expert]).chunk(2)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            h = gate * torch.sigmoid(alpha * gate) * (up + beta)
            output[token] += share * (second[expert] @ h + fc2_expert_biases[expert])


def test_flashinfer_computes_the_same_layer(gpt_oss, monkeypatch):
    """Sizes that 128 does not divide are padded with zeros."""
    layer = replace(gpt_oss.layer, hidden=160, intermediate=96, experts=4)
    model = model_of("gpt-oss-20b", "mxfp4", "cpu", layer=layer)
    module = ModuleType("flashinfer.fused_moe")
    module.cutlass_fused_moe = cutlass_fused_moe
    module.interleave_moe_scales_for_sm90_mixed_gemm = lambda scales: scales
    module.interleave_moe_weights_for_sm90_mixed_gemm = lambda weight, kind: weight
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", module)
    peer, few = flashinfer_moe.Experts(model), tokens_of(model, 2, "random")
    assert peer.weights[0].shape == (4, 256, 128)
    assert peer.weights[1].shape == (4, 256, 64)
    y = Torch(model).launch("layer", few)().float()
    assert error_of(values_of(peer.launch("layer", few)), y) < peer.max_error
    with pytest.raises(NotImplementedError, match="a product alone"):
        peer.launch("w2", few)


def test_deepgemm_without_the_kernel_says_so(monkeypatch, tmp_path):
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(deepgemm.importlib.util, "find_spec", lambda name: spec)
    assert deepgemm.available() == "this version multiplies e4m3 by e2m1 on Blackwell alone"
    folder = tmp_path / deepgemm.KERNELS
    folder.mkdir(parents=True)
    (folder / "sm90_fp8_fp4_gemm_1d2d.cuh").touch()
    assert "has sm90_fp8_fp4_gemm_1d2d.cuh" in deepgemm.available()


# -- attention ------------------------------------------------------------------------------------


FP8 = Problem(2, 6, 6, 4, 2, 64, 64, dtype="e4m3", causal=True)


def attention(q, k, v, causal, scale):
    """[B, H, S, D] in fp32, with the mask aligned bottom-right."""
    k, v = (tensor.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q.float() @ k.mT * scale
    if causal:
        seen = torch.ones(scores.shape[-2:]).tril(k.shape[2] - q.shape[2]).bool()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores.softmax(-1) @ v


class Node:
    """A tensor of a graph; setters return it, as cuDNN's do."""

    def __getattr__(self, name):
        def setter(value):
            setattr(self, name.removeprefix("set_") + "_", value)
            return self

        return setter


class Given:
    """An input of a graph: name, dim, stride and data_type."""


class Graph:
    """The part of cuDNN's graph that the adapter uses, in torch."""

    def __init__(self, **how):
        assert how["io_data_type"] == "FP8_E4M3"

    def tensor(self, **how):
        node = object.__new__(Given)
        vars(node).update(how)
        return node

    def sdpa_fp8(self, **given):
        self.given, self.outputs = given, [Node() for _ in range(3)]
        return self.outputs[0], None, *self.outputs[1:]

    def get_workspace_size(self):
        return 0

    def __getattr__(self, name):
        assert name in ("validate", "build_operation_graph", "create_execution_plans",
                        "check_support", "build_plans")  # fmt: skip
        return lambda *modes: None

    def execute(self, pack, workspace, handle):
        found = {node.name: tensor for node, tensor in pack.items() if isinstance(node, Given)}
        for node, tensor in pack.items():
            if isinstance(node, Given):
                assert (node.dim, node.stride) == ([*tensor.shape], [*tensor.stride()])
        assert found["scale_s"] * found["descale_s"] == 1
        causal = self.given.get("use_causal_mask") or self.given.get("use_causal_mask_bottom_right")
        o = attention(found["q"], found["k"], found["v"], causal, self.given["attn_scale"])
        out = pack[self.outputs[0]]
        out.copy_((o * found["scale_o"]).to(out.dtype))


@pytest.fixture
def cudnn(monkeypatch):
    module = ModuleType("cudnn")
    module.pygraph, module.create_handle = Graph, object
    module.set_stream = lambda handle, stream: None
    names = ("FP8_E4M3", "BFLOAT16", "FLOAT")
    module.data_type = SimpleNamespace(**{name: name for name in names})
    module.heur_mode = SimpleNamespace(A=0, FALLBACK=1)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize("out", ["bf16", "e4m3"])
@pytest.mark.parametrize("problem", [FP8, replace(FP8, sq=3), replace(FP8, causal=False)])
def test_cudnn_gets_the_same_attention(cudnn, problem, out):
    inputs = inputs_of(problem, "cpu")
    launch = cudnn_graph.prepare(problem, inputs, out)
    assert launch().dtype == {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}[out]
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    exact = attention(q, k, v, problem.causal, 64**-0.5).transpose(1, 2)
    error = error_of(values_of(launch), exact)
    assert error < {"bf16": 0.005, "e4m3": 0.04}[out]
    assert values_of(launch).shape == (2, problem.sq, 4, 64)


def test_cudnns_graph_is_for_e4m3_alone():
    for wrong in ({"dtype": "bf16"}, {"window": 3}, {"sinks": True}):
        with pytest.raises(NotImplementedError):
            cudnn_graph.check(replace(FP8, **wrong))


def test_flash_attention_3_gets_the_same_attention(monkeypatch):
    def flash_attn_func(q, k, v, *, causal, softmax_scale, window_size=(-1, -1)):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return attention(q, k, v, causal, softmax_scale).transpose(1, 2), None

    module = ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(flash3, "module", lambda: "flash_attn_interface")
    inputs = inputs_of(FP8, "cpu")
    assert values_of(flash3.prepare(FP8, inputs)).shape == (2, 6, 4, 64)
    window = replace(FP8, window=2, sinks=False)
    assert flash3.arguments(window)["window_size"] == (2, 0)
    with pytest.raises(NotImplementedError, match="it takes no sinks"):
        flash3.arguments(replace(FP8, sinks=True))
    with pytest.raises(NotImplementedError, match="one dtype"):
        flash3.arguments(replace(FP8, dtype="bf16", kv_dtype="e4m3"))


def test_results_of_few_bits_are_judged_by_exact_rows():
    """A result that is too small by 2 % is within the limit, and the sample says by how much."""
    inputs = inputs_of(FP8, "cpu")
    q, k, v = (tensor.transpose(1, 2) for tensor in (inputs.q, inputs.k, inputs.v))
    exact = attention(q, k, v, True, 64**-0.5).transpose(1, 2)
    sample = sample_of(FP8, inputs)
    assert sample.places == ((0, 0), (1, 3))
    assert sample.errors(exact)["exact_error"] < 1e-5
    found = compared(exact * 0.98, exact, "e4m3", "fmha", sample)
    assert found["shrink"] == pytest.approx(0.02, rel=1e-3)
    assert found["mean_error"] == pytest.approx(0.02, rel=1e-3)
    with pytest.raises(ValueError, match=r"a row is 10\.0% off the exact one"):
        compared(exact * 0.9, exact, "e4m3", "fmha", sample)


def test_sizes_of_models_suit_the_peers():
    """All three models of the comparison have sizes that Marlin and FlashInfer can tile."""
    for name in ("gpt-oss-120b", "deepseek-v4-flash", "kimi-k2"):
        layer = of_model(name)
        assert marlin_layout.padded_rows(layer.hidden, layer.intermediate) >= layer.hidden
        assert flashinfer_moe.up_to(layer.hidden) - layer.hidden < 128
