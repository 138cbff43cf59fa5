"""`attention` refuses bad input before anything compiles, and answers empty problems without a
kernel.
"""

from __future__ import annotations

import pytest
import torch

from fmha import AttentionConfig, attention, attention_plan
from tests.support import attentions
from tests.support.attentions import BF16, INT, pages, tensors

SINKS = torch.zeros(4)


def starts(*values, side="q"):
    return {f"cu_seqlens_{side}": torch.tensor(values, dtype=INT)}


def rope(positions=8, pairs=4):
    return {"rope": (torch.zeros(positions, pairs),) * 2}


PACKED_Q = tensors((8, 4, 64))
PACKED_K = tensors(kv_shape=(8, 2, 64))

REFUSED = attentions.REFUSED | {
    "rank": (PACKED_Q, {}, ValueError, "rank 3"),
    "rank of packed": (tensors(), starts(0, 8), ValueError, "[T, Hq, D]"),
    "rank of packed keys": (tensors(), starts(0, 8, side="k"), ValueError, "[Tk, Hkv, D]"),
    "dtype mix": ((tensors()[0], *tensors(dtype=torch.float16)[1:]), {}, TypeError, "float16"),
    "v head_dim": (
        (*tensors()[:2], torch.zeros(1, 8, 2, 40, dtype=BF16)),
        {}, NotImplementedError, "v_head_dim 40",
    ),
    "config": (tensors(), {"config": AttentionConfig(k_stages=99)}, ValueError, "232448"),
    "causal and right": (tensors(), {"causal": True, "window": (3, 2)}, ValueError, "=(3, 2)"),
    "sinks raw": (tensors(), {"sinks": SINKS, "normalize": False}, ValueError, "a raw O has none"),
    "offset type": (tensors(), {"q_offset": 1.5}, TypeError, "q_offset is float"),
    "offset range": (tensors(), {"q_offset": 1 << 29}, ValueError, "536870911"),
    "offset table": (
        tensors(), {"q_offset": torch.tensor([-(1 << 30)], dtype=INT)},
        ValueError, "536870911",
    ),
    "offset of no entry": (
        PACKED_Q, {"cu_seqlens_q": torch.zeros(0, dtype=INT), "q_offset": 3},
        ValueError, "is empty",
    ),
    "offset of a number": (
        (torch.tensor(0.0), *tensors()[1:]), {"q_offset": 3}, ValueError, "rank 0",
    ),
    "offset shape": (tensors(), {"q_offset": torch.zeros(3, dtype=INT)}, ValueError, "(3,)"),
    "starts dtype": (
        PACKED_Q, {"cu_seqlens_q": torch.tensor([0, 8])}, ValueError, "cu_seqlens_q is torch.int64",
    ),
    "no starts": (PACKED_Q, {"cu_seqlens_q": torch.zeros(0, dtype=INT)}, ValueError, "is empty"),
    "starts begin": (PACKED_Q, starts(1, 8), ValueError, "[1, 8]: not ascending from 0"),
    "starts fall": (PACKED_Q, starts(0, 5, 3, 8), ValueError, "batch 3"),
    "starts of keys fall": (PACKED_K, starts(0, 9, side="k"), ValueError, "to 8, the packed"),
    "starts disagree": (PACKED_K, starts(0, 4, 8, side="k"), ValueError, "expected torch.int32 (2"),
    "longest too short": (
        PACKED_Q, {"max_seqlen_q": 7, **starts(0, 8)}, ValueError, "an entry has 8 queries",
    ),
    "longest alone": (tensors(), {"max_seqlen_q": 8}, ValueError, "without cu_seqlens_q"),
    "pages and starts": (
        pages([0])[0], pages([0])[1] | starts(0, 8, side="k"), ValueError, "Pass one",
    ),
    "rope type": (tensors(), {"rope": SINKS}, TypeError, "rope is Tensor"),
    "rope tables": (tensors(), {"rope": (SINKS, SINKS)}, ValueError, "(any, any)"),
    "rope shapes": (
        tensors(), {"rope": (torch.zeros(8, 4), torch.zeros(8, 2))}, ValueError, "(8, 2)",
    ),
    "rope dim": (tensors(), rope(pairs=48), ValueError, "rope_dim 96"),
    "rope positions": (tensors(), rope(positions=7), ValueError, "tables end at 6"),
    "rope before the table": (tensors(), {"q_offset": -1, **rope()}, ValueError, "positions -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name, no_compile):
    attentions.check_refused(REFUSED[name], attention, attention_plan)


EMPTY = attentions.EMPTY | {
    "no query": (tensors((1, 0, 4, 64)), {}),
    "no packed query": (tensors((0, 4, 64)), starts(0, 0)),
    "no packed entry": (tensors((0, 4, 64), (0, 8, 2, 64)), starts(0)),
    "no packed key": (tensors(kv_shape=(0, 2, 64)), starts(0, 0, side="k")),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_empty_problems_need_no_kernel(name, no_compile):
    (q, k, v), options = EMPTY[name]
    out = torch.ones_like(q)
    o, lse = attention(q, k, v, return_lse=True, out=out, **options)
    assert o is out
    assert not o.any()
    assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
    assert torch.isneginf(lse).all()
    raw, _, row_max = attention(q, k, v, normalize=False, **options)
    assert raw.dtype == torch.float32
    assert torch.isneginf(row_max).all()
    sinks = torch.tensor([1.5, -2.0, 0.0, 3.0])
    _, with_sink = attention(q, k, v, return_lse=True, sinks=sinks, **options)
    assert torch.equal(with_sink, sinks[:, None].expand_as(lse))


def test_empty_results_have_the_columns_of_v(no_compile):
    shapes = ((1, 0, 2, 192), (1, 8, 2, 192), (1, 8, 2, 128))
    q, k, v = (torch.zeros(shape, dtype=BF16) for shape in shapes)
    assert attention(q, k, v).shape == (1, 0, 2, 128)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert attention(q, k, v, out_dtype=dtype).dtype == dtype
        assert attention(q, k, v, out_dtype=dtype, normalize=False)[0].dtype == dtype


def test_results_come_in_the_promised_number():
    q, k, v = tensors((1, 0, 4, 64))
    assert isinstance(attention(q, k, v), torch.Tensor)
    assert len(attention(q, k, v, return_lse=True)) == 2
    assert len(attention(q, k, v, normalize=False)) == 3


def test_entries_may_share_a_page_table():
    """A broadcast row has stride 0, which the DSL would take for a constant of the kernel."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 2, 64, generator=generator).bfloat16()
    pool = torch.randn(4, 16, 2, 64, generator=generator).bfloat16()
    table = torch.tensor([[3, 1, 0, 2]], dtype=INT).expand(3, -1)
    given = {"kv_lens": torch.tensor([64, 5, 40], dtype=INT)}
    shared = attention(q, pool, pool, page_table=table, **given)
    assert torch.equal(shared, attention(q, pool, pool, page_table=table.contiguous(), **given))
