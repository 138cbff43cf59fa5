"""`decode` refuses bad input before anything compiles, and decides empty problems alone."""

from __future__ import annotations

import pytest
import torch

import gqa_lowlatency.forward
from gqa_lowlatency import DecodeConfig, decode, decode_plan

BF16, INT, E4M3 = torch.bfloat16, torch.int32, torch.float8_e4m3fn
ARCH = {"arch": "sm_90a"}


@pytest.fixture
def no_compile(monkeypatch):
    def refuse(*_arguments):
        raise AssertionError("nothing is to be compiled")

    monkeypatch.setattr(gqa_lowlatency.forward, "compile_for", refuse)


def tensors(q_shape=(1, 1, 4, 64), kv_shape=(1, 8, 2, 64), dtype=BF16, kv_dtype=None):
    kv = torch.zeros(kv_shape).to(kv_dtype or dtype)
    return torch.zeros(q_shape, dtype=dtype), kv, kv


def lens(*values, dtype=INT):
    return {"seq_lens": torch.tensor(values, dtype=dtype)}


def pages(*rows, lengths=(8,), page_size=16):
    """A pool of 4 pages for the entries whose page numbers are `rows`."""
    q, k, v = tensors(kv_shape=(4, page_size, 2, 64))
    return (q, k, v), {"page_table": torch.tensor(rows, dtype=INT), **lens(*lengths)}


FP8 = tensors(kv_dtype=E4M3)
SINKS = torch.zeros(4)

