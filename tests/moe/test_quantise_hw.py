"""The quantiser on the GPU itself: bits of the reference, large sizes, captured graphs.

`python -m pytest --hw -m hw tests/moe/test_quantise_hw.py`
"""

from __future__ import annotations

import pytest
import torch

from moe import reference
from moe.formats import FORMATS
from moe.quantiser.api import quantise
from tests.moe.quantise_cases import (
    Quantisation,
    Scattered,
    assert_equal,
    check,
    check_scattered,
    random_case,
)

pytestmark = [
    pytest.mark.hw,
    pytest.mark.xdist_group("quantise-hw"),
    pytest.mark.usefixtures("poisoned_outputs"),
]

LARGE = (4096, 7168)


@pytest.mark.parametrize("seed", range(200))
def test_native(seed):
    check(random_case(seed), "cuda")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_large(fmt, dtype):
    tokens, k = LARGE
    check(
        Quantisation(fmt, tokens, k, dtype, "tensor" if fmt == "nvfp4" else "", calm=True), "cuda"
    )


@pytest.mark.parametrize("scaling", ["tensor", "token", "given"])
@pytest.mark.parametrize(
    ("tokens", "choices", "k", "experts"),
    [(1, 8, 7168, 256), (700, 8, 2880, 128), (5000, 3, 48, 7)],
)
def test_scattered(tokens, choices, k, experts, scaling):
    check_scattered(Scattered("nvfp4", tokens, choices, k, experts, scaling), "cuda")


@pytest.mark.parametrize("expert_range", [(0, 1), (32, 64), (0, 128)], ids=str)
@pytest.mark.parametrize("scaling", ["token", "rows"])
def test_scattered_to_some_experts(scaling, expert_range):
    check_scattered(Scattered("nvfp4", 700, 8, 2880, 128, scaling, expert_range), "cuda")


@pytest.mark.parametrize("scaling", ["tensor", "token"])
def test_rows_of_nobody_have_no_amax(scaling):
    x, offsets = torch.randn(3000, 2880, device="cuda").bfloat16(), torch.tensor([0, 500, 1000])
    x[1000:] = torch.nan
    got = quantise(x, "nvfp4", global_scale=scaling, offsets=offsets.int().cuda())
    assert got.decode_scale[:1000].isfinite().all()


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_scattered_without_a_scale(fmt):
    check_scattered(Scattered(fmt, 3000, 8, 7168, 256), "cuda")


def test_more_than_two_to_the_31_elements():
    """Compare the last rows of a tensor beyond 32-bit addresses with the same rows alone."""
    rows, k = (1 << 31) // 7168 + 256, 7168
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
    x[-256:] = torch.randn(256, k, device="cuda")
    g = torch.ones(1, device="cuda")
    got = quantise(x, "nvfp4", global_scale=g)
    expected = quantise(x[-256:].clone(), "nvfp4", global_scale=g)
    assert torch.equal(got.data[-256:].view(torch.uint8), expected.data.view(torch.uint8))
    codes = reference.unswizzle_scales(got.scales, rows, k // 16)[-256:].view(torch.uint8)
    assert torch.equal(
        codes, reference.unswizzle_scales(expected.scales, 256, k // 16).view(torch.uint8)
    )


@pytest.mark.parametrize("scaling", ["tensor", "token", "rows"])
def test_is_captured_in_a_graph(scaling):
    """Replays have other values, rows and counts: nothing came from the host."""
    case = Quantisation("nvfp4", 300, 2880, scaling=scaling, counts=(0, 130, 2, 128), gathered=True)
    later = Quantisation("nvfp4", 300, 2880, scaling=scaling, counts=(257, 3, 0, 0), gathered=True)
    (x, options), (new_x, new_options) = case.build("cuda"), later.build("cuda")
    quantise(x, "nvfp4", **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantise(x, "nvfp4", **options)
    x.copy_(new_x)
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            value.copy_(new_options[name])
    graph.replay()
    assert_equal(captured, quantise(new_x, "nvfp4", **new_options), later.used)


def test_equal_bits_every_time():
    x = torch.randn(*LARGE, device="cuda").bfloat16()
    first = quantise(x, "nvfp4")
    for _ in range(20):
        assert_equal(quantise(x, "nvfp4"), first)
