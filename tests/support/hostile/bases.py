"""A right call of every public function with arguments, from which hostile calls are made."""

from __future__ import annotations

import copy
import functools
import tempfile
from pathlib import Path
from typing import Any

import gguf
import torch

import fmha
import gqa_lowlatency
import kvcache
import mla
import moe
import q8_0
from blackwell_engines import parallel
from kernelkit.call.prepared import Plan
from kernelkit.trees import tree_of_mask
from kvcache import Manager, Sizes
from kvcache.layouts.models import MLA_BF16, Options, deepseek_v4
from kvcache.layouts.presets import CONFIGS
from kvcache.layouts.records import BF16_512, FP8_584, INDEXER_BF16, plain
from kvcache.layouts.rows import Rows, TailRows
from mla import (
    Compression,
    Compressor,
    Every,
    IndexKeys,
    IndexQueries,
    IndexQuery,
    LatentKeys,
    LowRank,
    Queries,
    Selected,
    StepView,
    Tables,
    WindowKeys,
    Workspace,
    cached_attention,
    compress,
    decode,
    decode_plan,
    norm_rope_append,
    plan_workspace,
    prepare_attention,
    prepare_query,
    scores,
    select,
    sparse_decode,
    sparse_prefill,
    step_view,
)
from moe.api import InPlacePlan
from moe.quantized import laid_out
from moe.reference import quantise as quantised
from q8_0 import reference as q8_0_reference
from q8_0.numbers.launch import product_of_numbers
from q8_0.product.launch import product
from tests.moe.hub_files import LAYER, experts_of, gpt_oss, write
from tests.support.hostile.calls import angles, bf16, normal, positive, some_bytes
from tests.support.hostile.generator import Base, Given

INT = torch.int32

# ---- attention and ranks


def _attention() -> Given:
    return {"q": bf16(2, 8, 4, 64), "k": bf16(2, 32, 2, 64), "v": bf16(2, 32, 2, 64),
            "out": bf16(2, 8, 4, 64), "sinks": normal(4),
            "kv_lens": torch.tensor([32, 9], dtype=INT)}  # fmt: skip


def _packed() -> Given:
    starts = torch.tensor([0, 5, 8], dtype=INT)
    return {"q": bf16(8, 4, 64), "k": bf16(9, 16, 2, 64), "v": bf16(9, 16, 2, 64),
            "cu_seqlens_q": starts, "max_seqlen_q": 5, "causal": True, "window": (7, 0),
            "q_offset": torch.tensor([3, 0], dtype=INT), "scale": 0.5, "softcap": 3.0,
            "kv_lens": torch.tensor([17, 9], dtype=INT), "rope": angles(32, 8),
            "page_table": torch.tensor([[1, 2], [8, 0]], dtype=INT),
            "config": fmha.AttentionConfig()}  # fmt: skip


def _of_tree() -> Given:
    return {"q": bf16(2, 8, 4, 64), "k": bf16(2, 32, 2, 64), "v": bf16(2, 32, 2, 64),
            "tree": tree_of_mask(torch.ones(2, 8, 8).tril() > 0), "window": 20,
            "kv_lens": torch.tensor([32, 9], dtype=INT)}  # fmt: skip


def _decode() -> Given:
    k, v = (normal(9, 64, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2))
    return {"q": bf16(2, 1, 8, 64), "k": k, "v": v, "out": bf16(2, 1, 8, 64),
            "k_scale": positive(2), "v_scale": positive(2), "sinks": normal(8),
            "kv_lens": torch.tensor([10, 64], dtype=INT), "max_kv_len": 64,
            "page_table": torch.tensor([[3], [1]], dtype=INT), "window": 20,
            "config": gqa_lowlatency.DecodeConfig()}  # fmt: skip


def _merge() -> Given:
    parts = [(normal(1, 3, 2, 64), normal(1, 2, 3)) for _ in range(2)]
    return {"parts": parts, "sinks": normal(2)}


def _without(given: Given, *names: str) -> Given:
    return {name: value for name, value in given.items() if name not in names}


