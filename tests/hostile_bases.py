"""A call that is right of every public function that takes tensors."""

from __future__ import annotations

import torch

import fmha
import gqa_lowlatency
import kvcache
import moe
import q8_0
from kvcache.layouts.records import BF16_512, FP8_584, plain
from moe.quantized import laid_out
from moe.reference import quantise as quantised
from q8_0 import reference as q8_0_reference
from tests.hostile_generator import Base, Given
from tests.hostile_values import angles, bf16, normal, positive, some_bytes

INT = torch.int32
OFFSETS = torch.tensor([0, 2, 2, 5], dtype=INT)


def _attention() -> Given:
    return {"q": bf16(2, 8, 4, 64), "k": bf16(2, 32, 2, 64), "v": bf16(2, 32, 2, 64),
            "out": bf16(2, 8, 4, 64), "sinks": normal(4),
            "kv_lens": torch.tensor([32, 9], dtype=INT)}  # fmt: skip


def _packed() -> Given:
    starts = torch.tensor([0, 5, 8], dtype=INT)
    return {"q": bf16(8, 4, 64), "k": bf16(9, 16, 2, 64), "v": bf16(9, 16, 2, 64),
            "cu_seqlens_q": starts, "max_seqlen_q": 5, "causal": True, "window": (7, 0),
            "q_offset": torch.tensor([3, 0], dtype=INT), "scale": 0.5, "softcap": 3.0,
            "kv_lens": torch.tensor([17, 9], dtype=INT),
            "rope": angles(32, 8),
            "page_table": torch.tensor([[1, 2], [8, 0]], dtype=INT)}  # fmt: skip


def _decode() -> Given:
    k, v = (normal(9, 64, 2, 64, dtype=torch.float8_e4m3fn) for _ in range(2))
    return {"q": bf16(2, 1, 8, 64), "k": k, "v": v, "out": bf16(2, 1, 8, 64),
            "k_scale": positive(2), "v_scale": positive(2), "sinks": normal(8),
            "kv_lens": torch.tensor([10, 64], dtype=INT), "max_kv_len": 64,
            "page_table": torch.tensor([[3], [1]], dtype=INT), "window": 20}  # fmt: skip


def _merge() -> Given:
    parts = [(normal(1, 3, 2, 64), normal(1, 2, 3)) for _ in range(2)]
    return {"parts": parts, "sinks": normal(2)}


def _pages() -> Given:
    return {"k_pages": bf16(4, 16, 2, 64), "v_pages": bf16(4, 16, 2, 64), "k": bf16(3, 2, 64),
            "v": bf16(3, 2, 64), "slots": torch.tensor([1, 17, -1])}  # fmt: skip


def _fp8_pages() -> Given:
    pages = {name: _pages()[name].to(torch.float8_e4m3fn) for name in ("k_pages", "v_pages")}
    return _pages() | pages | {"k_scale": positive(1), "v_scale": positive(1)}


POOL_BYTES = 4096


