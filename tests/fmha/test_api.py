"""`attention` refuses bad input before anything compiles, and decides empty problems alone."""

from __future__ import annotations

import pytest
import torch

import fmha.compile
from fmha import AttentionConfig, attention


@pytest.fixture
def no_compile(monkeypatch):
    def refuse(*_args, **_keywords):
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(fmha.compile, "compile_once", refuse)


def tensors(q_shape=(1, 8, 2, 64), kv_shape=(1, 8, 2, 64), dtype=torch.bfloat16):
    return torch.zeros(q_shape, dtype=dtype), *(torch.zeros(kv_shape, dtype=dtype),) * 2


def lens(*values, dtype=torch.int32):
    return {"kv_lens": torch.tensor(values, dtype=dtype)}


def starts(*values, side="q"):
    return {f"cu_seqlens_{side}": torch.tensor(values, dtype=torch.int32)}


def pages(*rows, lengths=(8,), page_size=16):
    """A pool of 4 pages for the entries whose page numbers are `rows`."""
    pool = torch.zeros(4, page_size, 2, 64, dtype=torch.bfloat16)
    table = torch.tensor(rows, dtype=torch.int32)
    return (tensors()[0], pool, pool), {"page_table": table, **lens(*lengths)}


def rope(positions=8, pairs=4):
    return {"rope": (torch.zeros(positions, pairs),) * 2}


def window(left=None, right=None):
    return {"window": (left, right)}


PACKED_Q = tensors((8, 2, 64))
PACKED_K = tensors(kv_shape=(8, 2, 64))
SINKS = torch.zeros(2)

