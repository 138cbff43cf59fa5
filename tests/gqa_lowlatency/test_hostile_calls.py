"""Invalid calls of decode: an error that names the argument, or the right result."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gqa_lowlatency import DecodeConfig, decode, decode_plan, reference, warmup
from tests.support.hostile.calls import freed, hostile, refused, sharing

INT = torch.int32
Q, KV = torch.zeros(2, 1, 8, 64).bfloat16(), torch.zeros(2, 64, 2, 64).bfloat16()
FP8 = KV.to(torch.float8_e4m3fn)
LENGTHS, TABLE = torch.tensor([10, 64], dtype=INT), torch.tensor([[0, 1], [1, 0]], dtype=INT)
ONES, WIDE = torch.ones(8), torch.zeros(2, 2, 8, 64).bfloat16()


def with_sink(sink: float) -> torch.Tensor:
    return torch.cat([ONES[:7], torch.tensor([sink])])


def call(q=Q, k=KV, v=KV, **options):
    return lambda: decode(q, k, v, **options)


CALLS = [
    hostile(call(q=None), "q is NoneType"),
    hostile(call(k=[1.0]), "k is list"),
    hostile(call(v=np.zeros(3)), "v is ndarray"),
    hostile(call(q=Q.to("meta")), "different devices"),
    hostile(call(kv_lens=LENGTHS.to("meta")), "different devices"),
    hostile(call(sinks=ONES.to("meta")), "different devices", name="sinks elsewhere"),
    hostile(call(q=Q[0, 0]), r"q has shape \(8, 64\)"),
    hostile(call(q=torch.zeros(()).bfloat16()), r"q has shape \(\)"),
    hostile(call(q=Q[..., :0], k=KV[..., :0], v=KV[..., :0]), "head_dim 0"),
    hostile(call(q=Q[:, :0]), "0 query tokens"),
    hostile(call(q=Q[:, :, :0]), "0 query and 2 KV heads"),
    hostile(call(q=Q.float()), "torch.float32 of q"),
    hostile(call(q=torch.zeros(2, 1, 8, 128).bfloat16()[..., ::2]), "last stride 2"),
    hostile(call(k=torch.zeros(1, 64, 2, 64).bfloat16().expand(2, 64, 2, 64)), "stride of 0"),
    hostile(call(kv_lens=[10, 64]), "kv_lens is list"),
    hostile(call(kv_lens=LENGTHS.long()), "kv_lens is torch.int64"),
    hostile(call(kv_lens=torch.tensor([-1, 3], dtype=INT)), "kv_lens -1 of entry 0"),
    hostile(call(kv_lens=torch.tensor([1, 65], dtype=INT)), "kv_lens 65 of entry 1"),
    hostile(call(kv_lens=torch.zeros(0, dtype=INT)), r"kv_lens is torch.int32 \(0,\)"),
    hostile(call(page_table=TABLE), "page_table without kv_lens"),
    hostile(call(page_table=TABLE + 1, kv_lens=LENGTHS), "page_table .* of entry"),
    hostile(call(max_kv_len=64.0, kv_lens=LENGTHS), "max_kv_len is 64.0"),
    hostile(call(max_kv_len=True, kv_lens=LENGTHS), "max_kv_len is True"),
    hostile(call(max_kv_len=1 << 70, kv_lens=LENGTHS), "max_kv_len 1180591620717411303424"),
    hostile(call(max_kv_len=np.int64(65), kv_lens=LENGTHS), "max_kv_len 65: from 0"),
    hostile(call(causal=1), "causal is 1"),
    hostile(call(causal=np.bool_(True)), "causal is np.True_"),
    hostile(call(window="12"), "window '12'"),
    hostile(call(window=-2), "window left -2"),
    hostile(call(window=(1, 2, 3)), "window"),
    hostile(call(window=math.nan), "window nan"),
    hostile(call(window=1 << 70), "window_left 1180591620717411303424"),
    hostile(call(sink_tokens=-1, window=3), "sink_tokens -1"),
    hostile(call(softcap=math.inf), "softcap inf"),
    hostile(call(softcap=math.nan), "softcap nan"),
    hostile(call(scale=0.0), "scale 0.0"),
    hostile(call(scale=-1.0), "scale -1.0"),
    hostile(call(scale="1"), "scale is '1'"),
    hostile(call(scale=torch.ones(())), "scale is Tensor"),
    hostile(call(sinks=ONES[:3]), r"sinks is torch.float32 \(3,\)"),
    hostile(call(sinks=with_sink(math.inf)), "sinks inf of head 7: below \\+inf"),
    hostile(call(sinks=with_sink(math.nan)), "sinks nan of head 7"),
    hostile(call(k_scale=2.0), "k_scale with torch.bfloat16: only e4m3"),
    hostile(call(k=FP8, v=FP8, k_scale=math.nan), "k_scale .*finite"),
    hostile(call(k=FP8, v=FP8, v_scale=math.inf), "v_scale .*finite"),
    hostile(call(k=FP8, v=FP8, v_scale=True), "v_scale is True|v_scale is bool"),
    hostile(call(k=FP8), "k torch.float8_e4m3fn .* differ"),
    hostile(call(return_lse="yes"), "return_lse is 'yes'"),
    hostile(call(return_lse=ONES), "return_lse is tensor"),
    hostile(call(out=Q[:1].clone()), "out has shape"),
    hostile(call(out=Q.float(), out_dtype=torch.float16), "out is torch.float32"),
    hostile(call(q=KV[:, :1].repeat(1, 1, 4, 1), out=KV[:, :1].repeat(1, 1, 4, 1).half(),
                 out_dtype="fp16"), "out_dtype is 'fp16'"),
    hostile(call(out_dtype="bf16"), "out_dtype is 'bf16'"),
    hostile(call(out_dtype=torch.int8), "out_dtype torch.int8"),
    hostile(call(pdl=1), "pdl is 1"),
    hostile(call(parts=65), "65 parts"),
    hostile(call(parts=-1), "-1 parts"),
    hostile(call(backend=None), "backend is None"),
    hostile(call(backend="cpu"), "backend 'cpu'"),
    hostile(call(arch="sm_75"), "arch 'sm_75'"),
    hostile(call(arch=90), "arch is 90"),
    hostile(call(config=DecodeConfig(group="8")), "config.group is '8'"),
    hostile(call(config=DecodeConfig(stages=[3])), r"config.stages is \[3\]"),
    hostile(call(config={"stages": 3}), "config is dict"),
    hostile(call(config=DecodeConfig(warps=5), arch="sm_90a"), "warps 5"),
    hostile(call(config=DecodeConfig(warps=5), arch="sm_100a"), "warps 5", name="warps 5 sm_100a"),
    hostile(call(config=DecodeConfig(warps=8), arch="sm_100a"), "warps 8 on sm_100a"),
    hostile(call(config=DecodeConfig(step=8), arch="sm_90a"), "step 8"),
    hostile(call(config=DecodeConfig(step=32), arch="sm_100a"), "step 32 on sm_100a"),
    hostile(call(config=DecodeConfig(cluster=3)), "cluster 3"),
    hostile(call(k=FP8, v=FP8, k_scale=1e39), "k_scale 1e.39"),
    hostile(call(k=None, k_scale=1.0), "k is NoneType"),
    hostile(call(kv_lens=freed(LENGTHS)), "kv_lens reaches to byte 8"),
    hostile(call(k=FP8, v=FP8, k_scale=freed(ONES[:2])), "k_scale reaches to byte 8"),
    hostile(call(sinks=ONES.to_sparse()), "sinks is a sparse_coo tensor"),
    hostile(call(out=sharing(Q)), "elements that share memory"),
    hostile(call(kv_lens=WIDE.view(INT).view(-1)[:2], out=WIDE[:, :1]), "shares .* with kv_lens"),
    hostile(lambda: warmup(Q, KV, KV, batches=[1.5], lengths=[8]), r"batches\[0\] is 1.5"),
    hostile(lambda: warmup(Q, KV, KV, batches=[1], lengths=None), "lengths is NoneType"),
    hostile(call(seqlens=LENGTHS), "no argument seqlens"),
    hostile(lambda: decode_plan(Q, KV, KV, return_lse=True), "does not accept return_lse"),
    hostile(lambda: decode_plan(Q, KV, KV, kv_len=LENGTHS), "no argument kv_len"),
]  # fmt: skip


@pytest.mark.usefixtures("no_compile")
@pytest.mark.parametrize(("attempt", "words"), CALLS)
def test_a_named_error(attempt, words):
    refused(attempt, words)


@pytest.mark.usefixtures("no_compile")
def test_an_output_over_the_keys_is_refused_and_one_beside_them_is_not():
    memory = torch.zeros(3, 1, 64, 2, 64).bfloat16()
    q = memory[2].view(1, 64, 2, 64)[:, :1]
    for name, out in (("k", memory[0, :, :1]), ("v", memory[1, :, 63:])):
        refused(lambda out=out: decode(q, memory[0], memory[1], out=out), f"out shares .*{name}")


def test_no_keys_at_all_are_no_error():
    """Zero sizes: O = 0 and LSE = -inf, without a launch."""
    o, lse = decode(Q, KV[:, :0], KV[:, :0], return_lse=True)
    assert not o.any()
    assert lse.isneginf().all()
    assert decode(Q[:0], KV[:0], KV[:0]).shape == (0, 1, 8, 64)


def test_without_lengths_the_last_token_stands_at_the_end_of_the_cache():
    """A call with and one without lengths show why a partly filled cache needs them."""
    torch.manual_seed(0)
    k = torch.randn(1, 64, 1, 16).bfloat16()
    q = torch.randn(1, 2, 1, 16).bfloat16()
    filled = reference.definition(q, k, k, kv_lens=[10])
    assert torch.equal(filled.o, reference.definition(q, k[:, :10], k[:, :10]).o)
    assert not torch.allclose(filled.o, reference.definition(q, k, k).o)
