"""On the GPU itself: the emulator's tests with large sizes, bits of GPU and emulator compared,
captured graphs, eager repetition.

`python -m pytest --hw -m hw tests/q8_0/test_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from kernelkit.numerics.tolerance import compare_output
from q8_0 import Q8Linear, dequantise, matvec, quantise, reference, repack
from q8_0.blocks import INTERLEAVED, LAYOUTS, SOA
from tests.q8_0.cases import DTYPES, Matrix, same

pytestmark = [
    pytest.mark.hw,
    pytest.mark.xdist_group("q8-hw"),
    pytest.mark.usefixtures("poisoned_outputs"),
]
SIZES = [(1, 32), (3, 96), (33, 2080), (8192, 2048), (2048, 8192), (6144, 2048), (1000, 4128)]
cases = pytest.mark.parametrize("size", SIZES, ids=str)
odd_or_calm = pytest.mark.parametrize("calm", [True, False])


@cases
@pytest.mark.parametrize("place", ["apart", "dense"])
def test_there_and_back(size, place):
    both = Matrix(*size, False, place).both("cuda")
    assert torch.equal(repack(both[INTERLEAVED], SOA).data, both[SOA].data)
    assert torch.equal(repack(both[SOA], INTERLEAVED).data, both[INTERLEAVED].data.contiguous())


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise(size, dtype):
    for weights in Matrix(*size, False).both("cuda").values():
        found = dequantise(weights, DTYPES[dtype])
        assert same(found, reference.dequantise(weights, DTYPES[dtype]))


@cases
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantise(size, dtype):
    x = Matrix(*size).numbers(17, dtype, "cuda")
    found, expected = quantise(x), reference.quantise(x.cpu())
    assert torch.equal(found.quants.cpu(), expected.quants)
    assert same(found.scales.cpu(), expected.scales)


@cases
@pytest.mark.parametrize("kind", [*DTYPES, "q8_1"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 11, 16])
@odd_or_calm
def test_products(size, kind, tokens, calm):
    case = Matrix(*size, calm)
    both = case.both("cuda")
    x = case.activations(tokens, "cuda") if kind == "q8_1" else case.numbers(tokens, kind, "cuda")
    one, other = (matvec(weights, x, out_dtype=torch.bfloat16) for weights in both.values())
    assert same(one, other)
    exact = reference.matvec(both[SOA], x)
    if calm:
        rounded = exact.bfloat16()
        report = compare_output(one, exact, rounded, torch.bfloat16)
        assert report.ok, str(report)
    else:
        assert torch.equal(one.isfinite(), exact.bfloat16().isfinite())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_and_repeated_calls(layout):
    """A captured layer has new contents; of two eager calls the second replays a tape."""
    case = Matrix(256, 512, place="dense")
    layer = Q8Linear(case.both("cuda")[layout], activations="q8_1")
    x = torch.randn(4, 512, device="cuda").bfloat16()
    first = layer(x)
    assert torch.equal(layer(x), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, layer(x))
    assert not torch.equal(captured, first)


def test_more_than_two_to_the_31_bytes():
    """Compare the last rows of a matrix beyond 32-bit addresses with the same rows alone."""
    rows, cols = (1 << 31) // 4096 + 64, 4096
    tail = Matrix(64, cols, place="dense").both("cuda")[INTERLEAVED]
    data = torch.zeros(rows, tail.data.shape[1], dtype=torch.uint8, device="cuda")
    data[-64:] = tail.data
    large = type(tail)(data, rows, cols, INTERLEAVED)
    arrays = repack(large, SOA)
    assert torch.equal(arrays.quants[-64:], repack(tail, SOA).quants)
    assert torch.equal(repack(arrays, INTERLEAVED).data[-64:], tail.data)
    x = torch.randn(1, cols, device="cuda").bfloat16()
    assert same(matvec(arrays, x), matvec(large, x))
    assert same(dequantise(arrays)[-64:], dequantise(tail))
