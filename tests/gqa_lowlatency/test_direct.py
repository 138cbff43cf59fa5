"""Plans: what a call compares, what moves with it, what a plan keeps."""

from __future__ import annotations

import ctypes
import gc
import weakref

import numpy as np
import pytest
import torch

from gqa_lowlatency import decode, decode_plan

BF16, E4M3, ARCH = torch.bfloat16, torch.float8_e4m3fn, {"arch": "sm_90a"}


def tensors(dtype=BF16):
    """q, k, v: 4 query heads on 2 KV heads, 2 entries of 40 keys."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 64, generator=generator) for n, h in ((1, 4), (40, 2), (40, 2)))
    return q.to(BF16), k.to(dtype), v.to(dtype)


def same(results, expected) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


REFUSED = {
    "shape": lambda q, k, v: ((q, k[:, :39], v[:, :39]), {}, "k is"),
    "strides": lambda q, k, v: ((q, k.repeat(1, 1, 1, 2)[..., :64], v), {}, "k is"),
    "dtype": lambda q, k, v: ((q.half(), k, v), {}, "q is"),
    "device": lambda q, k, v: ((q, k, v.to("meta")), {}, "v is"),
    "result": lambda q, k, v: ((q, k, v), {"out": q.float()}, "out is"),
    "statistics": lambda q, k, v: ((q, k, v), {"lse": torch.empty(2, 4)}, "lse is"),
    "lengths": lambda q, k, v: ((q, k, v), {"seq_lens": torch.ones(3).int()}, "lens is"),
    "no lengths": lambda q, k, v: ((q, k, v), {"seq_lens": None}, "5 tensors"),
    "pages": lambda q, k, v: ((q, k, v), {"page_table": torch.ones(2, 1)}, "7 tensors"),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_plan_refuses_what_it_was_not_made_for(mode, launched):
    """In every mode of torch, also where it looks closer since the mode is another."""
    inputs, lens = tensors(), torch.tensor([40, 7], dtype=torch.int32)
    plan = decode_plan(*inputs, seq_lens=lens)
    with mode():
        for _ in range(2):
            for name, change in REFUSED.items():
                step, given, words = change(*inputs)
                with pytest.raises(ValueError) as refused:
                    plan(*step, **{"seq_lens": lens} | given)
                assert words in str(refused.value), name
            plan(*inputs, seq_lens=lens)
    (compiled,) = launched
    assert len(compiled.calls) == 2


def test_addresses_are_those_of_the_call(launched):
    inputs, sinks = tensors(), torch.zeros(4)
    plan = decode_plan(*inputs, sinks=sinks, window=5, softcap=2.0)
    (compiled,) = launched
    others = [tensor.clone() for tensor in inputs]
    odd = torch.zeros(inputs[0].numel() + 1, dtype=BF16)[1:].view(inputs[0].shape)
    out, lse = plan(*inputs)
    for step in (inputs, others, others, inputs):
        for _ in range(2):
            with pytest.raises(ValueError, match="multiples of 16 bytes"):
                plan(odd, *others[1:], out=out, lse=lse)
        plan(*step, out=out, lse=lse)
        moving = [tensor.data_ptr() for tensor in (*step, out, lse, sinks)]
        assert compiled.calls[-1][:6] == moving
        assert compiled.calls[-1][8:] == [5, 0, 1, 0]
    assert len(compiled.calls) == 5


def test_workspace_belongs_to_the_plan(launched):
    """Several clusters of a KV head leave their sums there; it is not allocated at a call."""
    inputs = tensors()
    plan = decode_plan(*inputs, parts=2)
    gc.collect()
    junk = []
    for _ in range(3):
        plan(*inputs)
        junk.append([torch.ones(size) for size in (8, 16, 32, 64, 1024, 2112)])
    (compiled,) = launched
    (workspace,) = {tuple(call[5:7]) for call in compiled.calls}
    assert not {tensor.data_ptr() for step in junk for tensor in step} & {*workspace}
    counts = ctypes.c_int32.from_address(workspace[1])
    assert counts.value == 0


def test_a_plan_keeps_no_cache_alive(launched):
    q, *_ = tensors()
    memory = [np.zeros((2, 40, 2, 64), np.uint16) for _ in "kv"]
    alive = [weakref.ref(array) for array in memory]
    k, v = (torch.from_numpy(array).view(BF16) for array in memory)
    plan = decode_plan(q, k, v)
    plan(q, k, v)
    del memory, k, v
    gc.collect()
    assert [array() for array in alive] == [None, None]
    plan(*tensors())


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_scales_are_read_at_each_call(shape):
    """Also one number, of which the kernel reads a copy for each head."""
    inputs, scale = tensors(E4M3), torch.full(shape, 0.5)
    plan = decode_plan(*inputs, k_scale=scale, v_scale=2.0, **ARCH)
    for value in (0.5, 3.0):
        scale.fill_(value)
        expected = decode(*inputs, k_scale=value, v_scale=2.0, return_lse=True, **ARCH)
        assert same(plan(*inputs), expected), value


def test_a_broadcast_is_copied_at_each_call():
    """Its strides of 0 the DSL would take for constants."""
    q, k, v = tensors()
    pages = {"k": k.reshape(5, 16, 2, 64), "v": v.reshape(5, 16, 2, 64)}
    table, lens = torch.tensor([[3, 1, 4]], dtype=torch.int32), torch.tensor([40, 7]).int()
    plan = decode_plan(q, **pages, page_table=table.expand(2, 3), seq_lens=lens, **ARCH)
    for _ in range(2):
        given = {"page_table": table.expand(2, 3), "seq_lens": lens}
        expected = decode(q, **pages, **given, return_lse=True, **ARCH)
        assert same(plan(q, **pages, **given), expected)
        table.copy_(torch.tensor([[0, 4, 2]]))