def _planned(plan: Plan, given: Given) -> Any:
    """Run a plan for the tensors that it was made with."""
    moves = ("q", "k", "v", "kv_lens", "q_offset", "first_keys", "cu_seqlens_q", "cu_seqlens_k",
             "page_table", "tree")  # fmt: skip
    tensors = {name: given.get(name) for name in moves}
    return plan(**{n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)})


def _warming(given: Given) -> Given:
    return {**_without(given, "out"), "batches": (1, 2), "lengths": (1, 64)}


# ---- attention over a cache

LAYOUT = deepseek_v4("three", [0, 4, 128], 16, Options("bf16", draft=1, online_hca=True))
BEFORE = 13  # tokens of the request before the step
HEADS = 4


@functools.cache
def _step(tokens: int) -> dict[str, torch.Tensor]:
    """The arrays of a step of one request."""
    manager = Manager(LAYOUT, Sizes(4, 2))
    request = manager.admit("one", [7] * BEFORE).request
    manager.append({request: [7] * BEFORE})
    return manager.append({request: [7] * tokens}).tensors("cpu")


def _arrays(tokens: int) -> dict[str, torch.Tensor]:
    return {name: array.clone() for name, array in _step(tokens).items()}


@functools.cache
def _seen(tokens: int) -> StepView:
    return step_view(LAYOUT, _step(tokens), longest=tokens)


def _view(tokens: int) -> StepView:
    return copy.deepcopy(_seen(tokens))


def _pool(slots: int, size: int) -> torch.Tensor:
    """Random bytes that are finite as bfloat16."""
    return bf16(slots, size // 2).view(torch.uint8)


def _blocks(name: str) -> Rows:
    return Rows(_pool(5, LAYOUT.block_bytes), **vars(LAYOUT.place(name, 0)))


def _attending(tokens: int) -> Given:
    ring = Rows(_pool(3, LAYOUT.state_bytes), **vars(LAYOUT.place("swa", 0)))
    return {"q": bf16(tokens, HEADS, 512), "kv": bf16(tokens, 512), "ring": ring,
            "window": _view(tokens).window, "rope": angles(32, 32),
            "sinks": normal(HEADS)}  # fmt: skip


def _of_selected() -> Given:
    chosen = torch.tensor([[32, 34, -1]]), torch.tensor([2], dtype=INT)
    return _attending(1) | {"past": Selected(_blocks("csa"), *chosen)}


def _of_every() -> Given:
    return _attending(1) | {"past": Every(_blocks("hca"), _view(1).pages["hca"])}


def _viewing() -> Given:
    names = ("positions", "owners", "starts", "lengths", "cu_tokens", "state_slots",
             "block_tables", "rows_of.swa")  # fmt: skip
    arrays = {name: array for name, array in _arrays(3).items() if name in names}
    return {"layout": LAYOUT, "arrays": arrays, "longest": 3, "pages": {"hca": 1}}


def _workspace() -> Given:
    return {"layout": LAYOUT, "heads": 4, "tokens": 3, "requests": 2, "longest": 2, "selected": 8}


def _preparing() -> Given:
    cos, sin = angles(8, 32)
    return {"q": bf16(3, 2, 128), "weights": normal(3, 2), "positions": torch.arange(3),
            "cos": cos, "sin": sin, "factor": 0.5}  # fmt: skip


def _scoring() -> Given:
    pool = _pool(3, 8 * 256)
    query = IndexQuery(bf16(2, 16, 128), torch.empty(2, 16, 0, dtype=torch.uint8), positive(2, 16))
    return {"rows": Rows(pool, 0, 0, 8, INDEXER_BF16), "query": query,
            "owners": torch.tensor([0, 1], dtype=INT), "counts": torch.tensor([11, 3], dtype=INT),
            "block_tables": torch.tensor([[2, 1], [0, 0]], dtype=INT),
            "out": normal(2, 16)}  # fmt: skip


def _selecting() -> Given:
    return {"scores": normal(2, 20), "counts": torch.tensor([20, 7], dtype=INT), "k": 4,
            "owners": torch.tensor([1, 0], dtype=INT), "entries": 8,
            "block_tables": torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=INT)}  # fmt: skip