REFUSED = {
    "no tensor": (([], *tensors()[1:]), {}, TypeError, "q is list"),
    "no tensor for lengths": (tensors(), {"kv_lens": [8]}, TypeError, "kv_lens is list"),
    "rank": (PACKED_Q, {}, ValueError, "rank 3"),
    "rank of packed": (tensors(), starts(0, 8), ValueError, "[T, Hq, D]"),
    "rank of packed keys": (tensors(), starts(0, 8, side="k"), ValueError, "[Tk, Hkv, D]"),
    "dtype": (tensors(dtype=torch.float32), {}, NotImplementedError, "torch.float32"),
    "dtype mix": ((tensors()[0], *tensors(dtype=torch.float16)[1:]), {}, TypeError, "float16"),
    "out dtype": (tensors(), {"out_dtype": torch.float64}, NotImplementedError, "float64"),
    "device mix": ((tensors()[0].to("meta"), *tensors()[1:]), {}, ValueError, "meta"),
    "device of lengths": (
        tensors(), {"kv_lens": lens(8)["kv_lens"].to("meta")}, ValueError, "'kv_lens': 'meta'",
    ),
    "head_dim": (tensors((1, 8, 2, 80), (1, 8, 2, 80)), {}, NotImplementedError, "80"),
    "head_dim mix": (tensors((1, 8, 2, 64), (1, 8, 2, 128)), {}, ValueError, "128"),
    "v head_dim": (
        (*tensors()[:2], torch.zeros(1, 8, 2, 32, dtype=torch.bfloat16)),
        {}, NotImplementedError, "v_head_dim 32",
    ),
    "batch mix": (tensors((3, 8, 2, 64)), {}, ValueError, "batch 3"),
    "k and v": ((*tensors()[:2], tensors()[2][:, :4]), {}, ValueError, "differ in shape"),
    "group": (tensors((1, 8, 3, 64)), {}, ValueError, "3 query heads"),
    "zero heads": (tensors((1, 8, 0, 64)), {}, ValueError, "0 query"),
    "zero key heads": (tensors(kv_shape=(1, 8, 0, 64)), {}, ValueError, "0 key"),
    "grid": (tensors((70000, 1, 1, 64), (70000, 1, 1, 64)), {}, ValueError, "70000"),
    "last stride": ((tensors()[0].mT.contiguous().mT, *tensors()[1:]), {}, ValueError, "stride 2"),
    "row stride": (
        (torch.zeros(1, 8, 2, 68, dtype=torch.bfloat16)[..., :64], *tensors()[1:]),
        {}, ValueError, "136 bytes",
    ),
    "misaligned": (
        (torch.zeros(1025, dtype=torch.bfloat16)[1:].view(1, 8, 2, 64), *tensors()[1:]),
        {}, ValueError, "not a multiple of 16",
    ),
    "broadcast": (
        (tensors()[0][:, :1].expand(1, 8, 2, 64), *tensors()[1:]), {}, ValueError, "of 0 bytes",
    ),
    "scale": (tensors(), {"scale": -1.0}, ValueError, "-1.0"),
    "scale nan": (tensors(), {"scale": float("nan")}, ValueError, "nan"),
    "softcap": (tensors(), {"softcap": -30.0}, ValueError, "softcap -30.0"),
    "softcap inf": (tensors(), {"softcap": float("inf")}, ValueError, "softcap inf"),
    "backend": (tensors(), {"backend": "torch"}, ValueError, "torch"),
    "no GPU here": (tensors(), {"backend": "cuda"}, ValueError, "CUDA tensors"),
    "arch": (tensors(), {"arch": "sm_90a"}, NotImplementedError, "sm_90a"),
    "config": (tensors(), {"config": AttentionConfig(k_stages=99)}, ValueError, "232448"),
    "window int": (tensors(), {"window": 4}, TypeError, "window 4: (left, right)"),
    "window negative": (tensors(), window(left=-1), ValueError, "left -1"),
    "causal and right": (tensors(), {"causal": True, **window(3, 2)}, ValueError, "right 2"),
    "sink tokens alone": (tensors(), {"sink_tokens": 4}, ValueError, "without a left window"),
    "sink tokens": (tensors(), {"sink_tokens": -4, **window(3)}, ValueError, "sink_tokens -4"),
    "sinks shape": (tensors(), {"sinks": SINKS[:1]}, ValueError, "(1,), expected"),
    "sinks dtype": (tensors(), {"sinks": SINKS.bfloat16()}, ValueError, "bfloat16"),
    "sinks raw": (tensors(), {"sinks": SINKS, "normalize": False}, ValueError, "no denominator"),
    "lengths dtype": (tensors(), lens(8, dtype=torch.int64), ValueError, "int64"),
    "lengths shape": (tensors(), lens(8, 8), ValueError, "(2,)"),
    "lengths range": (tensors(), lens(9), ValueError, "Skv = 8"),
    "offset type": (tensors(), {"q_offset": 1.5}, TypeError, "q_offset is float"),
    "offset range": (tensors(), {"q_offset": 1 << 29}, ValueError, "536870911"),
    "offset table": (
        tensors(), {"q_offset": torch.tensor([-(1 << 30)], dtype=torch.int32)},
        ValueError, "536870911",
    ),
    "offset of no entry": (
        PACKED_Q, {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32), "q_offset": 3},
        ValueError, "is empty",
    ),
    "offset of a number": (
        (torch.tensor(0.0), *tensors()[1:]), {"q_offset": 3}, TypeError, "0-d tensor",
    ),
    "offset shape": (
        tensors(), {"q_offset": torch.zeros(3, dtype=torch.int32)}, ValueError, "(3,)",
    ),
    "starts dtype": (
        PACKED_Q, {"cu_seqlens_q": torch.tensor([0, 8])}, ValueError, "cu_seqlens_q is torch.int64",
    ),
    "no starts": (
        PACKED_Q, {"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, ValueError, "is empty",
    ),
    "starts begin": (PACKED_Q, starts(1, 8), ValueError, "[1, 8]: from 0"),
    "starts fall": (PACKED_Q, starts(0, 5, 3, 8), ValueError, "batch 3"),
    "starts of keys fall": (PACKED_K, starts(0, 9, side="k"), ValueError, "to 8, the packed"),
    "starts disagree": (PACKED_K, starts(0, 4, 8, side="k"), ValueError, "expected torch.int32 (2"),
    "longest too short": (
        PACKED_Q, {"max_seqlen_q": 7, **starts(0, 8)}, ValueError, "an entry has 8 queries",
    ),
    "longest alone": (tensors(), {"max_seqlen_q": 8}, ValueError, "without cu_seqlens_q"),
    "page": (*pages([4]), ValueError, "pages 0 to 3"),
    "page negative": (*pages([0, -1], lengths=(17,)), ValueError, "[0, -1]"),
    "window of floats": (tensors(), {"window": (1.5, 0)}, TypeError, "window_left is 1.5"),
    "scale text": (tensors(), {"scale": "a"}, TypeError, "scale is 'a', expected float | None"),
    "softcap large": (tensors(), {"softcap": 1e5}, ValueError, "4096"),
    "scale below fp32": (tensors(), {"scale": 1e-50}, ValueError, "1e-12"),
    "config no config": (tensors(), {"config": {}}, TypeError, "expected AttentionConfig"),
    "page size": (*pages([0], page_size=24), NotImplementedError, "pages of 24 rows"),
    "pages too few": (*pages([0], lengths=(17,)), ValueError, "Skv = 16"),
    "pages of another batch": (*pages([0], [1], lengths=(8, 8)), ValueError, "(2, 1)"),
    "pages without lengths": (
        pages([0])[0], {"page_table": pages([0])[1]["page_table"]}, ValueError, "without kv_lens",
    ),
    "pages and starts": (
        pages([0])[0], pages([0])[1] | starts(0, 8, side="k"), ValueError, "give one",
    ),
    "rope type": (tensors(), {"rope": SINKS}, TypeError, "rope is Tensor"),
    "rope tables": (tensors(), {"rope": (SINKS, SINKS)}, ValueError, "(any, any)"),
    "rope shapes": (
        tensors(), {"rope": (torch.zeros(8, 4), torch.zeros(8, 2))}, ValueError, "(8, 2)",
    ),
    "rope dim": (tensors(), rope(pairs=48), ValueError, "rope_dim 96"),
    "rope positions": (tensors(), rope(positions=7), ValueError, "tables end at 6"),
    "rope before the table": (tensors(), {"q_offset": -1, **rope()}, ValueError, "stand at -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name, no_compile):
    arguments, options, error, words = REFUSED[name]
    with pytest.raises(error) as raised:
        attention(*arguments, **options)
    assert words in str(raised.value)


def test_gradients_are_refused(no_compile):
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="no backward"):
        attention(q.requires_grad_(), k, v)


EMPTY = {
    "no query": (tensors((1, 0, 2, 64)), {}),
    "no key": (tensors(kv_shape=(1, 0, 2, 64)), {"causal": True}),
    "no entry": (tensors((0, 8, 2, 64), (0, 8, 1, 64)), {}),
    "no packed query": (tensors((0, 2, 64)), starts(0, 0)),
    "no packed entry": (tensors((0, 2, 64), (0, 8, 2, 64)), starts(0)),
    "no packed key": (tensors(kv_shape=(0, 2, 64)), starts(0, 0, side="k")),
    "no page of an entry": (
        pages([0])[0], {"page_table": torch.zeros(1, 0, dtype=torch.int32), **lens(0)},
    ),
    "no page at all": (
        (tensors()[0], *(torch.zeros(0, 16, 2, 64, dtype=torch.bfloat16),) * 2),
        {"page_table": torch.zeros(1, 0, dtype=torch.int32), **lens(0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_empty_problems_need_no_kernel(name, no_compile):
    (q, k, v), options = EMPTY[name]
    o, lse = attention(q, k, v, return_lse=True, **options)
    assert o.shape == q.shape
    assert o.dtype == q.dtype
    assert not o.any()
    assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3])
    assert torch.isneginf(lse).all()
    raw, _, row_max = attention(q, k, v, normalize=False, **options)
    assert raw.dtype == torch.float32
    assert torch.isneginf(row_max).all()
    sinks = torch.tensor([1.5, -2.0])
    _, with_sink = attention(q, k, v, return_lse=True, sinks=sinks, **options)
    assert torch.equal(with_sink, sinks[:, None].expand_as(lse))


def test_empty_results_have_the_columns_of_v(no_compile):
    shapes = ((1, 0, 2, 192), (1, 8, 2, 192), (1, 8, 2, 128))
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    assert attention(q, k, v).shape == (1, 0, 2, 128)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert attention(q, k, v, out_dtype=dtype).dtype == dtype
        assert attention(q, k, v, out_dtype=dtype, normalize=False)[0].dtype == dtype


def test_results_come_in_the_promised_number():
    q, k, v = tensors((1, 0, 2, 64))
    assert isinstance(attention(q, k, v), torch.Tensor)
    assert len(attention(q, k, v, return_lse=True)) == 2
    assert len(attention(q, k, v, normalize=False)) == 3


def test_entries_may_share_a_page_table():
    """A broadcast row has stride 0, which the DSL would take for a constant of the kernel."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 2, 64, generator=generator).bfloat16()
    pool = torch.randn(4, 16, 2, 64, generator=generator).bfloat16()
    table = torch.tensor([[3, 1, 0, 2]], dtype=torch.int32).expand(3, -1)
    given = {"kv_lens": torch.tensor([64, 5, 40], dtype=torch.int32)}
    shared = attention(q, pool, pool, page_table=table, **given)
    assert torch.equal(shared, attention(q, pool, pool, page_table=table.contiguous(), **given))
