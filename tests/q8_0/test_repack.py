"""Repacking and dequantising in the emulator, under its checker: bit for bit the reference."""

from __future__ import annotations

import pytest
import torch

from q8_0 import Weights, dequantise, reference, repack
from q8_0.blocks import INTERLEAVED, LAYOUTS, SOA, interleaved_bytes
from q8_0.choose import width_of
from q8_0.config import RepackConfig
from tests.q8_0.cases import DTYPES, Case, same
from workbench.problems.grouped_gemm import checked

ARCHS = ("sm_100a", "sm_90a", "sm_89", "sm_120a")
each_arch = pytest.mark.parametrize("arch", ARCHS)
pytestmark = pytest.mark.usefixtures("poisoned_outputs")
# A tile is 256 blocks; 8 blocks are whole vectors of 16 bytes.
CASES = [
    Case(1, 32, False, "dense"),
    Case(3, 96, False, "dense"),
    Case(2, 32 * 256, False, "dense"),
    Case(5, 32 * 71, False, "dense"),
    Case(3, 32 * 9, False),
    Case(2, 32 * 259, False),
]


@each_arch
@pytest.mark.parametrize("case", CASES, ids=str)
def test_there_and_back(case, arch):
    both = case.both()
    with checked():
        arrays = repack(both[INTERLEAVED], SOA, arch=arch)
        blocks = repack(both[SOA], INTERLEAVED, arch=arch)
    assert torch.equal(arrays.data, both[SOA].data)
    assert torch.equal(blocks.data, both[INTERLEAVED].data)
    assert (arrays.layout, blocks.layout) == (SOA, INTERLEAVED)


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_addresses_of_every_width(width):
    """The widest access that the address allows; nothing behind the matrix is written."""
    case = Case(2, 160, False, "dense")
    both, nbytes = case.both(), 2 * interleaved_bytes(160)
    memory = torch.full((nbytes + 64,), 0xFF, dtype=torch.uint8)
    begin = -memory.data_ptr() % 16 + width % 16
    inner = memory[begin : begin + nbytes].view(2, -1)
    inner.copy_(both[INTERLEAVED].data)
    assert width_of(inner.data_ptr()) == width
    with checked():
        arrays = repack(Weights(inner, 2, 160, INTERLEAVED), SOA)
    assert torch.equal(arrays.data, both[SOA].data)
    assert RepackConfig(True, width).vectors * width * 128 >= RepackConfig(True).tile_bytes


def test_a_layout_that_they_are_in_already():
    """No launch, no copy."""
    for layout, weights in Case(1, 64).both().items():
        assert repack(weights, layout) is weights


@each_arch
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise(dtype, arch):
    for case in (Case(1, 32, False), Case(3, 32 * 40, False, "dense"), Case(3, 96, False)):
        for layout, weights in case.both().items():
            with checked():
                found = dequantise(weights, DTYPES[dtype], arch=arch)
            assert same(found, reference.dequantise(weights, DTYPES[dtype])), (case, layout)


def test_dequantise_more_than_a_tile():
    """Rows apart and rows in one piece, several CTAs each."""
    for place in ("apart", "dense"):
        case = Case(2, 32 * 300, False, place)
        found = [dequantise(weights, torch.float32) for weights in case.both().values()]
        exact = reference.dequantise(case.both()[SOA], torch.float32)
        assert all(same(each, exact) for each in found)


def test_views_of_arrays():
    quants, scales = Case(3, 64, False).parts()
    weights = reference.packed(quants, scales, SOA)
    assert torch.equal(weights.quants, quants)
    assert torch.equal(weights.scales.view(torch.int16), scales.view(torch.int16))
    assert weights.quants.data_ptr() == weights.data.data_ptr()
    assert weights.nbytes == weights.data.numel() == 3 * 2 * 34


def test_the_layouts_are_the_two():
    assert LAYOUTS == (INTERLEAVED, SOA)
