"""The one definition of softmax attention, which every reference computes."""

from __future__ import annotations

import math

import pytest
import torch

import fmha.reference
import gqa_lowlatency.reference
from kernelkit.numerics.definition import Numbers, attend

ROWS, KEYS, HEADS, KV_HEADS, DIM = 3, 9, 4, 2, 16
FULL = torch.ones(ROWS, KEYS, dtype=torch.bool)


def tensors(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (ROWS, HEADS, DIM), (KEYS, KV_HEADS, DIM), (KEYS, KV_HEADS, DIM)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def one_row(q, k, v, head, row, numbers, factor):
    """(O, LSE) by a loop over the keys."""
    scores = []
    for key in range(KEYS):
        score = float(q[row, head] @ k[key, head // 2]) * factor
        if numbers.softcap:
            score = numbers.softcap * math.tanh(score / numbers.softcap)
        scores.append(score)
    logits = scores + ([] if numbers.sinks is None else [float(numbers.sinks[head])])
    top = max(logits)
    total = sum(math.exp(logit - top) for logit in logits)
    o = sum(math.exp(score - top) * v[key, head // 2] for key, score in enumerate(scores)) / total
    return o * (1.0 if numbers.v_scale is None else float(numbers.v_scale[head // 2])), (
        top + math.log(total)
    )


@pytest.mark.parametrize("softcap", [0.0, 1e-6, 4096.0])
@pytest.mark.parametrize("scale", [1e-12, 0.3, 1e12])
@pytest.mark.parametrize("sinks", [None, (-math.inf, 90.0, -3e38, 3e38)])
def test_rows_by_a_loop(softcap, scale, sinks):
    q, k, v = tensors()
    q_scale, k_scale = torch.tensor([1.0, -2.0, 0.0, 3e38]), torch.tensor([-0.5, 1e-30])
    v_scale = torch.tensor([-3.0, 1e30])
    sinks = None if sinks is None else torch.tensor(sinks, dtype=torch.float64)
    numbers = Numbers(scale, softcap, sinks, q_scale, k_scale, v_scale)
    found = attend(q, k, v, FULL, numbers)
    for head in range(HEADS):
        factor = scale * float(q_scale[head]) * float(k_scale[head // 2])
        for row in range(ROWS):
            o, lse = one_row(q, k, v, head, row, numbers, factor)
            torch.testing.assert_close(found.o[row, head], o, rtol=1e-9, atol=1e-12)
            assert float(found.lse[head, row]) == pytest.approx(lse, rel=1e-12, abs=1e-12)


def test_rows_without_keys_and_keys_that_nobody_sees():
    q, k, v = tensors()
    visible = FULL.clone()
    visible[0], visible[:, 4] = False, False
    k[4], v[4] = math.nan, math.nan
    found = attend(q, k, v, visible, Numbers())
    assert (found.o[0] == 0).all()
    assert (found.lse[:, 0] == -math.inf).all()
    assert found.o[1:].isfinite().all()
    sinks = torch.tensor([1.0, -math.inf, 3e38, -3e38])
    with_sinks = attend(q, k, v, visible, Numbers(sinks=sinks))
    assert torch.equal(with_sinks.lse[:, 0], sinks.double())


def test_both_references_are_the_definition():
    """The options are those that both families have; the last query is at the last key."""
    q, k, v = (tensor.unsqueeze(0) for tensor in tensors())
    options = {
        "causal": True, "scale": 0.7, "softcap": 3.0, "sinks": torch.tensor([1.0, -2.0, 9.0, 0.0]),
        "k_scale": torch.tensor([-2.0, 0.0]), "v_scale": torch.tensor([1e30, -1.0]),
    }  # fmt: skip
    numbers = Numbers(**{name: value for name, value in options.items() if name != "causal"})
    position = torch.arange(KEYS - ROWS, KEYS)[:, None]
    visible = torch.arange(KEYS) <= position
    exact = attend(q[0], k[0], v[0], visible, numbers)
    for reference in (fmha.reference, gqa_lowlatency.reference):
        found = reference.definition(q, k, v, **options)
        assert torch.equal(found.o[0], exact.o)
        assert torch.equal(found.lse[0], exact.lse)