def _rows(record=None) -> kvcache.Rows:
    pool = some_bytes(4, POOL_BYTES)
    record = plain("k", 1, 64) if record is None else record
    rows = min(POOL_BYTES // 1024, 4)
    return kvcache.Rows(pool, 0, rows * record.data_bytes, rows, record)


def _append_rows() -> Given:
    return {"first": (_rows(), bf16(3, 64)), "second": None, "slots": torch.tensor([0, 5, -1])}


def _append_swa() -> Given:
    return {"rows": _rows(BF16_512), "kv": bf16(3, 512), "positions": torch.arange(3),
            "slots": torch.tensor([0, 5, -1]),
            **dict(zip(("cos", "sin"), angles(8, 32), strict=True))}  # fmt: skip


def _gather() -> Given:
    return {"rows": _rows(), "indices": torch.tensor([0, 5, -1]), "out": bf16(3, 64)}


def _dequantising() -> Given:
    return {"rows": _rows(FP8_584), "indices": torch.tensor([0, 5, -1]), "out": bf16(3, 512)}


def _copy_slots() -> Given:
    pools = (some_bytes(4, 256) for _ in range(2))
    return {**dict(zip(("source", "target"), pools, strict=True)),
            "pairs": torch.tensor([[0, 1], [2, 3]]),
            "segments": torch.tensor([[0, 16, 32]])}  # fmt: skip


def _checksum() -> Given:
    pool = some_bytes(4, 256)
    return {"pool": pool, "slots": torch.tensor([1, -1]), "begin": 0, "end": 64}


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


W13, W2 = bf16(3, 128, 128), bf16(3, 128, 64)
PACKED, MX = moe.pack(W13, W2, "nvfp4"), moe.pack(W13, W2, "mxfp4")
ARRANGED = moe.arrange(MX)


def _grouped_gemm() -> Given:
    x = quantised(bf16(5, 128), "nvfp4", offsets=OFFSETS)
    return {"x": laid_out(x, offsets=OFFSETS), "w": PACKED.w13, "offsets": OFFSETS.clone(),
            "amax": torch.zeros(1), "bias": normal(3, 128)}  # fmt: skip


def _mixed_gemm() -> Given:
    return {"x": bf16(5, 64), "w": ARRANGED.w2, "offsets": OFFSETS.clone(),
            "bias": normal(3, 128)}  # fmt: skip


def _fused_moe() -> Given:
    return {"x": bf16(5, 128), "experts": PACKED, "router_logits": normal(5, 3),
            "router": moe.Router(2, bias=normal(3)), "activation": moe.SwiGLU(),
            "scales": moe.Scales(positive(1), positive(1), torch.zeros(1))}  # fmt: skip


def _fused_mixed() -> Given:
    return {"x": bf16(5, 128), "experts": ARRANGED, "router_logits": normal(5, 3),
            "router": moe.Router(2)}  # fmt: skip


def _pack() -> Given:
    return {"w13": W13, "w2": W2, "fmt": "mxfp8", "granularity": 32}


def _weights() -> q8_0.Weights:
    return q8_0_reference.rounded(normal(4, 96), "soa")


def _matvec() -> Given:
    return {"weights": _weights(), "x": bf16(2, 96), "bias": bf16(4)}


def _swiglu() -> Given:
    given = _grouped_gemm()
    return {"x": given["x"], "w13": PACKED.w13, "offsets": given["offsets"], "form": moe.SwiGLU()}


def _admitting() -> Given:
    return {"self": kvcache.Manager(kvcache.gqa(1, 2, 64), kvcache.Sizes(8)), "name": "one",
            "prompt": [1, 2, 3], "salt": b"", "use_cache": True}  # fmt: skip


def _manager(sizes: kvcache.Sizes) -> kvcache.Manager:
    return kvcache.Manager(kvcache.gqa(2, 1, 8, window=4, windowed=(True, False)), sizes)


def _planning() -> Given:
    return {"layout": kvcache.gqa(1, 2, 64), "memory": 1 << 30, "mix": kvcache.Mix((100,))}


def _layout() -> Given:
    stream = kvcache.Stream("kv", plain("k", 1, 64), 1, 2)
    ring = kvcache.Ring("r", plain("k", 1, 64), 4, 1)
    return {"name": "l", "block_tokens": 8, "streams": (stream,), "rings": (ring,), "draft": 2}


def _integers() -> Given:
    return {"weights": _weights(), "x": q8_0_reference.quantise(normal(2, 96))}


BASES = {
    base.name: base
    for base in (
        Base("attention", fmha.attention, _attention, ("out",), frozenset({"q", "out"})),
        Base("attention of pages", fmha.attention, _packed),
        Base("decode", gqa_lowlatency.decode, _decode, ("out",), frozenset({"q", "out"})),
        Base("merge", fmha.merge, _merge),
        Base("append_pages", kvcache.append_pages, _pages, ("k_pages", "v_pages")),
        Base("append_pages in e4m3", kvcache.append_pages, _fp8_pages, ("k_pages", "v_pages")),
        Base("gather_pages", kvcache.gather_pages, _pages, ("k", "v")),
        Base("append_rows", kvcache.append_rows, _append_rows, ("first/0/pool",)),
        Base("append_swa", kvcache.append_swa, _append_swa, ("rows/pool",)),
        Base("gather", kvcache.gather, _gather, ("out",)),
        Base("gather of records", kvcache.gather, _dequantising, ("out",)),
        Base(
            "copy_slots", kvcache.copy_slots, _copy_slots, ("target",),
            frozenset({"source", "target"}),
        ),
        Base("checksum", kvcache.checksum, _checksum),
        Base("route", moe.route, _route),
        Base("route_tokens", moe.route_tokens, _route_tokens),
        Base("permutation", moe.permutation, _permutation),
        Base("combine", moe.combine, _combine),
        Base("moe.quantise", moe.quantise, _quantise),
        Base("grouped_gemm", moe.grouped_gemm, _grouped_gemm, ("amax",)),
        Base("grouped_gemm_swiglu", moe.grouped_gemm_swiglu, _swiglu),
        Base("mixed_gemm", moe.mixed_gemm, _mixed_gemm),
        Base("fused_moe", moe.fused_moe, _fused_moe, ("scales/h_amax",)),
        Base("fused_moe, arranged", moe.fused_moe, _fused_mixed),
        Base("pack", moe.pack, _pack),
        Base("arrange", moe.arrange, lambda: {"experts": MX, "activations": "e4m3"}),
        Base("unpack", moe.unpack, lambda: {"packed": PACKED}),
        Base("Manager", _manager, lambda: {"sizes": kvcache.Sizes(4, 2, checkpoints=1)}),
        Base("Layout", kvcache.Layout, _layout),
        Base("gqa", kvcache.gqa, lambda: {"layers": 2, "heads": 1, "head_dim": 8}),
        Base("Record", kvcache.Record, lambda: {"name": "r", "data_bytes": 16}),
        Base("Policy", kvcache.Policy, lambda: {"every": 2}),
        Base("Mix", kvcache.Mix, lambda: {"tokens": (100, 200)}),
        Base("plan", kvcache.plan, _planning),
        Base("admit", kvcache.Manager.admit, _admitting),
        Base("repack", q8_0.repack, lambda: {"weights": _weights(), "layout": "interleaved"}),
        Base("dequantise", q8_0.dequantise, lambda: {"weights": _weights()}),
        Base("q8_0.quantise", q8_0.quantise, lambda: {"x": bf16(2, 96)}),
        Base("matvec", q8_0.matvec, _matvec),
        Base("matvec of integers", q8_0.matvec, _integers),
    )
}  # fmt: skip
