"""The reference against torch's own attention, and its rows without keys."""

from __future__ import annotations

import math

import pytest
import torch

from fmha import reference


def inputs(batch=2, sq=19, skv=33, heads=(4, 2), dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, sq, heads[0], 64), *[(batch, skv, heads[1], 64)] * 2)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def by_torch(q, k, v, visible):
    """Torch's softmax attention in fp64, heads repeated for each group."""
    group = q.shape[2] // k.shape[2]
    heads_first = [t.double().transpose(1, 2) for t in (q, k, v)]
    heads_first[1:] = [t.repeat_interleave(group, dim=1) for t in heads_first[1:]]
    out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=visible)
    return out.transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
def test_definition_is_softmax_attention(causal):
    q, k, v = inputs()
    visible = torch.ones(19, 33, dtype=torch.bool)
    if causal:
        visible = visible.tril(diagonal=33 - 19)
    ours = reference.definition(q, k, v, causal=causal)
    assert torch.allclose(ours.o, by_torch(q, k, v, visible), rtol=0, atol=1e-12)


def test_statistics_belong_to_the_scores():
    q, k, v = inputs(batch=1, heads=(1, 1))
    scores = torch.einsum("qd,kd->qk", q[0, :, 0].double(), k[0, :, 0].double()) / 8
    ours = reference.definition(q, k, v)
    assert torch.allclose(ours.lse[0, 0], torch.logsumexp(scores, dim=1))
    assert torch.allclose(ours.row_max[0, 0], scores.amax(dim=1))


def test_rows_past_a_length_do_not_count():
    q, k, v = inputs()
    short = reference.definition(q, k[:, :20], v[:, :20], causal=True)
    k[:, 20:], v[:, 20:] = math.nan, math.nan
    ours = reference.definition(q, k, v, causal=True, kv_lens=(20, 20))
    assert torch.equal(ours.o, short.o)
    assert torch.equal(ours.lse, short.lse)


def test_rows_without_keys_are_zero_and_minus_infinity():
    q, k, v = inputs(batch=1, sq=5, skv=3, heads=(1, 1))
    for attend in (reference.definition, reference.rounded):
        ours = attend(q, k, v, causal=True)  # rows 0 and 1 precede every key
        assert not ours.o[0, :2].any()
        assert torch.isneginf(ours.lse[0, 0, :2]).all()
        assert torch.isneginf(ours.row_max[0, 0, :2]).all()
        assert torch.isfinite(ours.lse[0, 0, 2:]).all()


def test_no_keys_at_all():
    q, k, v = inputs(skv=0)
    ours = reference.definition(q, k, v)
    assert ours.o.shape == q.shape
    assert not ours.o.any()
    assert torch.isneginf(ours.lse).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_points_cost_what_the_dtype_costs(dtype):
    q, k, v = inputs(dtype=dtype)
    exact, rounded = reference.definition(q, k, v), reference.rounded(q, k, v)
    error = (rounded.o.double() - exact.o).abs().max().item()
    epsilon = torch.finfo(dtype).eps
    assert rounded.o.dtype == dtype
    assert 0 < error <= 2 * epsilon * v.double().abs().max().item()
    assert (rounded.lse - exact.lse).abs().max() < 1e-5