REFUSED = {
    "no tensor": (([], *tensors()[1:]), {}, TypeError, "q is list"),
    "no tensor for lengths": (tensors(), {"seq_lens": [8]}, TypeError, "seq_lens is list"),
    "rank of q": ((tensors()[0][0, 0], *tensors()[1:]), {}, ValueError, "[B, T, Hq, D]"),
    "rank of k": ((tensors()[0], *(tensors()[1][0],) * 2), {}, ValueError, "[B, S, Hkv, D]"),
    "dtype": (tensors(dtype=torch.float32), {}, NotImplementedError, "torch.float32"),
    "dtype of keys": (tensors(kv_dtype=torch.int8), {}, NotImplementedError, "torch.int8"),
    "dtype mix": (tensors(kv_dtype=torch.float16), {}, TypeError, "float16"),
    "k and v in dtype": ((*tensors()[:2], FP8[2]), {}, ValueError, "float8_e4m3fn"),
    "k and v in shape": ((*tensors()[:2], tensors()[2][:, :4]), {}, ValueError, "(1, 4, 2, 64)"),
    "other fp8": (tensors(kv_dtype=torch.float8_e5m2), {}, NotImplementedError, "e5m2"),
    "out dtype": (tensors(), {"out_dtype": torch.float64}, NotImplementedError, "float64"),
    "device mix": ((tensors()[0].to("meta"), *tensors()[1:]), {}, ValueError, "meta"),
    "device of lengths": (
        tensors(), {"seq_lens": lens(8)["seq_lens"].to("meta")}, ValueError, "'seq_lens': 'meta'",
    ),
    "head_dim": (tensors((1, 1, 4, 96), (1, 8, 2, 96)), {}, NotImplementedError, "96"),
    "head_dim mix": (tensors((1, 1, 4, 64), (1, 8, 2, 128)), {}, ValueError, "128"),
    "tokens": (tensors((1, 9, 4, 64)), {}, ValueError, "9 query tokens: from 1 to 8"),
    "no tokens": (tensors((1, 0, 4, 64)), {}, ValueError, "0 query tokens"),
    "batch mix": (tensors((3, 1, 4, 64)), {}, ValueError, "batch 3"),
    "group": (tensors((1, 1, 3, 64)), {}, ValueError, "3 query heads"),
    "zero heads": (tensors((1, 1, 0, 64)), {}, ValueError, "0 query"),
    "zero key heads": (tensors(kv_shape=(1, 8, 0, 64)), {}, ValueError, "0 KV"),
    "grid": (tensors((70000, 1, 1, 64), (70000, 1, 1, 64)), {}, ValueError, "70000"),
    "heads on the grid": (tensors((1, 1, 70000, 64), (1, 1, 70000, 64)), {}, ValueError, "70000"),
    "last stride": ((tensors()[0].mT.contiguous().mT, *tensors()[1:]), {}, ValueError, "stride 4"),
    "row stride": (
        (torch.zeros(1, 1, 4, 68, dtype=BF16)[..., :64], *tensors()[1:]), {}, ValueError, "136 b",
    ),
    "row stride of fp8": (
        (tensors()[0], *(torch.zeros(1, 8, 2, 72).to(E4M3)[..., :64],) * 2),
        {}, ValueError, "72 bytes",
    ),
    "misaligned": (
        (torch.zeros(257, dtype=BF16)[1:].view(1, 1, 4, 64), *tensors()[1:]),
        {}, ValueError, "not a multiple of 16",
    ),
    "broadcast": (
        (tensors()[0], *(tensors()[1][:, :1].expand(1, 8, 2, 64),) * 2), {}, ValueError, "of 0 b",
    ),
    "scale": (tensors(), {"scale": -1.0}, ValueError, "-1.0"),
    "scale nan": (tensors(), {"scale": float("nan")}, ValueError, "nan"),
    "scale text": (tensors(), {"scale": "a"}, TypeError, "scale is 'a', expected float | None"),
    "softcap": (tensors(), {"softcap": -30.0}, ValueError, "softcap -30.0"),
    "softcap large": (tensors(), {"softcap": 1e5}, ValueError, "4096"),
    "backend": (tensors(), {"backend": "torch"}, ValueError, "torch"),
    "no GPU here": (tensors(), {"backend": "cuda"}, ValueError, "CUDA tensors"),
    "arch": (tensors(), {"arch": "sm_80"}, NotImplementedError, "sm_80"),
    "config": (tensors(), {"config": DecodeConfig(cluster=3)}, NotImplementedError, "cluster 3"),
    "config no config": (tensors(), {"config": {}}, TypeError, "expected DecodeConfig"),
    "config too large": (
        tensors((1, 1, 64, 256), (1, 8, 1, 256)),
        {"config": DecodeConfig(max_columns=64), **ARCH}, NotImplementedError, "64 columns",
    ),
    "causal number": (tensors(), {"causal": 1}, TypeError, "causal is 1"),
    "window pair": (tensors(), {"window": (4, 0)}, TypeError, "window is (4, 0)"),
    "window negative": (tensors(), {"window": -1}, ValueError, "window -1"),
    "sink tokens alone": (tensors(), {"sink_tokens": 4}, ValueError, "without a window"),
    "sink tokens": (tensors(), {"sink_tokens": -4, "window": 3}, ValueError, "sink_tokens -4"),
    "sinks shape": (tensors(), {"sinks": SINKS[:1]}, ValueError, "(1,), expected"),
    "sinks dtype": (tensors(), {"sinks": SINKS.to(BF16)}, ValueError, "bfloat16"),
    "k_scale": (tensors(), {"k_scale": 1.0}, ValueError, "only e4m3 is scaled"),
    "k_scale text": (FP8, {"k_scale": "1"}, TypeError, "k_scale is str"),
    "v_scale shape": (FP8, {"v_scale": torch.ones(3)}, ValueError, "(3,)"),
    "v_scale dtype": (FP8, {"v_scale": torch.ones(2).half()}, ValueError, "float16"),
    "lengths dtype": (tensors(), lens(8, dtype=torch.int64), ValueError, "int64"),
    "lengths shape": (tensors(), lens(8, 8), ValueError, "(2,)"),
    "lengths range": (tensors(), lens(9), ValueError, "max_seq_len = 8"),
    "lengths negative": (tensors(), lens(-1), ValueError, "seq_lens -1 of entry 0"),
    "lengths past the bound": (
        tensors(), {"max_seq_len": 4, **lens(5)}, ValueError, "max_seq_len = 4",
    ),
    "bound past the cache": (tensors(), {"max_seq_len": 9, **lens(5)}, ValueError, "S = 8"),
    "bound without lengths": (tensors(), {"max_seq_len": 4}, ValueError, "without seq_lens"),
    "bound of floats": (tensors(), {"max_seq_len": 4.0}, TypeError, "max_seq_len is 4.0"),
    "kv ready alone": (tensors(), {"kv_ready_before_pdl": True}, ValueError, "without pdl"),
    "kv ready of a copy": (
        (torch.zeros(2, 1, 4, 64).to(BF16), *pages([0])[0][1:]),
        {
            "pdl": True, "kv_ready_before_pdl": True, **lens(8, 8),
            "page_table": torch.tensor([[0]]).int().expand(2, 1),
        },
        ValueError, "kv_ready_before_pdl with page_table of strides (0, 1)",
    ),
    "page": (*pages([4]), ValueError, "pages 0 to 3"),
    "page negative": (*pages([0, -1], lengths=(17,)), ValueError, "[0, -1]"),
    "page size": (*pages([0], page_size=24), NotImplementedError, "pages of 24 rows"),
    "page too large": (*pages([0], page_size=256), NotImplementedError, "pages of 256 rows"),
    "pages too few": (*pages([0], lengths=(17,)), ValueError, "= 16"),
    "pages of another batch": (*pages([0], [1]), ValueError, "(2, 1)"),
    "pages of int64": (
        pages([0])[0], pages([0])[1] | {"page_table": torch.tensor([[0]])}, ValueError, "int64",
    ),
    "pages without lengths": (
        pages([0])[0], {"page_table": pages([0])[1]["page_table"]}, ValueError, "without seq_lens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name, no_compile):
    arguments, options, error, words = REFUSED[name]
    for call in (decode, decode_plan):
        with pytest.raises(error) as raised:
            call(*arguments, **options)
        assert words in str(raised.value)


def test_gradients_are_refused(no_compile):
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="no backward"):
        decode(q.requires_grad_(), k, v)


def test_a_plan_knows_its_options(no_compile):
    with pytest.raises(TypeError, match="return_lse"):
        decode_plan(*tensors(), return_lse=True)
    for name in ("kv_lens", "cluster"):
        with pytest.raises(TypeError, match=name):
            decode_plan(*tensors(), **{name: 1})


def test_pages_that_no_token_sees_may_be_given_back(no_compile):
    """Behind the length, and in front of the window."""
    q, options = pages([-7, 9, 3, 5], lengths=(47,))
    with pytest.raises(AssertionError, match="compiled"):
        decode(*q, window=12, **options)
    with pytest.raises(ValueError, match="page_table"):
        decode(*q, window=16, **options)


EMPTY = {
    "no key": (tensors(kv_shape=(1, 0, 2, 64)), {}),
    "no entry": (tensors((0, 2, 4, 64), (0, 8, 2, 64)), {}),
    "flat": (tensors((1, 4, 64), (1, 0, 2, 64)), {}),
    "no page of an entry": (
        pages([0])[0], {"page_table": torch.zeros(1, 0, dtype=INT), **lens(0)},
    ),
    "no page at all": (
        tensors(kv_shape=(0, 16, 2, 64)),
        {"page_table": torch.zeros(1, 0, dtype=INT), **lens(0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_empty_problems_need_no_kernel(name, no_compile):
    (q, k, v), options = EMPTY[name]
    for dtype in (BF16, torch.float16, torch.float32):
        o, lse = decode(q, k, v, return_lse=True, out_dtype=dtype, **options)
        assert o.shape == q.shape
        assert o.dtype == dtype
        assert not o.any()
        assert lse.shape == (q.shape[0], q.shape[-2], *q.shape[1:-2])
        assert torch.isneginf(lse).all()
    sinks = torch.tensor([1.5, -2.0, 0.0, 3.0])
    _, with_sink = decode(q, k, v, return_lse=True, sinks=sinks, **options)
    assert torch.equal(with_sink, sinks.view(1, 4, *(1,) * (q.ndim - 3)).expand_as(lse))
    tables = {name: options[name] for name in ("seq_lens", "page_table") if name in options}
    planned = decode_plan(q, k, v, sinks=sinks, **options)(q, k, v, **tables)
    assert torch.equal(planned[1], with_sink)


def test_results_come_in_the_promised_number():
    q, k, v = tensors(kv_shape=(1, 0, 2, 64))
    assert isinstance(decode(q, k, v), torch.Tensor)
    assert len(decode(q, k, v, return_lse=True)) == 2


@pytest.fixture(scope="module")
def problem():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 1, 4, 64, generator=generator).to(BF16)
    k, v = torch.randn(2, 6, 16, 2, 64, generator=generator).to(BF16)
    table = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=INT)
    return (q, k, v), {"page_table": table, **lens(40, 3)}


def test_a_plan_serves_other_tensors_of_the_same_layout(problem):
    (q, k, v), tables = problem
    plan = decode_plan(q, k, v, **tables, **ARCH)
    assert plan.config.cluster == 1
    others = (q * 2, k + 1, v - 1)
    other_tables = {"page_table": tables["page_table"].flip(0).contiguous(), **lens(17, 48)}
    for step, given in (((q, k, v), tables), (others, other_tables), ((q, k, v), tables)):
        expected = decode(*step, return_lse=True, **given, **ARCH)
        out, lse = torch.full_like(q, torch.nan), torch.full((2, 4, 1), torch.nan)
        results = plan(*step, **given, out=out, lse=lse)
        assert results[0] is out
        assert results[1] is lse
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])
        assert all(torch.equal(a, b) for a, b in zip(plan(*step, **given), expected, strict=True))


def test_a_plan_refuses_another_layout(problem):
    (q, k, v), tables = problem
    plan = decode_plan(q, k, v, **tables, **ARCH)
    wide = torch.zeros(6, 16, 2, 128, dtype=BF16)[..., :64]
    for step, given, words in (
        ((q[:1], k, v), tables, "q is"),
        ((q.half(), k, v), tables, "float16"),
        ((q, wide, v), tables, "k is"),
        ((q, k, v.to("meta")), tables, "meta"),
        ((q, k, v), tables | {"out": torch.empty(2, 1, 4, 64)}, "out is"),
        ((q, k, v), tables | {"seq_lens": torch.zeros(2).long()}, "seq_lens is"),
        ((q, k, v), tables | {"page_table": None}, "planned with q, k, v, out, lse, seq_lens"),
    ):
        with pytest.raises(ValueError) as raised:
            plan(*step, **given)
        assert words in str(raised.value)
    odd = torch.zeros(q.numel() + 1, dtype=BF16)[1:].view(q.shape)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        plan(odd, k, v, **tables)


def test_entries_may_share_a_page_table(problem):
    """A broadcast row has stride 0, which the DSL would take for a constant of the kernel."""
    (q, k, v), tables = problem
    table = tables["page_table"][:1].expand(2, 3)
    shared = decode(q, k, v, page_table=table, seq_lens=tables["seq_lens"], **ARCH)
    copied = decode(q, k, v, page_table=table.contiguous(), seq_lens=tables["seq_lens"], **ARCH)
    assert torch.equal(shared, copied)


def test_scales_may_lie_anywhere():
    q, k, v = (torch.randn_like(t.float()) for t in tensors())
    inputs = q.to(BF16), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 9.0], [2.0, 9.0]])[:, 0]
    results = [
        decode(*inputs, k_scale=scale, v_scale=scale, arch="sm_90a")
        for scale in (scales, scales.contiguous(), scales.flip(0), None)
    ]
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(results[0], results[3])
