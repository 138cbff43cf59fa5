"""`attention` refuses bad input before anything compiles, and decides empty problems alone."""

from __future__ import annotations

import pytest
import torch

from fmha import AttentionConfig, attention


@pytest.fixture
def no_compile(monkeypatch):
    def refuse(*_args, **_keywords):
        raise AssertionError("nothing is to be compiled")

    import fmha.sm100.compile

    monkeypatch.setattr(fmha.sm100.compile, "compile_once", refuse)


def tensors(q_shape=(1, 8, 2, 64), kv_shape=(1, 8, 2, 64), dtype=torch.bfloat16):
    return torch.zeros(q_shape, dtype=dtype), *(torch.zeros(kv_shape, dtype=dtype),) * 2


def lens(*values, dtype=torch.int32):
    return {"kv_lens": torch.tensor(values, dtype=dtype)}


REFUSED = {
    "no tensor": (([], *tensors()[1:]), {}, TypeError, "q is list"),
    "rank": (tensors((8, 2, 64)), {}, ValueError, "rank 3"),
    "dtype": (tensors(dtype=torch.float32), {}, NotImplementedError, "torch.float32"),
    "dtype mix": ((tensors()[0], *tensors(dtype=torch.float16)[1:]), {}, TypeError, "float16"),
    "device mix": ((tensors()[0].to("meta"), *tensors()[1:]), {}, ValueError, "meta"),
    "device": (tuple(t.to("meta") for t in tensors()), {}, NotImplementedError, "meta"),
    "head_dim": (tensors((1, 8, 2, 80), (1, 8, 2, 80)), {}, NotImplementedError, "80"),
    "head_dim mix": (tensors((1, 8, 2, 64), (1, 8, 2, 128)), {}, ValueError, "128"),
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
    "backend": (tensors(), {"backend": "torch"}, ValueError, "torch"),
    "no GPU here": (tensors(), {"backend": "cuda"}, ValueError, "CUDA tensors"),
    "arch": (tensors(), {"arch": "sm_90a"}, NotImplementedError, "sm_90a"),
    "config": (tensors(), {"config": AttentionConfig(kv_stages=9)}, ValueError, "9"),
    "lengths dtype": (tensors(), lens(8, dtype=torch.int64), ValueError, "int64"),
    "lengths shape": (tensors(), lens(8, 8), ValueError, "(2,)"),
    "lengths range": (tensors(), lens(9), ValueError, "Skv = 8"),
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


@pytest.mark.parametrize(
    ("q_shape", "kv_shape"),
    [
        ((1, 0, 2, 64), (1, 8, 2, 64)),
        ((1, 8, 2, 64), (1, 0, 2, 64)),
        ((0, 8, 2, 64), (0, 8, 1, 64)),
    ],
)
def test_empty_problems_need_no_kernel(q_shape, kv_shape, no_compile):
    q, k, v = tensors(q_shape, kv_shape)
    o, lse = attention(q, k, v, return_lse=True)
    assert o.shape == q.shape
    assert o.dtype == q.dtype
    assert not o.any()
    assert lse.shape == (q_shape[0], q_shape[2], q_shape[1])
    assert torch.isneginf(lse).all()
    raw, _, row_max = attention(q, k, v, normalize=False)
    assert raw.dtype == torch.float32
    assert torch.isneginf(row_max).all()


def test_results_come_in_the_promised_number():
    q, k, v = tensors((1, 0, 2, 64))
    assert isinstance(attention(q, k, v), torch.Tensor)
    assert len(attention(q, k, v, return_lse=True)) == 2
    assert len(attention(q, k, v, normalize=False)) == 3
