"""Repacking and dequantising in the emulator, under its checker: bit for bit the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernelkit.call.launch import Target
from lab.problems.grouped_gemm import checked
from q8_0 import Weights, dequantise, reference, repack
from q8_0.blocks import BLOCK, INTERLEAVED, LAYOUTS, SOA, interleaved_bytes
from q8_0.choose import width_of
from q8_0.config import DequantiseConfig, RepackConfig
from q8_0.launch import MOST_FLAT
from q8_0.launch import _launch as run_kernel
from q8_0.params import DequantiseParams, RepackParams, WeightWords
from tests.q8_0.cases import DTYPES, Matrix, same

ARCHS = ("sm_100a", "sm_90a", "sm_89", "sm_120a")
each_arch = pytest.mark.parametrize("arch", ARCHS)
pytestmark = pytest.mark.usefixtures("poisoned_outputs")
# A tile is 256 blocks; 8 blocks are whole vectors of 16 bytes.
CASES = [
    Matrix(1, 32, False, "dense"),
    Matrix(3, 96, False, "dense"),
    Matrix(2, 32 * 256, False, "dense"),
    Matrix(5, 32 * 71, False, "dense"),
    Matrix(3, 32 * 9, False),
    Matrix(2, 32 * 259, False),
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
    """Accesses have the largest width that the address allows; nothing after the matrix is
    written."""
    case = Matrix(2, 160, False, "dense")
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


def test_one_row_at_an_odd_stride():
    """The stride of a single row does not matter."""
    case = Matrix(1, 64, False, "dense")
    both = case.both()
    inner = torch.zeros(1, interleaved_bytes(64) + 1, dtype=torch.uint8)[:, :-1]
    inner.copy_(both[INTERLEAVED].data)
    weights = Weights(inner, 1, 64, INTERLEAVED)
    assert inner.stride(0) % 2
    with checked():
        assert torch.equal(repack(weights, SOA).data, both[SOA].data)
        assert torch.equal(dequantise(weights), dequantise(both[SOA]))


# Around 31 and 32 bits, and the most weights that are treated as one row.
@pytest.mark.parametrize("cols", [1 << 31, (1 << 32) + BLOCK, MOST_FLAT - BLOCK])
def test_the_first_tile_of_very_many_weights(cols):
    """Contiguous rows are one long row, of more weights than 32 bits count. One CTA of each kernel
    runs, whose memory exists."""
    case, target = Matrix(1, BLOCK * 256, False, "dense"), Target("emulate", "sm_90a")
    both, device = case.both(), torch.device("cpu")
    words = {layout: replace(WeightWords.of(w, flat=True), cols=cols) for layout, w in both.items()}
    for to_soa in (True, False):
        layout = SOA if to_soa else INTERLEAVED
        made = replace(both[layout], data=torch.zeros_like(both[layout].data))
        given = words | {layout: replace(WeightWords.of(made, flat=True), cols=cols)}
        config = RepackConfig(to_soa)
        params = RepackParams(
            blocks=given[INTERLEAVED], arrays=given[SOA], tiles=-(-cols // (BLOCK * config.tile))
        )
        run_kernel(config, params, 1, target, device)
        assert torch.equal(made.data, both[layout].data)
    out, config = torch.zeros(1, BLOCK * 256), DequantiseConfig(SOA, "fp32")
    params = DequantiseParams(
        weights=words[SOA], out=out, out_stride=4 * cols, tiles=-(-cols // config.tile)
    )
    run_kernel(config, params, 1, target, device)
    exact = reference.dequantise(both[SOA], torch.float32)
    assert same(out[:, : config.tile], exact[:, : config.tile])


def test_a_layout_that_they_are_in_already():
    """There is no launch and no copy."""
    for layout, weights in Matrix(1, 64).both().items():
        assert repack(weights, layout) is weights


@each_arch
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantise(dtype, arch):
    for case in (Matrix(1, 32, False), Matrix(3, 32 * 40, False, "dense"), Matrix(3, 96, False)):
        for layout, weights in case.both().items():
            with checked():
                found = dequantise(weights, DTYPES[dtype], arch=arch)
            assert same(found, reference.dequantise(weights, DTYPES[dtype])), (case, layout)


def test_dequantise_more_than_a_tile():
    """Separate and contiguous rows, several CTAs each."""
    for place in ("apart", "dense"):
        case = Matrix(2, 32 * 300, False, place)
        found = [dequantise(weights, torch.float32) for weights in case.both().values()]
        exact = reference.dequantise(case.both()[SOA], torch.float32)
        assert all(same(each, exact) for each in found)


def test_views_of_arrays():
    quants, scales = Matrix(3, 64, False).parts()
    weights = reference.packed(quants, scales, SOA)
    assert torch.equal(weights.quants, quants)
    assert torch.equal(weights.scales.view(torch.int16), scales.view(torch.int16))
    assert weights.quants.data_ptr() == weights.data.data_ptr()
    assert weights.nbytes == weights.data.numel() == 3 * 2 * 34


def test_the_layouts_are_the_two():
    assert LAYOUTS == (INTERLEAVED, SOA)
