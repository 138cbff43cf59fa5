"""Keys that are fetched once, on Hopper: by a pair of CTAs for both, or for both products if V is
K. The bits are the same as without, and the rules choose it where it should be chosen.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fmha.choose import decide
from fmha.config import AttentionConfig
from fmha.plan import make_plan, tiles_of
from fmha.sm90 import layout
from kernelkit.call.tensors import same_elements
from lab.problems import attention as cases
from lab.problems.attention import Case
from lab.problems.fmha import config_of
from ptxemu import Options
from tests.fmha.test_kernel import by_group
from tests.fmha.test_sm90 import ARCH, CHECKED, FRIENDLY, check

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

SHARED = {"heads": (64, 1), "dims": (512, 512), "causal": True, "pack_heads": True}
LATENT = Case(4, 170, k_is_v=True, **SHARED)
LONG = Case(8192, 8192, k_is_v=True, **SHARED)
TWO_RINGS, PAIR = {"k_stages": 2}, {"ctas": 2}


def outcome(case: Case, options: Options, config: dict[str, int]) -> tuple[tuple, int]:
    """(results, bytes that TMA fetched)."""
    config = AttentionConfig(**config)
    results, reports = cases.run_reported(case, options, arch=ARCH, config=config)
    ((report,),) = (report.launches for report in reports)
    assert not report.findings
    return results, report.bytes["tma.load"]


def test_a_latent_is_fetched_once_with_the_same_bits():
    """Four tokens in a tile each, on two CTAs at a time; three key tiles."""
    q_bytes = 4 * 64 * 512 * 2
    first, twice = outcome(LATENT, FRIENDLY, TWO_RINGS)
    assert all(report.ok for report in cases.judge(LATENT, first))
    for config, share in (({}, 2), (PAIR | TWO_RINGS, 2), (PAIR, 4)):
        results, fetched = outcome(LATENT, CHECKED, config)
        assert cases.same_bits(first, results), config
        assert twice - q_bytes == share * (fetched - q_bytes), config


@pytest.mark.parametrize(
    "case",
    by_group((
        Case(70, 200, (4, 2), 2, causal=True, pack_heads=True),
        Case(100, 130, (4, 1), dims=(96, 96), pack_heads=True),
        Case(
            0, 300, (2, 1), 3, q_lens=(130, 0, 33), dims=(128, 128), page_size=16,
            kv_lens=(160, 5, 300), causal=True, pack_heads=True,
        ),
        Case(40, 200, (8, 2), dims=(256, 256), causal=True, pack_heads=True, page_size=8,
             kv_lens=(199,)),
        Case(3, 150, (128, 1), 2, dims=(512, 512), kv_lens=(150, 0), pack_heads=True),
    )),
)  # fmt: skip
def test_pairs_of_tiles_that_heads_share_compute_the_same_bits(case):
    alone, _ = outcome(case, FRIENDLY, {"ctas": 1})
    assert all(report.ok for report in cases.judge(case, alone))
    for options in (CHECKED, FRIENDLY):
        assert cases.same_bits(alone, outcome(case, options, PAIR)[0])


@pytest.mark.parametrize(
    "case",
    by_group((
        Case(90, 250, (4, 1), dims=(192, 128), window=(60, 20), sink_tokens=5, pack_heads=True),
        Case(
            0, 300, (16, 1), 3, q_lens=(9, 0, 1), dims=(512, 512), window=(40, 0), page_size=16,
            kv_lens=(100, 5, 130), pack_heads=True, k_is_v=True,
        ),
        Case(70, 150, (2, 1), dims=(512, 512), window=(None, 9), kv_lens=(140,), k_is_v=True,
             softcap=15.0, normalize=False),
    )),
)  # fmt: skip
def test_pairs_are_right_where_a_block_shifts_the_tiles(case):
    check(dataclasses.replace(case, ctas=2), CHECKED, FRIENDLY)


@pytest.mark.parametrize(
    ("change", "arch", "once"),
    [
        ({}, ARCH, True),
        ({"window": (127, None), "kv_lens": (8000,), "page_size": 64}, ARCH, True),
        ({"k_is_v": False}, ARCH, False),
        ({"v_stages": 2}, ARCH, False),
        ({"dims": (256, 256)}, ARCH, False),
        ({}, "sm_100a", False),
    ],
    ids=["the same", "pages", "another tensor", "a ring of its own", "head dim 256", "Blackwell"],
)
def test_a_latent_is_loaded_once_where_rings_are_short(change, arch, once):
    config = config_of(dataclasses.replace(LONG, **change), arch)
    assert config.k_is_v == once
    plan = make_plan(config, arch)
    if once:
        assert plan.layout.stages == (4, 4)
        assert not plan.edges.has("v")


def test_views_are_the_same_elements_where_all_of_them_is_equal():
    whole = torch.empty(2, 8, 4)
    assert same_elements(whole, whole.view(2, 8, 4))
    others = (whole.clone(), whole[:, :4], whole[:1], whole.view(2, 4, 8), whole.view(torch.int32))
    assert not any(same_elements(whole, other) for other in others)
    assert not same_elements(whole[:, :4], whole[:, 4:])
    assert not same_elements(*torch.empty(2, 3, device="meta").split(1))


@pytest.mark.parametrize(
    ("config", "arch", "words"),
    [
        ({"k_stages": 2}, ARCH, "k_stages 2 and v_stages 0 with k_is_v.* at least 4"),
        ({"k_stages": 5}, ARCH, "k_stages 5 and v_stages 0: multiples of 2 and 2"),
        ({"v_stages": 2}, ARCH, "k_stages 0 and v_stages 2 with k_is_v"),
        ({"head_dim": 192, "v_head_dim": 128}, ARCH, "k_is_v with v_head_dim 128"),
        ({"head_dim": 128, "kv_dtype": "e4m3"}, ARCH, "k_is_v with K and V in e4m3"),
        ({}, "sm_100a", "k_is_v: False"),
    ],
)
def test_what_one_ring_cannot_do_is_refused(config, arch, words):
    with pytest.raises((ValueError, NotImplementedError), match=words):
        make_plan(AttentionConfig(**{"head_dim": 512, "k_is_v": True} | config), arch)


@pytest.mark.parametrize("window", [(None, None), (127, None)])
def test_shared_tiles_pair_up_once_their_shape_says_from_when(monkeypatch, window):
    case = dataclasses.replace(LONG, window=window)
    assert config_of(case, ARCH).ctas == 0
    told = dataclasses.replace(layout.SHAPES[512], packed=(2, 2))
    one_tile = dataclasses.replace(case, sq=1, batch=200)
    with monkeypatch.context() as patched:
        patched.setitem(layout.SHAPES, 512, told)
        tiles_of.cache_clear()
        decide.cache_clear()
        assert config_of(case, ARCH).ctas == 2
        assert config_of(one_tile, ARCH).ctas == 0
    tiles_of.cache_clear()
