"""The reference compared with a sum over single keys, and its rounding points."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gqa_lowlatency import reference
from tests.fmha.test_reference import by_key as attention_by_key

E4M3 = torch.float8_e4m3fn


def inputs(batch=2, tokens=3, keys=11, heads=(4, 2), dim=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, tokens, heads[0], dim), *(((batch, keys, heads[1], dim),) * 2))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def by_key(q, k, v, b, h, t, causal=True, window=None, **options):
    """(o, lse) of one row of the newest queries, summed over its visible keys one by one."""
    if "kv_lens" in options:
        options["kv_lens"] = options["kv_lens"].tolist()
    k, v = (
        tensor.double() * options.pop(name, torch.ones(1)).double()[:, None]
        for tensor, name in ((k, "k_scale"), (v, "v_scale"))
    )
    given = options | {"causal": causal, "window": (window, None)}
    return attention_by_key(q, k, v, b, h, t, **given)[:2]


SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0])
OPTIONS = {
    "causal": {},
    "full": {"causal": False},
    "scale": {"scale": 0.3},
    "window": {"window": 3},
    "window, full": {"window": 2, "causal": False},
    "own key": {"window": 0},
    "sink tokens": {"window": 2, "sink_tokens": 3},
    "more sink tokens than keys": {"window": 1, "sink_tokens": 30, "causal": False},
    "sinks": {"sinks": SINKS},
    "softcap": {"softcap": 2.0, "scale": 1.0},
    "lengths": {"kv_lens": torch.tensor([7, 2])},
    "no keys, sinks": {"kv_lens": torch.tensor([0, 1]), "sinks": SINKS},
    "scales": {"k_scale": torch.tensor([0.5, 2.0]), "v_scale": torch.tensor([3.0])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_key_by_key(options):
    q, k, v = inputs()
    ours = reference.definition(q, k, v, **options)
    for b in range(2):
        for h in range(4):
            for t in range(3):
                o, lse = by_key(q, k, v, b, h, t, **options)
                assert torch.allclose(ours.o[b, t, h], o, rtol=0, atol=1e-12), (b, h, t)
                assert ours.lse[b, h, t].item() == pytest.approx(lse, abs=1e-12)


@pytest.mark.parametrize("attend", [reference.definition, reference.rounded])
def test_pages_and_flat_queries_are_the_same_problem(attend):
    q, k, v = inputs(tokens=1)
    lens = torch.tensor([11, 6], dtype=torch.int32)
    dense = attend(q, k, v, kv_lens=lens)
    pool_k, pool_v = (torch.full((6, 4, 2, 16), math.nan).to(k.dtype) for _ in range(2))
    table = torch.tensor([[4, 2, 0, -1], [5, 1, 99, 1 << 30]])
    for entry, length in enumerate(lens.tolist()):
        for index, start in enumerate(range(0, length, 4)):
            rows = slice(start, min(start + 4, length))
            for pool, cache in ((pool_k, k), (pool_v, v)):
                pool[table[entry, index], : rows.stop - start] = cache[entry, rows]
    paged = attend(q[:, 0], pool_k, pool_v, kv_lens=lens, page_table=table)
    assert torch.equal(paged.o, dense.o[:, 0])
    assert torch.equal(paged.lse, dense.lse[..., 0])


def test_what_no_token_sees_does_not_count():
    q, k, v = inputs()
    options = {"window": 2, "sink_tokens": 1, "kv_lens": torch.tensor([9, 8])}
    expected = reference.definition(q, k, v, **options)
    for entry, length in enumerate((9, 8)):
        for cache in (k, v):
            cache[entry, 1 : length - 3 - 2] = cache[entry, length:] = math.nan
    ours = reference.definition(q, k, v, **options)
    assert torch.equal(ours.o, expected.o)
    assert torch.equal(ours.lse, expected.lse)


def test_rounding_points_cost_what_the_dtype_costs():
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = inputs(keys=64, dtype=dtype)
        exact, rounded = (f(q, k, v) for f in (reference.definition, reference.rounded))
        error = (rounded.o.double() - exact.o).abs().max().item()
        assert rounded.o.dtype == dtype
        assert 0 < error <= 2 * torch.finfo(dtype).eps * v.double().abs().max().item()
        assert (rounded.lse - exact.lse).abs().max() < 1e-5
    wide = reference.rounded(q, k, v, out_dtype=torch.float32)
    assert wide.o.dtype == torch.float32


def test_products_of_e4m3_round_q_and_p():
    """On sm_90a P is fp16; on sm_100a P and Q have 3 bits of mantissa."""
    q, k, v = inputs(keys=64)
    k, v = k.to(E4M3), v.to(E4M3)
    exact = reference.definition(q, k, v)

    def error(arch):
        return (reference.rounded(q, k, v, arch=arch).o.double() - exact.o).abs().max().item()

    assert error("sm_90a") < 0.02
    assert 2 * error("sm_90a") < error("sm_100a") < 0.3
    one = torch.tensor([0.5, 1.0])  # 2 ** 8 of them are exact in e4m3
    assert torch.equal(reference._rounded_weights(one, E4M3), one)


def test_ties_of_q_fall_as_the_kernel_multiplies():
    """Let top be 49 / 16: 448 / top is 1024 / 7, so that sevenths are half-way between two e4m3
    numbers. The rounded factor, not the quotient, decides which one results."""
    row = torch.arange(-784, 785, 7) / 256.0
    factor = np.float32(448) * (np.float32(1) / np.float32(49 / 16))
    expected = torch.from_numpy(row.numpy() * factor).to(E4M3).double() * (49 / 16 / 448)
    found = reference._quantised(row[None].bfloat16()).double()[0]
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    divided = (row / (row.amax() / 448)).to(E4M3).double() * (49 / 16 / 448)
    assert not torch.allclose(divided, expected, rtol=1e-2, atol=0)
    assert not reference._quantised(torch.full((1, 8), 2.0**-110).bfloat16()).any()
