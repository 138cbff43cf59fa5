"""What ptxas made of the softmax loop: instructions, spills, and where it publishes.

Counted between loop head and back edge, per warp and 128 x 128 tile, without the correction of O.
The late publish is a trap that no result shows: the MMA warp waits longer, and that is all.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fmha.config import AttentionConfig
from fmha.sm100.compile import compile_attention
from tests.house.source import ROOT

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    import _softmax_sass
    from _sass import HOW_TO_GET_TOOLS, tools_found

pytestmark = pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS)

ONE_SIDED = {"right": True}
TWO_SIDED = {"right": True, "left": True}
SINK_TOKENS = {**TWO_SIDED, "sink_tokens": True}
SOFTCAP = {**SINK_TOKENS, "softcap": True}

# mask -> most instructions of (unmasked loop, masked loop)
BUDGETS = (
    (ONE_SIDED, (515, 690)),
    (TWO_SIDED, (515, 720)),
    (SINK_TOKENS, (515, 720)),
    (SOFTCAP, (900, 1075)),
)
LATEST_STATISTICS, LATEST_READY = 0.60, 0.90
ROW_SUM = 60  # of its 65 packed additions, at least so many behind the arrival that signals P
SOFTCAP_WORK = 384  # per tile: 128 exponentials, 128 reciprocals, 64 products, 64 sums

ALL_FIELDS = (
    {},
    {"kv_lens": True, "q_offset": True, "right": True, "sinks": True, "rope_dim": 64},
    {"varlen_q": True, "varlen_k": True, "left": True, "softcap": True, "out_dtype": "fp32"},
    {"page_size": 64, "kv_lens": True, **SINK_TOKENS, "pack_heads": True, "dtype": "fp16"},
    {"normalize": False, "pack_heads": True, "pdl": True, "varlen_q": True},
)
DIMS = ((64, 0), (96, 0), (128, 0), (192, 128), (256, 0), (512, 0))


@pytest.fixture(scope="module")
def static(tmp_path_factory):
    """config -> its figures; the cubin is read once."""
    folder, known = tmp_path_factory.mktemp("cubins"), {}

    def read(config: AttentionConfig) -> _softmax_sass.Static:
        if config not in known:
            cubin = folder / f"{len(known)}.cubin"
            cubin.write_bytes(compile_attention(config).artifacts.CUBIN)
            known[config] = _softmax_sass.static(cubin)
        return known[config]

    return read


def name(value: object) -> str:
    """A test id: fields that are set."""
    return "+".join(value) or "plain" if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("p_path", ["tmem", "smem"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("mask", "budget"), BUDGETS, ids=name)
def test_budget_of_the_softmax_loop(static, head_dim, p_path, mask, budget):
    figures = static(AttentionConfig(head_dim=head_dim, p_path=p_path, **mask))
    assert (figures.stack, figures.spills) == (0, 0)
    # Two copies, each whole: nothing rolled up inside them, split off, or left in straight code.
    assert sorted(loop.masked for loop in figures.loops) == [False, True]
    assert [loop.nested for loop in figures.loops] == [(), ()]
    assert (figures.others, figures.outside) == ({}, 0)
    for loop in figures.loops:
        assert loop.tiles == 1
        assert loop.total <= budget[loop.masked]
        assert loop.correction
        assert loop.opcodes()["R2P"] == (16 if loop.masked else 0)
        check_publishes(loop, softcap="softcap" in mask)


def check_publishes(loop: _softmax_sass.SoftmaxLoop, *, softcap: bool) -> None:
    """Early statistics, and P before the row sum.

    Softcap makes the part before P longer and nothing else, so it is left out of the shares.
    """
    places = loop.publishes()
    body = len(loop.body) - (SOFTCAP_WORK if softcap else 0)
    behind = len(loop.body) * (1 - places.ready)
    assert 1 - behind / body <= LATEST_READY
    assert places.adds_after >= ROW_SUM
    if places.statistics is not None:
        behind = len(loop.body) * (1 - places.statistics)
        assert 1 - behind / body <= LATEST_STATISTICS


def test_statistics_of_a_pair_are_stored_early(static):
    """Only there do two threads share a row, and one waits for the maximum of the other."""
    for loop in static(AttentionConfig(head_dim=512, p_path="smem", **ONE_SIDED)).loops:
        places = loop.publishes()
        assert places.statistics <= LATEST_STATISTICS
        assert places.ready <= LATEST_READY


@pytest.mark.matrix
@pytest.mark.parametrize("fields", ALL_FIELDS, ids=name)
@pytest.mark.parametrize("p_path", ["tmem", "smem"])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), DIMS)
def test_no_config_spills(static, head_dim, v_head_dim, p_path, fields):
    config = AttentionConfig(head_dim=head_dim, v_head_dim=v_head_dim, p_path=p_path)
    config = replace(config, **fields)
    try:
        config.check()
    except (ValueError, NotImplementedError) as refusal:
        pytest.skip(str(refusal))
    figures = static(config)
    assert (figures.stack, figures.spills) == (0, 0)
    assert figures.others == {}
