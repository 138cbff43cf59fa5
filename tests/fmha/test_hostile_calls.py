"""Invalid calls of attention and merge: an error that names the argument, or the right result."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fmha import AttentionConfig, attention, attention_plan, merge, reference, warmup
from gqa_lowlatency import DecodeConfig
from tests.support.hostile.calls import freed, hostile, refused, sharing

INT = torch.int32
Q, KV = torch.zeros(2, 8, 4, 64).bfloat16(), torch.zeros(2, 32, 2, 64).bfloat16()
STARTS = torch.tensor([0, 5, 8], dtype=INT)
PACKED = Q.flatten(0, 1)[:8]
COS = torch.ones(32, 8)
O, LSE = torch.zeros(1, 3, 2, 64).bfloat16(), torch.zeros(1, 2, 3)  # noqa: E741
PART = (O, LSE)
WIDE, QKV = torch.zeros(2, 9, 4, 64).bfloat16(), torch.zeros(2, 32, 2, 128).bfloat16()


def call(q=Q, k=KV, v=KV, **options):
    return lambda: attention(q, k, v, **options)


def packed(**options):
    return lambda: attention(PACKED, KV, KV, **{"cu_seqlens_q": STARTS} | options)


def merged(parts, **options):
    return lambda: merge(parts, **options)


def warming(**options):
    return lambda: warmup(Q, KV, KV, **{"batches": [1], "lengths": [8]} | options)


def in_dual_numbers():
    return torch.func.jvp(lambda q: attention(q, KV, KV), (Q,), (Q,))


CALLS = [
    hostile(call(q=None), "q is NoneType"),
    hostile(call(k=np.zeros(3)), "k is ndarray"),
    hostile(call(v="v"), "v is str"),
    hostile(call(v=KV.to("meta")), "different devices"),
    hostile(call(q_offset=torch.zeros(2, dtype=INT, device="meta")), "different devices"),
    hostile(call(q=Q[0]), r"q has shape \(8, 4, 64\)"),
    hostile(call(k=KV[..., :0], q=Q[..., :0]), "head_dim 0"),
    hostile(call(q=Q[:, :, :0]), "0 query and 2 KV heads"),
    hostile(call(q=Q[:, :, :3]), "3 query heads are not a multiple"),
    hostile(call(q=Q.double(), k=KV.double(), v=KV.double()), "torch.float64"),
    hostile(call(k=KV.half()), "differ in dtype"),
    hostile(call(q=torch.zeros(2, 8, 4, 128).bfloat16()[..., ::2]), "last stride 2"),
    hostile(call(k=KV[:, :1].expand(2, 32, 2, 64)), "stride of 0"),
    hostile(call(causal=None), "causal is None"),
    hostile(call(causal=np.bool_(False)), "causal is np.False_"),
    hostile(call(causal=True, window=(3, 5)), r"causal=True conflicts with window=\(3, 5\)"),
    hostile(call(window=(-2, 0)), "window left -2"),
    hostile(call(window=(1.5, 0)), "window_left is 1.5"),
    hostile(call(window=True), "window True"),
    hostile(call(sink_tokens=2), "sink_tokens 2 without a left window"),
    hostile(call(softcap=-1.0), "softcap -1.0"),
    hostile(call(softcap="2"), "softcap is '2'"),
    hostile(call(scale=math.nan), "scale nan"),
    hostile(call(scale=np.float32(math.nan)), "scale nan"),
    hostile(call(scale=np.ones(1)), "scale is array"),
    hostile(call(k=KV.to(torch.float8_e4m3fn), v=KV.to(torch.float8_e4m3fn), k_scale="1"),
            "k_scale is '1', expected a number or torch.Tensor"),
    hostile(call(sinks=[0.0] * 4), "sinks is list"),
    hostile(call(sinks=torch.tensor([0.0, 1.0, math.inf, 2.0])), "sinks inf of head 2"),
    hostile(call(sinks=torch.full((4,), math.nan)), "sinks nan of head 0"),
    hostile(call(sinks=torch.zeros(4, dtype=INT)), "sinks is torch.int32"),
    hostile(call(q_offset=1.0), "q_offset is float"),
    hostile(call(q_offset=True), "q_offset is bool"),
    hostile(call(q_offset=1 << 40), "q_offset 1099511627776"),
    hostile(call(q_offset=torch.zeros(3, dtype=INT)), r"q_offset is torch.int32 \(3,\)"),
    hostile(call(q_offset=np.int64(1 << 40)), "q_offset 1099511627776", name="q_offset of numpy"),
    hostile(call(kv_lens=torch.tensor([33, 1], dtype=INT)), "kv_lens 33 of entry 0"),
    hostile(call(kv_lens=(1, 2)), "kv_lens is tuple"),
    hostile(packed(cu_seqlens_q=STARTS.long()), "cu_seqlens_q is torch.int64"),
    hostile(packed(cu_seqlens_q=STARTS.flip(0)), r"cu_seqlens_q \[8, 5, 0\]"),
    hostile(packed(cu_seqlens_q=STARTS[:0]), "cu_seqlens_q is empty"),
    hostile(packed(cu_seqlens_q=STARTS[0]), "cu_seqlens_q is torch.int32"),
    hostile(packed(max_seqlen_q=4), "max_seqlen_q 4, but an entry has 5"),
    hostile(packed(max_seqlen_q=-1), "max_seqlen_q -1"),
    hostile(packed(max_seqlen_q="5"), "max_seqlen_q is '5'"),
    hostile(call(max_seqlen_q=8), "max_seqlen_q 8 without"),
    hostile(call(page_table=torch.zeros(2, 1, dtype=INT)), "pages|page_table without"),
    hostile(call(rope=COS), "rope is Tensor"),
    hostile(call(rope=(COS, None)), "rope has two tables"),
    hostile(call(rope=(COS, COS[:3])), "sin is torch.float32"),
    hostile(call(rope=(COS[:20], COS[:20])), "have positions 24 to 31.* without q_offset"),
    hostile(call(normalize="no"), "normalize is 'no'"),
    hostile(call(return_lse=None), "return_lse is None"),
    hostile(call(out=Q[:1].clone()), "out has shape"),
    hostile(call(out=[0]), "out is list"),
    hostile(call(out_dtype=torch.float64), "out_dtype torch.float64"),
    hostile(call(pack_heads=1), "pack_heads is 1"),
    hostile(call(pdl=None), "pdl is None"),
    hostile(call(backend=1), "backend is 1"),
    hostile(call(arch="sm_75"), "arch 'sm_75'"),
    hostile(call(config=AttentionConfig(k_scale="yes")), "config.k_scale is 'yes'"),
    hostile(call(config=AttentionConfig(head_dim=1 << 70)), "config.head_dim 1180591620717411303"),
    hostile(call(config=DecodeConfig()), "config is DecodeConfig"),
    hostile(call(config=AttentionConfig(k_stages=-1)), "k_stages -1"),
    hostile(call(config=AttentionConfig(schedule="fast")), "schedule 'fast'"),
    hostile(call(config=AttentionConfig(rescale_log2=math.nan)), "rescale_log2 nan"),
    hostile(call(dropout_p=0.1), "no argument dropout_p"),
    hostile(call(q=Q.to_sparse()), "q is a sparse_coo tensor"),
    hostile(call(v=KV[..., :0]), "v_head_dim 0"),
    hostile(call(k=freed(KV)), "k reaches to byte 16384 of its storage, which has 0"),
    hostile(call(kv_lens=freed(STARTS[:2])), "kv_lens reaches to byte 8"),
    hostile(call(q=None, q_offset=3), "q is NoneType", name="no q with an offset"),
    hostile(call(q_offset=3, cu_seqlens_q=5), "cu_seqlens_q is int"),
    hostile(call(rope=(None, None)), r"rope is \(None, None\)"),
    hostile(call(scale=10**400), "scale is an int of 1329 bits"),
    hostile(call(out=sharing(Q)), "elements that share memory"),
    hostile(call(q=WIDE[:, :8], out=WIDE[:, 1:]), "out shares memory with q"),
    hostile(call(k=QKV[..., :64], v=QKV[..., 64:], out=QKV.view(2, 32, 4, 64)[:, :8]),
            "out shares memory with k", name="out between rows of k"),
    hostile(call(kv_lens=WIDE.view(INT).view(-1)[:2], out=WIDE[:, :8]), "shares .* with kv_lens"),
    hostile(in_dual_numbers, "q has a tangent"),
    hostile(lambda: attention_plan(Q, KV.to_sparse(), KV), "k is a sparse_coo tensor"),
    hostile(lambda: attention_plan(Q, KV, torch._neg_view(KV)), "v is a lazily negated"),
    hostile(warming(batches="12"), "batches is str"),
    hostile(warming(batches=[1, True]), r"batches\[1\] is True"),
    hostile(warming(batches=3), "batches is int"),
    hostile(warming(lengths=[-1]), r"lengths\[0\] -1"),
    hostile(warming(lengths=[1 << 40]), r"lengths\[0\] 1099511627776"),
    hostile(warming(progress="yes"), "progress is str"),
    hostile(lambda: attention_plan(Q, KV, KV, out=Q), "does not accept out"),
    hostile(merged(None), "parts is NoneType"),
    hostile(merged([]), "0 parts"),
    hostile(merged([None]), r"parts\[0\] is NoneType"),
    hostile(merged([(O,)]), r"parts\[0\] has 1 tensors"),
    hostile(merged([(O, None)]), r"parts\[0\] lse is NoneType|parts\[0\].* is NoneType"),
    hostile(merged([PART, (O.to("meta"), LSE)]), "different devices", name="a part elsewhere"),
    hostile(merged([PART, (O[:, :2], LSE)]), r"parts\[1\]|shape"),
    hostile(merged([PART], sinks=torch.zeros(3)), "sinks is"),
    hostile(merged([PART], sinks=torch.tensor([0.0, math.nan])), "sinks nan of head 1"),
    hostile(merged([PART, (freed(O), LSE)]), r"o\[1\] reaches to byte"),
    hostile(merged([PART], out_dtype=torch.int8), "out_dtype torch.int8"),
    hostile(merged([PART], return_lse=1), "return_lse is 1"),
]  # fmt: skip


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize(("attempt", "words"), CALLS)
def test_a_named_error(attempt, words):
    refused(attempt, words)


@pytest.mark.usefixtures("no_compile")
def test_an_output_over_the_values_is_refused():
    memory = torch.zeros(1, 32, 2, 64).bfloat16()
    refused(lambda: attention(memory[:, :4], memory, memory.clone(), out=memory[:, 8:12]),
            "out shares memory with k")  # fmt: skip


def test_no_queries_and_no_keys_are_no_error():
    assert attention(Q[:, :0], KV, KV).shape == (2, 0, 4, 64)
    o, lse = attention(Q, KV[:, :0], KV[:, :0], return_lse=True)
    assert not o.any()
    assert lse.isneginf().all()


def test_an_offset_of_zero_is_what_scaled_dot_product_attention_calls_causal():
    """The first query is at the first key; by default the last query is at the last key."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 5, 1, 64), torch.randn(1, 12, 1, 64), torch.randn(1, 12, 1, 64)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.double().transpose(1, 2) for tensor in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    ours = reference.definition(q, k, v, causal=True, q_offset=0)
    assert torch.allclose(ours.o, theirs, atol=1e-12)
    assert not torch.allclose(reference.definition(q, k, v, causal=True).o, theirs)
    filled = reference.definition(q, k, v, causal=True, kv_lens=[5])
    assert torch.allclose(filled.o, theirs, atol=1e-12)
