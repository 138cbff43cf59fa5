"""Experts with 4-bit weights on a Hopper GPU itself: the problems of the emulator's tests, and
random ones, natively; each runs twice and in a CUDA graph with equal bits, and is compared with
fp64.

`python -m pytest --hw -m hw tests/moe/test_mixed_hw.py` on compute capability 9.0.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import soak
from kernelkit.call.front import forget
from lab.problems.attention import same_bits
from lab.problems.mixed_gemm import Case, Layer, call
from lab.soak.campaign import replays
from lab.soak.moe import Trial
from lab.tools.place import Place, why_not_here
from tests.moe.mixed_space import CTAS, FIRST, MATRIX, QUICK, TILES

pytestmark = [pytest.mark.hw, pytest.mark.xdist_group("moe-mixed-hw")]

HERE = Place("cuda", "sm_90a", "the tests' own wish")
# Experts for several warps, some without rows, with rows that no tile divides.
GPT_OSS = replace(FIRST, k=2880, columns=2880, counts=(0, 3, 64, 1, 130, 17, 0, 9) * 5, slots=4)
LAYERS = (
    Layer(7),
    Layer(1, 2880, 2880, 8, 4),
    Layer(300, 2880, 2880, 32, 4, fmt="nvfp4"),
    Layer(129, 512, 256, 64, 8, scoring="sigmoid", shared=1, form=(1.0, 0.0, None), bias=False),
    Layer(65, 512, 256, 40, 6, shared=2, rank=(33, 42)),
    Layer(257, 512, 256, 40, 1, routing="one", tile_rows=8),
    Layer(65, 512, 256, 40, 6, rank=(0, 20), routing="elsewhere"),
)


@pytest.fixture(autouse=True)
def hopper():
    """Skip on other GPUs."""
    if reason := why_not_here(("sm_90a",)):
        pytest.skip(reason)


def check(case: Case | Layer) -> Trial:
    trial = Trial(case, HERE)
    assert trial.repeats()
    for report in trial.reports():
        assert report.ok, f"{case}: {report}"
    assert replays(trial)
    return trial


@pytest.mark.parametrize("case", [*QUICK, GPT_OSS, *MATRIX], ids=str)
def test_a_product(case):
    check(case)


@pytest.mark.parametrize("ctas", [1, CTAS, 7])
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_few_ctas_have_many_tiles(case, ctas, monkeypatch):
    whole = Trial(case, HERE).first
    monkeypatch.setattr("moe.mixed.launch.sms_of", lambda device: ctas)
    forget()
    few = Trial(case, HERE)
    forget()
    assert same_bits(whole, few.first)
    assert all(report.ok for report in few.reports())


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile.values())))
def test_every_tile_gives_the_same_bits(tile):
    case = replace(GPT_OSS, k=1440, columns=720, slots=0)
    assert same_bits(Trial(case, HERE).first, Trial(replace(case, **tile), HERE).first)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_layer(layer):
    check(layer)


def test_what_is_captured_follows_its_tensors():
    """Replays have rows of other experts, and other tokens."""
    trial = Trial(GPT_OSS, HERE)
    before = trial.first
    assert replays(trial)
    assert not torch.equal(before[0], trial.first[0])


# One CTA per tile: the number of CTAs that share one depends on the number of experts, and
# determines the order of sums.
FEW = Case((9,), 4096, 2048, form=None, split=1)


def test_weights_behind_two_gigabytes():
    """Offsets exceed 32 bits: the last of many experts has all rows."""
    inputs, experts = FEW.inputs("cuda"), 560
    data = torch.zeros(experts, inputs.w.data.shape[1], dtype=torch.uint8, device="cuda")
    factor, offsets = torch.ones(experts, device="cuda"), torch.zeros(experts + 1, device="cuda")
    data[-1], factor[-1], offsets[-1] = inputs.w.data[0], inputs.w.factor[0], FEW.rows
    assert data.nbytes > 1 << 31
    w = replace(inputs.w, data=data, factor=factor)
    found = call(FEW, inputs, w=w, offsets=offsets.int())
    assert torch.equal(found, call(FEW, inputs))


def test_tokens_behind_two_gigabytes():
    """The number of elements of x exceeds 2^31: the last tokens have all rows."""
    inputs, tokens = FEW.inputs("cuda"), 530_000
    x = torch.zeros(tokens, FEW.k, dtype=torch.bfloat16, device="cuda")
    x[-FEW.rows :] = inputs.x
    assert x.numel() > 1 << 31
    rows = torch.arange(tokens - FEW.rows, tokens, device="cuda").int()
    assert torch.equal(call(FEW, inputs, x=x, rows=rows), call(FEW, inputs))


def test_outputs_behind_two_gigabytes():
    """This concerns elements of the result, and rows that TMA fetches."""
    case = Case((9,), 64, 2048, form=None)
    inputs, rows = case.inputs("cuda"), 1_100_000
    x = torch.zeros(rows, case.k, dtype=torch.bfloat16, device="cuda")
    x[-case.rows :] = inputs.x
    offsets = torch.tensor([0, rows], device="cuda").int()
    found = call(case, inputs, x=x, offsets=offsets)
    assert found.numel() > 1 << 31
    assert torch.equal(found[-case.rows :], call(case, inputs))
    assert not found[: -case.rows].any()


@pytest.mark.parametrize("seed", range(2))
def test_random_problems(seed):
    flags = f"moe --backend cuda --seed {seed} --configs 16 --problems 240 --graphs --streams"
    assert soak.main(flags.split()) == 0


def test_random_problems_through_torch_compile():
    assert soak.main("moe --backend cuda --configs 6 --problems 18 --compile".split()) == 0


def test_random_problems_with_the_sizes_of_models():
    assert soak.main("moe --backend cuda --large --configs 8 --problems 24".split()) == 0
