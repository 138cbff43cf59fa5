"""`decode` refuses bad input before anything compiles, and answers empty problems without a
kernel.
"""

from __future__ import annotations

import pytest
import torch

from gqa_lowlatency import DecodeConfig, decode, decode_plan
from tests.support import attentions
from tests.support.attentions import BF16, lens, pages, tensors

E4M3 = torch.float8_e4m3fn
ARCH = {"arch": "sm_90a"}
FP8 = tensors(kv_dtype=E4M3)

REFUSED = attentions.REFUSED | {
    "rank of q": ((tensors()[0][0, 0], *tensors()[1:]), {}, ValueError, "[B, T, Hq, D]"),
    "rank of k": ((tensors()[0], *(tensors()[1][0],) * 2), {}, ValueError, "[B, S, Hkv, D]"),
    "dtype of keys": (tensors(kv_dtype=torch.int8), {}, NotImplementedError, "torch.int8"),
    "dtype mix": (tensors(kv_dtype=torch.float16), {}, TypeError, "float16"),
    "k and v in dtype": ((*tensors()[:2], FP8[2]), {}, ValueError, "float8_e4m3fn"),
    "other fp8": (tensors(kv_dtype=torch.float8_e5m2), {}, NotImplementedError, "e5m2"),
    "tokens": (tensors((1, 9, 4, 64)), {}, ValueError, "fmha.attention takes more"),
    "no tokens": (tensors((1, 0, 4, 64)), {}, ValueError, "0 query tokens"),
    "heads on the grid": (tensors((1, 1, 70000, 64), (1, 1, 70000, 64)), {}, ValueError, "70000"),
    "row stride of fp8": (
        (tensors()[0], *(torch.zeros(1, 8, 2, 72).to(E4M3)[..., :64],) * 2),
        {}, ValueError, "72 bytes",
    ),
    "config": (tensors(), {"config": DecodeConfig(cluster=3)}, NotImplementedError, "cluster 3"),
    "config too large": (
        tensors((1, 1, 64, 256), (1, 8, 1, 256)),
        {"config": DecodeConfig(max_columns=64), **ARCH}, NotImplementedError, "64 columns",
    ),
    "k_scale": (tensors(), {"k_scale": 1.0}, ValueError, "only e4m3 is scaled"),
    "grid": (tensors((70000, 1, 1, 64), (70000, 1, 1, 64)), {}, ValueError, "70000"),
    "k_scale text": (FP8, {"k_scale": "1"}, TypeError, "k_scale is '1'"),
    "v_scale shape": (FP8, {"v_scale": torch.ones(3)}, ValueError, "(3,)"),
    "v_scale dtype": (FP8, {"v_scale": torch.ones(2).half()}, ValueError, "float16"),
    "lengths past the bound": (
        tensors(), {"max_kv_len": 4, **lens(5)}, ValueError, "max_kv_len = 4",
    ),
    "bound past the cache": (tensors(), {"max_kv_len": 9, **lens(5)}, ValueError, "S = 8"),
    "bound without lengths": (tensors(), {"max_kv_len": 4}, ValueError, "without kv_lens"),
    "bound of floats": (tensors(), {"max_kv_len": 4.0}, TypeError, "max_kv_len is 4.0"),
    "kv ready alone": (tensors(), {"kv_ready_before_pdl": True}, ValueError, "without pdl"),
    "kv ready of a copy": (
        (torch.zeros(2, 1, 4, 64).to(BF16), *pages([0])[0][1:]),
        {
            "pdl": True, "kv_ready_before_pdl": True, **lens(8, 8),
            "page_table": torch.tensor([[0]]).int().expand(2, 1),
        },
        ValueError, "kv_ready_before_pdl with page_table of strides (0, 1)",
    ),
    "kv ready of copied words": (
        tensors((2, 1, 4, 64), (2, 8, 2, 64)),
        {"pdl": True, "kv_ready_before_pdl": True, "tree": torch.zeros(2, 2).long()[:, :1]},
        ValueError, "kv_ready_before_pdl with tree of strides (2, 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name, no_compile):
    attentions.check_refused(REFUSED[name], decode, decode_plan)


def test_scales_are_fp32_whatever_the_default_dtype_is(no_compile):
    torch.set_default_dtype(BF16)
    try:
        with pytest.raises(AssertionError, match="compiled"):
            decode(*FP8, k_scale=2.0, v_scale=0.5)
    finally:
        torch.set_default_dtype(torch.float32)


def test_pages_that_no_token_sees_may_be_given_back(no_compile):
    """These are pages after the length, and before the window."""
    q, options = pages([-7, 9, 3, 5], lengths=(47,))
    with pytest.raises(AssertionError, match="compiled"):
        decode(*q, window=12, **options)
    with pytest.raises(ValueError, match="page_table"):
        decode(*q, window=16, **options)


EMPTY = attentions.EMPTY | {
    "flat": (tensors((1, 4, 64), (1, 0, 2, 64)), {}),
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
    tables = {name: options[name] for name in ("kv_lens", "page_table") if name in options}
    planned = decode_plan(q, k, v, sinks=sinks, **options)(q, k, v, **tables)
    assert torch.equal(planned[1], with_sink)


def test_results_come_in_the_promised_number():
    q, k, v = tensors(kv_shape=(1, 0, 2, 64))
    assert isinstance(decode(q, k, v), torch.Tensor)
    assert len(decode(q, k, v, return_lse=True)) == 2