def _compressing() -> Given:
    tail = LAYOUT.find("csa_tail")
    rows = tail.rows(LAYOUT.draft)
    pool = normal(3, LAYOUT.state_bytes // 4).view(torch.uint8)
    columns, (cos, sin) = tail.overlap * tail.width, angles(32, 32)
    return {"compressor": Compressor(normal(tail.ratio, columns), positive(tail.width)),
            "tail": TailRows(pool, LAYOUT.offset("csa_tail", 0), rows, tail),
            "out": _blocks("csa"), "values": normal(4, columns), "scores": normal(4, columns),
            "tables": Tables.of(_arrays(4), "csa", "csa_tail"), "cos": cos, "sin": sin,
            "longest": 4}  # fmt: skip


def _compression(name: str) -> Compression:
    tail = LAYOUT.find(f"{name}_tail")
    states, blocks = _pool(3, LAYOUT.state_bytes), _pool(5, LAYOUT.block_bytes)
    columns = tail.overlap * tail.width
    weights = Compressor(normal(tail.ratio, columns), positive(tail.width))
    rows = TailRows(states, LAYOUT.offset(tail.name, 0), tail.rows(LAYOUT.draft), tail)
    out = Rows(blocks, **vars(LAYOUT.place(name, 0)))
    return Compression(weights, rows, out, normal(4, columns), normal(4, columns), name)


def _prepared() -> Given:
    """All parts of a CSA layer, each in pools of its own, as its plain form has them."""
    needed = ("positions", "owners", "starts", "cu_tokens", "state_slots", "ends_of.csa",
              "ends_of.index", "rows_of.csa", "rows_of.index", "rows_of.csa_tail",
              "rows_of.index_tail")  # fmt: skip
    arrays = _arrays(4)
    ring = Rows(_pool(3, LAYOUT.state_bytes), **vars(LAYOUT.place("swa", 0)))
    return {"arrays": {name: arrays[name] for name in needed}, "rope": angles(32, 32),
            "entries": _compression("csa"), "index_keys": _compression("index"),
            "index_queries": IndexQueries(bf16(4, 2, 128), normal(4, 2), "indexer_bf16", 0.5),
            "window": WindowKeys(ring, bf16(4, 512), arrays["rows_of.swa"]),
            "longest": 4}  # fmt: skip


def _latent() -> Given:
    return {"q": bf16(2, 1, 4, 576), "kv": bf16(3, 16, 1, 576), "sinks": normal(4),
            "page_table": torch.tensor([[2, 0], [1, 0]], dtype=INT),
            "kv_lens": torch.tensor([20, 7], dtype=INT), "out": bf16(2, 1, 4, 512)}  # fmt: skip


def _latent_listed() -> Given:
    return {"q": bf16(3, 4, 512), "rows": _blocks("csa"), "sinks": normal(4),
            "indices": torch.tensor([[0, 5], [3, -1], [1, 1]]),
            "counts": torch.tensor([2, 1, 0], dtype=INT), "extra": bf16(2, 4, 512),
            "extra_indices": torch.tensor([[7], [0], [3]], dtype=INT),
            "extra_counts": torch.tensor([1, 1, 0], dtype=INT), "rope": angles(8, 32),
            "positions": torch.arange(3), "out": bf16(3, 4, 512)}  # fmt: skip


def _between() -> Given:
    """What a layer does after its first projections, and after its last one."""
    blocks, others = _pool(3, 4 * 1152), _pool(3, 4 * 256)
    keys = LatentKeys(bf16(3, 576), Rows(blocks, 0, 0, 4, MLA_BF16), torch.tensor([0, 5, -1]),
                      positive(512))  # fmt: skip
    index = IndexKeys(bf16(3, 128), Rows(others, 0, 0, 4, INDEXER_BF16),
                      torch.tensor([7, 1, 0]), positive(128), normal(128))  # fmt: skip
    return {"positions": torch.arange(3), "rope": angles(8, 32), "keys": keys, "index_keys": index,
            "queries": Queries(bf16(3, 2, 192), bf16(3, 2, 576)),
            "low_rank": LowRank(bf16(3, 64), positive(64), bf16(3, 64))}  # fmt: skip


def _between_in_place() -> Given:
    """In place, keys in pages of a tensor."""
    keys = LatentKeys(bf16(3, 512), bf16(2, 4, 512), torch.tensor([0, 5, -1], dtype=INT),
                      bf16(512))  # fmt: skip
    return {"positions": torch.arange(3, dtype=INT), "rope": angles(8, 32), "keys": keys,
            "queries": Queries(bf16(3, 2, 512), eps=1e-6), "pairs": "halves",
            "low_rank": LowRank(bf16(3, 64), positive(64))}  # fmt: skip


SPARSE_BASES = (
    Base("mla.decode", decode, _latent, ("out",)),
    Base("sparse_decode", sparse_decode, _latent_listed, ("out",)),
    Base("sparse_prefill", sparse_prefill, _latent_listed, ("out",)),
    Base("cached_attention", cached_attention, lambda: _attending(2), ("ring/pool",)),
    Base("cached_attention of a chunk", cached_attention, lambda: _attending(5), ("ring/pool",)),
    Base("cached_attention of selected", cached_attention, _of_selected, ("ring/pool",)),
    Base("cached_attention of every", cached_attention, _of_every, ("ring/pool",)),
    Base("step_view", step_view, _viewing),
    Base("plan_workspace", plan_workspace, _workspace),
    Base(
        "at_once", Workspace.at_once,
        lambda: {"self": plan_workspace(**_workspace()), "limit": 1 << 20, "tokens": 3},
    ),
    Base("prepare_query", prepare_query, _preparing),
    Base(
        "norm_rope_append", norm_rope_append, _between,
        ("keys/rows/pool", "index_keys/rows/pool", "queries/out", "low_rank/out"),
        frozenset({"low_rank/x", "low_rank/out"}),
    ),
    Base(
        "norm_rope_append in place", norm_rope_append, _between_in_place,
        ("keys/rows", "queries/q", "low_rank/x"),
    ),
    Base("scores", scores, _scoring, ("out",)),
    Base("select", select, _selecting),
    Base("compress", compress, _compressing, ("tail/pool", "out/pool")),
    Base(
        "prepare_attention", prepare_attention, _prepared,
        ("entries/out/pool", "index_keys/out/pool", "window/rows/pool"),
        frozenset({"entries/out/pool", "index_keys/out/pool"}),  # streams share their blocks
    ),
)  # fmt: skip


# ---- the mixture of experts

OFFSETS = torch.tensor([0, 2, 2, 5], dtype=INT)
W13, W2 = bf16(3, 128, 128), bf16(3, 128, 64)
PACKED, MX = moe.pack(W13, W2, "nvfp4"), moe.pack(W13, W2, "mxfp4")
BIASED = moe.pack(W13, W2, "mxfp4", biases=(bf16(3, 128), bf16(3, 128)))
ARRANGED = moe.arrange(MX)
NAMES = [f"{LAYER}.experts.{expert}" for expert in range(2)]


def _route() -> Given:
    return {"logits": normal(5, 8), "top_k": 2, "bias": normal(8), "n_group": 2,
            "logit_bias": normal(8), "shared": 1, "scale": 2.0}  # fmt: skip


def _route_tokens() -> Given:
    linear = moe.RouterLinear(bf16(8, 64), bf16(8))
    return {"x": bf16(5, 64), "linear": linear, "router": moe.Router(2, bias=normal(8))}


def _permutation() -> Given:
    return {"ids": torch.tensor([[0, 1], [2, 0]], dtype=INT), "num_experts": 4,
            "expert_range": (1, 3)}  # fmt: skip


def _combine() -> Given:
    return {"y": bf16(6, 64), "weights": positive(3, 2),
            "row_of_slot": torch.arange(6, dtype=INT).view(3, 2)}  # fmt: skip


def _quantise() -> Given:
    return {"x": bf16(5, 128), "fmt": "nvfp4", "global_scale": positive(1), "offsets": OFFSETS}


def _grouped_gemm() -> Given:
    x = quantised(bf16(5, 128), "nvfp4", offsets=OFFSETS)
    return {"x": laid_out(x, offsets=OFFSETS), "w": PACKED.w13, "offsets": OFFSETS.clone(),
            "amax": torch.zeros(1), "bias": normal(3, 128)}  # fmt: skip


def _activated() -> Given:
    return _grouped_gemm() | {"activation": moe.Activation(PACKED.granularity)}


def _swiglu() -> Given:
    given = _grouped_gemm()
    return {"x": given["x"], "w13": PACKED.w13, "offsets": given["offsets"], "form": moe.SwiGLU()}


def _mixed_gemm() -> Given:
    return {"x": bf16(5, 64), "w": ARRANGED.w2, "offsets": OFFSETS.clone(),
            "bias": normal(3, 128)}  # fmt: skip


def _fused_moe() -> Given:
    return {"x": bf16(5, 128), "experts": PACKED, "router_logits": normal(5, 3),
            "router": moe.Router(2, bias=normal(3)), "activation": moe.SwiGLU(),
            "activations": PACKED.fmt,
            "scales": moe.Scales(positive(1), positive(1), torch.zeros(1))}  # fmt: skip


def _fused_mixed() -> Given:
    return {"x": bf16(5, 128), "experts": ARRANGED, "router_logits": normal(5, 3),
            "router": moe.Router(2)}  # fmt: skip


def _fused_chosen() -> Given:
    ids = torch.tensor([[0, 2], [1, -1], [2, 2], [0, 1], [-1, -1]])
    return {"x": bf16(5, 128), "experts": PACKED, "activations": PACKED.fmt,
            "router_logits": moe.Chosen(ids, positive(5, 2))}  # fmt: skip


def _warming_moe() -> Given:
    given = _fused_mixed()
    return {**given, "experts": PACKED, "activations": PACKED.fmt, "tokens": (1, 5)}


def _planned_moe(plan: InPlacePlan, _: Given) -> Any:
    """Run a plan for the tensors that it was made with."""
    return plan()


def _pack() -> Given:
    return {"w13": W13, "w2": W2, "fmt": "mxfp8", "granularity": 32}


def _checkpoint_weight(rows: int, k: int) -> moe.CheckpointWeight:
    scales = some_bytes(3, rows, k // 16).clamp(min=1)
    return moe.CheckpointWeight(some_bytes(3, rows, k // 2), scales, decode_scale=positive(3))


def _pack_quantised() -> Given:
    return {"w13": _checkpoint_weight(128, 128), "w2": _checkpoint_weight(128, 64),
            "fmt": "nvfp4", "biases": (bf16(3, 128), bf16(3, 128))}  # fmt: skip


FOLDER = tempfile.TemporaryDirectory(prefix="hostile-")  # removed when the process ends


@functools.cache
def _folder(name: str) -> Path:
    """Write a checkpoint: of gpt-oss, or with separate tensors of each expert."""
    path = Path(FOLDER.name) / name
    path.mkdir()
    if name == "gpt-oss":
        return write(path, gpt_oss(2, 64, 64))
    projections = ("gate_proj", "up_proj", "down_proj")
    return write(path, experts_of("modelopt", NAMES, projections, 64, 64))


def _pack_gpt_oss() -> Given:
    return {"path": _folder("gpt-oss"), "prefix": f"{LAYER}.experts", "expert_range": (0, 1)}


def _pack_experts() -> Given:
    return {"path": _folder("modelopt"), "experts": NAMES}


MOE_BASES = (
    Base("route", moe.route, _route),
    Base("route_tokens", moe.route_tokens, _route_tokens),
    Base("permutation", moe.permutation, _permutation),
    Base("combine", moe.combine, _combine),
    Base("moe.quantise", moe.quantise, _quantise),
    Base("grouped_gemm", moe.grouped_gemm, _grouped_gemm, ("amax",)),
    Base("grouped_gemm, activated", moe.grouped_gemm, _activated, ("amax",)),
    Base(
        "grouped_gemm_swiglu", moe.grouped_gemm_swiglu, _swiglu
    ),
    Base("mixed_gemm", moe.mixed_gemm, _mixed_gemm),
    Base("fused_moe", moe.fused_moe, _fused_moe, ("scales/h_amax",)),
    Base("fused_moe, arranged", moe.fused_moe, _fused_mixed),
    Base("fused_moe, chosen", moe.fused_moe, _fused_chosen),
    Base(
        "grouped_gemm_plan", moe.grouped_gemm_plan, _grouped_gemm, ("amax",), computed=_planned_moe,
    ),
    Base(
        "fused_moe_plan", moe.fused_moe_plan, _fused_moe, ("scales/h_amax",), computed=_planned_moe,
    ),
    Base(
        "fused_moe_plan, arranged", moe.fused_moe_plan, _fused_mixed,
        computed=_planned_moe,
    ),
    Base(
        "moe.warmup", moe.warmup, _warming_moe, contents=False, computed=None
    ),
    Base("pack", moe.pack, _pack),
    Base("pack_quantised", moe.pack_quantised, _pack_quantised),
    Base("pack_gpt_oss", moe.pack_gpt_oss, _pack_gpt_oss),
    Base("pack_experts", moe.pack_experts, _pack_experts),
    Base("activation_scales", moe.activation_scales, _pack_experts),
    Base("arrange", moe.arrange, lambda: {"experts": MX, "activations": "e4m3"}),
    Base("unpack", moe.unpack, lambda: {"packed": PACKED}),
    Base("unpack_biases", moe.unpack_biases, lambda: {"packed": BIASED}),
    Base("ExpertWeights", moe.ExpertWeights, lambda: {"packed": PACKED}, contents=False,
         computed=None),
)  # fmt: skip


# ---- the KV cache and Q8_0

POOL_BYTES = 4096


def _pages() -> Given:
    return {"k_pages": bf16(4, 16, 2, 64), "v_pages": bf16(4, 16, 2, 64), "k": bf16(3, 2, 64),
            "v": bf16(3, 2, 64), "slots": torch.tensor([1, 17, -1])}  # fmt: skip


def _page_table() -> Given:
    return {"indptr": torch.tensor([0, 2, 2, 5], dtype=INT),
            "indices": torch.tensor([4, 1, 0, 7, 3], dtype=INT),
            "last_page_len": torch.tensor([16, 0, 3], dtype=INT), "page_size": 16,
            "max_pages": 4}  # fmt: skip


def _page_slots() -> Given:
    return {"table": torch.tensor([[4, 1], [0, -1]], dtype=INT), "page_size": 16,
            "positions": torch.tensor([31, 2, -1]), "entries": torch.tensor([0, 1, 1])}  # fmt: skip


def _fp8_pages() -> Given:
    pages = {name: _pages()[name].to(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    return _pages() | pages | {"k_scale": positive(1), "v_scale": positive(1)}


def _rows(record: kvcache.Record | None = None) -> kvcache.Rows:
    pool = some_bytes(4, POOL_BYTES)
    record = plain("k", 1, 64) if record is None else record
    rows = min(POOL_BYTES // 1024, 4)
    return kvcache.Rows(pool, 0, rows * record.data_bytes, rows, record)


def _append_rows() -> Given:
    return {"first": (_rows(), bf16(3, 64)), "second": None, "slots": torch.tensor([0, 5, -1])}


def _append_swa() -> Given:
    cos, sin = angles(8, 32)
    return {"rows": _rows(BF16_512), "kv": bf16(3, 512), "positions": torch.arange(3),
            "slots": torch.tensor([0, 5, -1]), "cos": cos, "sin": sin}  # fmt: skip


def _gather() -> Given:
    return {"rows": _rows(), "indices": torch.tensor([0, 5, -1]), "out": bf16(3, 64)}


def _dequantising() -> Given:
    return {"rows": _rows(FP8_584), "indices": torch.tensor([0, 5, -1]), "out": bf16(3, 512)}


def _copy_slots() -> Given:
    return {"source": some_bytes(4, 256), "target": some_bytes(4, 256),
            "pairs": torch.tensor([[0, 1], [2, 3]]),
            "segments": torch.tensor([[0, 16, 32]])}  # fmt: skip


def _checksum() -> Given:
    return {"pool": some_bytes(4, 256), "slots": torch.tensor([1, -1]), "begin": 0, "end": 64}


def _admitting() -> Given:
    return {"self": kvcache.Manager(kvcache.gqa(1, 2, 64), kvcache.Sizes(8)), "name": "one",
            "prompt": [1, 2, 3], "salt": b"", "use_cache": True}  # fmt: skip


def _managing() -> Given:
    layout = kvcache.gqa(2, 1, 8, window=4, windowed=(True, False))
    return {"layout": layout, "sizes": kvcache.Sizes(4, 2, checkpoints=1),
            "policy": kvcache.Policy(2)}  # fmt: skip


def _planning() -> Given:
    return {"layout": kvcache.gqa(1, 2, 64), "memory": 1 << 30, "mix": kvcache.Mix((100,))}


def _layout() -> Given:
    stream = kvcache.Stream("kv", plain("k", 1, 64), 1, 2)
    ring = kvcache.Ring("r", plain("k", 1, 64), 4, 1)
    tail = kvcache.Tail("t", 4, 16, 1, overlap=2)
    return {"name": "l", "block_tokens": 8, "streams": (stream,), "rings": (ring,),
            "tails": (tail,), "draft": 2}  # fmt: skip


def _reading() -> Given:
    return {"config": CONFIGS["gpt-oss-120b"], "options": kvcache.Options(draft=1), "name": "some"}


def _weights() -> q8_0.Weights:
    return q8_0_reference.rounded(normal(4, 96), "soa")


def _matvec() -> Given:
    return {"weights": _weights(), "x": bf16(2, 96), "bias": bf16(4)}


def _integers() -> Given:
    return {"weights": _weights(), "x": q8_0_reference.quantise(normal(2, 96))}


def _product() -> Given:
    return {"weights": _weights(), "x": q8_0_reference.quantise(normal(17, 96)),
            "bias": normal(4), "out": normal(17, 4)}  # fmt: skip


def _product_of_numbers() -> Given:
    return {"weights": _weights(), "x": bf16(17, 96), "bias": bf16(4), "out": bf16(17, 4),
            "arch": "sm_90a"}  # fmt: skip


def _linear() -> Given:
    return {"self": q8_0.Q8Linear(_weights(), bf16(4)), "x": bf16(17, 96)}


@functools.cache
def _file() -> str:
    """The path of a GGUF file with a matrix 'w' and a bias 'b'."""
    path = f"{FOLDER.name}/some.gguf"
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", gguf.quantize(normal(4, 96).numpy(), kind), raw_dtype=kind)
    writer.add_tensor("b", normal(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


CACHE_BASES = (
    Base("append_pages", kvcache.append_pages, _pages, ("k_pages", "v_pages")),
    Base("append_pages in e4m3", kvcache.append_pages, _fp8_pages, ("k_pages", "v_pages")),
    Base("gather_pages", kvcache.gather_pages, _pages, ("k", "v")),
    Base("page_table", kvcache.page_table, _page_table),
    Base("page_slots", kvcache.page_slots, _page_slots),
    Base("append_rows", kvcache.append_rows, _append_rows, ("first/0/pool",)),
    Base("append_swa", kvcache.append_swa, _append_swa, ("rows/pool",)),
    Base("gather", kvcache.gather, _gather, ("out",)),
    Base("gather of records", kvcache.gather, _dequantising, ("out",)),
    Base(
        "copy_slots", kvcache.copy_slots, _copy_slots, ("target",), frozenset({"source", "target"})
    ),
    Base("checksum", kvcache.checksum, _checksum),
    Base("Manager", kvcache.Manager, _managing, computed=None),
    Base("Cache", kvcache.Cache, _managing, computed=None),
    Base("Layout", kvcache.Layout, _layout, computed=None),
    Base("gqa", kvcache.gqa, lambda: {"layers": 2, "heads": 1, "head_dim": 8}),
    Base("from_config", kvcache.from_config, _reading, computed=None),
    Base(
        "preset", kvcache.preset, lambda: {"name": "deepseek-v4-pro", "draft": 2},
        options_of=kvcache.Options, computed=None,
    ),
    Base("usage", kvcache.usage, lambda: {"layout": kvcache.gqa(1, 2, 64), "tokens": 5}),
    Base("Options", kvcache.Options, lambda: {"record": "fp8", "draft": 1}),
    Base("Placeholders", kvcache.Placeholders, lambda: {"count": 3}),
    Base("Record", kvcache.Record, lambda: {"name": "r", "data_bytes": 16}),
    Base("Policy", kvcache.Policy, lambda: {"every": 2}),
    Base("Mix", kvcache.Mix, lambda: {"tokens": (100, 200)}),
    Base("plan", kvcache.plan, _planning, computed=None),
    Base("admit", kvcache.Manager.admit, _admitting, computed=None),
    Base(
        "kvcache.warmup", kvcache.warmup,
        lambda: {"layout": kvcache.gqa(1, 2, 64), "device": "cpu", "dtypes": (torch.bfloat16,)},
        computed=None,
    ),
    Base("repack", q8_0.repack, lambda: {"weights": _weights(), "layout": "interleaved"}),
    Base("dequantise", q8_0.dequantise, lambda: {"weights": _weights()}),
    Base("q8_0.quantise", q8_0.quantise, lambda: {"x": bf16(2, 96)}),
    Base("matvec", q8_0.matvec, _matvec),
    Base("matvec of integers", q8_0.matvec, _integers),
    Base("product", product, _product, ("out",)),
    Base("product of numbers", product_of_numbers, _product_of_numbers, ("out",)),
    Base(
        "Q8Linear", q8_0.Q8Linear, lambda: {"weights": _weights(), "bias": bf16(4)}, contents=False,
        computed=None,
    ),
    Base("Q8Linear of tokens", q8_0.Q8Linear.forward, _linear),
    Base("GgufFile", q8_0.GgufFile, lambda: {"path": _file()}, computed=None),
    Base(
        "GgufFile.weights", q8_0.GgufFile.weights,
        lambda: {"self": q8_0.GgufFile(_file()), "name": "w", "layout": "soa"},
    ),
    Base(
        "GgufFile.numbers", q8_0.GgufFile.numbers,
        lambda: {"self": q8_0.GgufFile(_file()), "name": "b"},
    ),
    Base(
        "q8_0.warmup", q8_0.warmup, lambda: {"weights": _weights(), "tokens": (1, 20)},
        contents=False, computed=None,
    ),
)  # fmt: skip


BASES = {
    base.name: base
    for base in (
        Base("attention", fmha.attention, _attention, ("out",), frozenset({"q", "out"})),
        Base("attention of pages", fmha.attention, _packed),
        Base(
            "attention_plan", fmha.attention_plan, lambda: _without(_attention(), "out"),
            computed=_planned,
        ),
        Base("fmha.warmup", fmha.warmup, lambda: _warming(_packed()), computed=None),
        Base("attention of a tree", fmha.attention, _of_tree),
        Base("decode of a tree", gqa_lowlatency.decode, _of_tree),
        Base("decode", gqa_lowlatency.decode, _decode, ("out",), frozenset({"q", "out"})),
        Base(
            "decode_plan", gqa_lowlatency.decode_plan, lambda: _without(_decode(), "out"),
            computed=_planned,
        ),
        Base(
            "gqa_lowlatency.warmup", gqa_lowlatency.warmup, lambda: _warming(_decode()),
            computed=None,
        ),
        Base("mla.decode_plan", decode_plan, lambda: _without(_latent(), "out"), computed=_planned),
        Base(
            "warmup_rows", mla.warmup_rows, lambda: _between(), options_of=norm_rope_append,
            computed=None,
        ),
        Base(
            "warmup_prepare", mla.warmup_prepare, lambda: _prepared(),
            options_of=prepare_attention, computed=None,
        ),
        Base("mla.warmup", mla.warmup, lambda: _warming(_latent()), computed=None),
        Base(
            "warmup_sparse", mla.warmup_sparse, lambda: _latent_listed() | {"tokens": (1, 7)},
            computed=None,
        ),
        Base("merge", fmha.merge, _merge),
        Base(
            "own_positions", parallel.own_positions, lambda: {"tokens": 8, "rank": 1, "world": 2}
        ),
        Base(
            "own_tokens", parallel.own_tokens,
            lambda: {"x": normal(2, 8, 3) > 0, "rank": 1, "world": 2},
        ),
        Base(
            "join", parallel.join, lambda: {"parts": [normal(2, 4, 3) > 0, normal(2, 4, 3) > 0]}
        ),
        *SPARSE_BASES,
        *CACHE_BASES,
        *MOE_BASES,
    )
}  # fmt: skip
