"""Invalid calls: an error that names the argument, before anything compiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelkit.compile import compiler as kernel_compile
from q8_0 import (
    Activations,
    Q8Linear,
    Weights,
    dequantise,
    matvec,
    quantise,
    repack,
    warmup,
)
from q8_0.blocks import INTERLEAVED, SOA
from tests.q8_0.cases import Matrix
from tests.support.hostile.calls import freed, hostile, refused

ROWS, COLS = 4, 96
BOTH = Matrix(ROWS, COLS, place="dense").both()
BLOCKS, ARRAYS = BOTH[INTERLEAVED], BOTH[SOA]
X = torch.ones(2, COLS).bfloat16()
ROUNDED = Activations(torch.ones(2, COLS, dtype=torch.int8), torch.ones(2, COLS // 32).half())


def odd(weights: Weights, offset: int = 1) -> Weights:
    """Copy the bytes to an address that is off by `offset`."""
    memory = weights.data.new_zeros(weights.data.numel() + 32)
    begin = -memory.data_ptr() % 16 + offset
    inner = memory[begin : begin + weights.data.numel()].view(weights.data.shape)
    return replace(weights, data=inner)


def times(weights=ARRAYS, x=X, bias=None, **options):
    return lambda: matvec(weights, x, bias, **options)


CALLS = [
    hostile(lambda: Weights(BLOCKS.data, ROWS, COLS, SOA), "that is the shape of 'interleaved'"),
    hostile(lambda: Weights(ARRAYS.data, ROWS, COLS, INTERLEAVED), "that is the shape of 'soa'"),
    hostile(lambda: Weights(BLOCKS.data, ROWS, COLS, "rows"), "layout 'rows': one of"),
    hostile(lambda: Weights(BLOCKS.data, ROWS, COLS, None), "layout is None"),
    hostile(lambda: Weights(BLOCKS.data, ROWS, 80, INTERLEAVED), "cols 80: a multiple of 32"),
    hostile(lambda: Weights(BLOCKS.data, 0, COLS, INTERLEAVED), "rows 0: from 1"),
    hostile(lambda: Weights(BLOCKS.data, 4.0, COLS, INTERLEAVED), "rows is 4.0"),
    hostile(lambda: Weights(BLOCKS.data, 1 << 40, COLS, SOA), "rows 1099511627776: from 1"),
    hostile(lambda: Weights(BLOCKS.data.char(), ROWS, COLS, INTERLEAVED), "data is torch.int8"),
    hostile(lambda: Weights(None, ROWS, COLS, INTERLEAVED), "data is NoneType"),
    hostile(lambda: BLOCKS.quants, "quants of layout 'interleaved' are not a view"),
    hostile(lambda: BLOCKS.scales, "scales of layout 'interleaved' are not a view"),
    hostile(lambda: BLOCKS.require_layout(SOA, "product"), "product reads layout 'soa'"),
    hostile(lambda: repack(BLOCKS.data, SOA), "weights is Tensor, expected q8_0.Weights"),
    hostile(lambda: repack(BLOCKS, "rows"), "layout 'rows'", name="repack to rows"),
    hostile(lambda: repack(odd(BLOCKS), SOA), "multiples of 2 for layout 'interleaved'"),
    hostile(lambda: dequantise(odd(ARRAYS, 8)), "multiples of 16 for layout 'soa'"),
    hostile(lambda: dequantise(replace(ARRAYS, data=freed(ARRAYS.data))), "data reaches to byte"),
    hostile(lambda: dequantise(ARRAYS, torch.int8), "dtype is torch.int8"),
    hostile(lambda: dequantise(ARRAYS, "bf16"), "dtype is 'bf16'"),
    hostile(lambda: dequantise(ARRAYS, arch="sm_75"), "arch 'sm_75'"),
    hostile(lambda: dequantise(ARRAYS, backend="gpu"), "backend 'gpu'"),
    hostile(lambda: quantise(X[0]), "x has shape"),
    hostile(lambda: quantise(torch.ones(2, 40)), "cols 40: a multiple of 32"),
    hostile(lambda: quantise(X.double()), "x is torch.float64"),
    hostile(lambda: quantise(torch.ones(2, 2 * COLS)[:, ::2]), "x has last stride 2"),
    hostile(lambda: quantise(torch.ones(2, COLS + 1)[:, 1:]), "x starts at address"),
    hostile(lambda: quantise(torch.ones(2, COLS, requires_grad=True)), "x requires grad"),
    hostile(lambda: Activations(X, ROUNDED.scales), "quants is torch.bfloat16"),
    hostile(lambda: Activations(ROUNDED.quants, ROUNDED.scales[:1]), r"expected torch.float16 \(2"),
    hostile(lambda: Q8Linear(ARRAYS, torch.ones(4, dtype=torch.bool)), "bias is torch.bool"),
    hostile(lambda: Q8Linear(ARRAYS, torch.ones(4).to_sparse()), "bias is a sparse_coo tensor"),
    hostile(lambda: Q8Linear(ARRAYS)(1.5), "x is float, expected torch.Tensor"),
    hostile(lambda: Q8Linear(ARRAYS)(X.to_sparse()), "x is a sparse_coo tensor"),
    hostile(lambda: Q8Linear(ARRAYS)(X[:, :64]), r"x has shape \(2, 64\), expected \(..., 96\)"),
    hostile(lambda: warmup(ARRAYS, dtypes=1), "dtypes is int"),
    hostile(times(weights=BLOCKS.data), "weights is Tensor", name="bytes without a layout"),
    hostile(times(x=[1.0]), "x is list, expected torch.Tensor or Activations"),
    hostile(times(x=torch.ones(2, 64)), "x has 64 columns, the weights are 4 x 96"),
    hostile(times(x=torch.ones(17, COLS)), "x has 17 tokens: at most 16"),
    hostile(times(x=X.to("meta")), "different devices"),
    hostile(times(bias=torch.ones(4)), "bias is torch.float32"),
    hostile(times(bias=torch.ones(3).bfloat16()), r"bias is torch.bfloat16 \(3,\)"),
    hostile(times(out_dtype=torch.int32), "out_dtype is torch.int32"),
    hostile(times(x=replace(ROUNDED, quants=ROUNDED.quants.T.contiguous().T)), "not contiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("attempt", "words"), CALLS)
def test_a_named_error(attempt, words, monkeypatch):
    monkeypatch.setattr(kernel_compile, "_make", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr("q8_0.launch.launch", lambda *_: pytest.fail("launched"))
    refused(attempt, words)


def test_rows_that_overlap():
    memory = BLOCKS.data.new_zeros(4096)
    data = memory.as_strided((ROWS, 102), (64, 1), -memory.data_ptr() % 16)
    refused(lambda: dequantise(replace(BLOCKS, data=data)), "rows of 102 bytes every 64")
