"""The combination in the emulator, bit for bit: sizes, dtypes, layouts, order, refusals."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernelkit.compile.compiler import compile_once
from moe import reference_routing
from moe.routing import combine
from moe.routing.config import CombineConfig, combine_columns
from moe.routing.launch import ARCHS
from tests.moe.routing_cases import DTYPES, Sum, check_combine, emulated, one_by_one

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

each_arch = pytest.mark.parametrize("arch", ARCHS)

CASES = [
    Sum(1, 8, 7168),
    Sum(2, 1, 8, "fp32", "bf16"),
    Sum(65, 4, 1032, "fp16", "fp32"),
    Sum(50, 3, 68, "fp32", "fp32"),
    Sum(10, 16, 256, "bf16", "bf16", weighted=False),
]
MATRIX = [
    *(Sum(9, top_k, 1544, seed=top_k) for top_k in (1, 2, 3, 6, 7, 12, 16)),
    *(Sum(tokens, 2, 128, "fp16", "fp16") for tokens in (1, 2, 127, 128, 129, 1000)),
    *(Sum(9, 6, 2880, *dtypes) for dtypes in product(DTYPES, repeat=2)),
]


@each_arch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_combine(case, arch):
    check_combine(case, arch)


@each_arch
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_combine_more(arch, case):
    check_combine(case, arch)


@each_arch
def test_a_cta_walks_over_a_token(arch, monkeypatch):
    """What happens with many tokens: one CTA each, whatever the hidden size."""
    monkeypatch.setattr("moe.routing.config.TOKENS_THAT_FILL", 3)
    assert combine_columns(3, 300) == 1
    check_combine(Sum(3, 8, 2400), arch)


def test_order_of_choices():
    """1 + 2 ** -30 - 1 is 0 in this order, and 2 ** -30 in others."""
    y = torch.tensor([[1.0], [2.0**-30], [-1.0]]).expand(3, 4).contiguous()
    weights = torch.ones(3, 3)
    orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2]], dtype=torch.int32)
    got = emulated(lambda: combine(y, weights, orders))
    assert torch.equal(got, torch.tensor([0.0, 2.0**-30, 0.0])[:, None].expand(3, 4))


def test_a_row_may_be_asked_for_twice():
    y = torch.arange(16.0).view(2, 8)
    rows = torch.tensor([1, 1, 0, 1], dtype=torch.int32)
    got = emulated(lambda: combine(y, torch.tensor([[1.0, 2.0], [0.5, 0.25]]), rows))
    assert torch.equal(got, torch.stack((3 * y[1], y[0] / 2 + y[1] / 4)))


@pytest.mark.parametrize("weighted", [True, False])
def test_slots_without_rows_add_nothing(weighted):
    """Whatever their weight; a token without any row gives zeros."""
    y, weights, rows = Sum(9, 5, 136, "bf16", "bf16", weighted).inputs()
    rows = rows.view(9, 5).clone()
    rows[torch.rand(9, 5, generator=torch.Generator().manual_seed(3)) < 0.6] = -1
    rows[4] = -1
    shares = (weights if weighted else torch.ones(9, 5)).masked_fill(rows < 0, 0.0)
    weights = weights.masked_fill(rows < 0, math.nan) if weighted else None
    got = emulated(lambda: combine(y, weights, rows))
    assert torch.equal(got, one_by_one(y, shares, rows.clamp(min=1)).bfloat16())
    assert not got[4].any()
    expected = reference_routing.combine(y, weights, rows).bfloat16()
    torch.testing.assert_close(got, expected)


def test_nan_and_inf_arrive():
    """Also those with a weight of 0, and in no other column or token."""
    y = torch.ones(4, 8)
    y[1, 3], y[2, 5] = math.nan, math.inf
    weights = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    got = emulated(lambda: combine(y, weights, torch.arange(4, dtype=torch.int32)))
    assert got.isnan().nonzero().tolist() == [[0, 3]]
    assert got.isinf().nonzero().tolist() == [[1, 5]]


def test_broadcast_weights():
    y, _, rows = Sum(5, 2, 64).inputs()
    weights = torch.tensor([[0.25, 0.5]])
    spread = emulated(lambda: combine(y, weights.expand(5, 2), rows))
    assert torch.equal(spread, emulated(lambda: combine(y, weights.repeat(5, 1), rows)))


def test_no_tokens(no_compile):
    rows = torch.empty(0, dtype=torch.int32)
    assert combine(torch.ones(3, 8), torch.empty(0, 2), rows).shape == (0, 8)
    assert combine(torch.empty(0, 8), torch.empty(0, 2), rows).shape == (0, 8)


@each_arch
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_sixteen_bytes_at_a_time(arch, out_dtype):
    """Beside the two tables of numbers; nothing is spilled."""
    config = CombineConfig(8, "bf16", out_dtype, weighted=True)
    ptx = compile_once(config, arch, "moe.routing.combine_kernel").ptx
    lines = [line.split() for line in ptx.splitlines() if ".global" in line]
    stores = {words[0] for words in lines if words[0].startswith("st.")}
    wide = [words for words in lines if words[0].startswith("ld.global.v")]
    assert stores <= {"st.global.v4.b32", "st.global.v2.b64"}
    assert {words[0] for words in wide} <= {"ld.global.v4.b32", "ld.global.v2.b64"}
    assert len(wide) == 8
    assert ".local" not in ptx


def test_tracers_see_shapes():
    with FakeTensorMode():
        y, rows = torch.empty(6, 64), torch.empty(3, 2, dtype=torch.int32)
        got = combine(y, None, rows, out_dtype=torch.bfloat16)
    assert (got.shape, got.dtype) == ((3, 64), torch.bfloat16)


Y, WEIGHTS, ROWS = torch.zeros(8, 64), torch.zeros(4, 2), torch.arange(8, dtype=torch.int32)
REFUSED = [
    ((Y.double(), WEIGHTS, ROWS), {}, NotImplementedError, "y is torch.float64"),
    ((Y, WEIGHTS, ROWS), {"out_dtype": torch.int8}, NotImplementedError, "out_dtype is torch.int8"),
    ((Y[0], WEIGHTS, ROWS), {}, ValueError, "rank 1"),
    ((Y, WEIGHTS.half(), ROWS), {}, ValueError, "weights is torch.float16"),
    ((Y, WEIGHTS, ROWS.long()), {}, ValueError, "row_of_slot is torch.int64"),
    ((Y, WEIGHTS, ROWS[:7]), {}, ValueError, "7 slots"),
    ((Y, None, ROWS), {}, ValueError, "rank 1"),
    ((Y, torch.zeros(4, 0), ROWS[:0]), {}, NotImplementedError, "top_k 0"),
    ((torch.zeros(8, 62), WEIGHTS, ROWS), {}, ValueError, "hidden size 62"),
    ((torch.zeros(8, 65)[:, 1:], WEIGHTS, ROWS), {}, ValueError, "y starts at address"),
    ((torch.zeros(8, 66)[:, :64], WEIGHTS, ROWS), {}, ValueError, "stride of 264 bytes"),
    ((Y[:7], WEIGHTS, ROWS), {}, ValueError, "values from 0 to 7, but y has rows 0 to 6"),
    ((Y, WEIGHTS, ROWS - 1), {"partial": False}, ValueError, "values from -1 to 6"),
    ((Y, WEIGHTS, ROWS - 2), {}, ValueError, "values from -2 to 5"),
    ((Y, WEIGHTS, ROWS), {"partial": 1}, TypeError, "partial is 1"),
    ((Y, WEIGHTS, ROWS), {"backend": "cuda"}, ValueError, "needs CUDA tensors"),
    ((Y, 1.0, ROWS), {}, TypeError, "weights is float"),
    ((Y.clone().requires_grad_(), WEIGHTS, ROWS), {}, NotImplementedError, "requires grad"),
]


@pytest.mark.parametrize(("given", "options", "error", "words"), REFUSED)
def test_refusals(no_compile, given, options, error, words):
    with pytest.raises(error, match=words):
        combine(*given, **options)
