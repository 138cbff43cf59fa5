"""AttentionConfig refuses configs for which no kernel exists, naming value and limit, and no
others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmha.config import AttentionConfig
from fmha.plan import make_plan, plan_unchecked
from fmha.sm100.layout import Layout
from tests.fmha.arithmetic import broken_rules, columns, shared_bytes

EXAMPLES = 2000


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"head_dim": 72}, NotImplementedError, ("72", "multiples of 16")),
        ({"v_head_dim": 528}, NotImplementedError, ("64 with v_head_dim 528", "to 512")),
        ({"dtype": "fp8"}, NotImplementedError, ("fp8", "bf16", "fp16")),
        ({"out_dtype": "fp64"}, NotImplementedError, ("fp64", "fp32")),
        ({"page_size": -16, "kv_lens": True}, ValueError, ("page_size -16", "at least 1")),
        ({"page_size": 16}, ValueError, ("pages without kv_lens",)),
        (
            {"page_size": 16, "kv_lens": True, "varlen_k": True},
            ValueError, ("pages conflict with cu_seqlens_k",),
        ),
        ({"sink_tokens": True}, ValueError, ("without a left window",)),
        ({"sinks": True, "normalize": False}, ValueError, ("sinks", "normalize=False")),
        ({"rope_dim": 7}, ValueError, ("7", "64")),
        ({"rope_dim": 66}, ValueError, ("66", "64")),
        ({"k_stages": -1}, ValueError, ("k_stages -1", "at least 1")),
        ({"v_stages": -1}, ValueError, ("v_stages -1", "at least 1")),
        ({"rescale_log2": 16.0}, ValueError, ("16", "15")),
        ({"rescale_log2": -2.0}, ValueError, ("-2", "0")),
        # Q 16 KiB, 13 + 1 pieces of 16 KiB, a panel of O, 2 KiB of barriers and numbers of rows.
        ({"k_stages": 13, "v_stages": 1}, ValueError, ("264192 bytes", "sK 13 x 16384", "232448")),
        # Q 64 KiB, K 4 x 16 KiB, V 3 x 32 KiB, a panel of O 16 KiB, 2 KiB.
        (
            {"head_dim": 256, "k_stages": 4, "v_stages": 3},
            ValueError, ("247808 bytes", "232448"),
        ),
        ({"group": 0}, ValueError, ("group 0", "at least 1")),
        ({"tile_m": 64}, NotImplementedError, ("tile_m 64", "128")),
        ({"ctas": 2}, NotImplementedError, ("ctas 2", "0")),
        ({"tile_n": 72}, NotImplementedError, ("tile_n 72", "80")),
        ({"head_dim": 256, "tile_n": 96}, ValueError, ("tile_n 96", "128")),
        ({"polynomial": 17}, ValueError, ("17", "16")),
        ({"schedule": "fast"}, NotImplementedError, ("fast", "base", "pingpong")),
        (
            {"head_dim": 192, "v_head_dim": 128, "schedule": "pingpong"},
            ValueError, ("pingpong", "head_dim 192", "98304 bytes"),
        ),
        ({"head_dim": 512, "v_stages": 1}, ValueError, ("v_stages 1", "at least 2")),
    ],
)  # fmt: skip
def test_refusals_name_value_and_limit(change, error, words):
    with pytest.raises(error) as raised:
        make_plan(replace(AttentionConfig(), **change))
    assert all(word in str(raised.value) for word in words), raised.value


def test_output_dtype_follows_normalisation():
    assert AttentionConfig(dtype="fp16").o_dtype == "fp16"
    assert AttentionConfig(dtype="fp16", normalize=False).o_dtype == "fp32"
    assert AttentionConfig(dtype="fp16", normalize=False, out_dtype="bf16").o_dtype == "bf16"


def test_p_waits_in_tensor_memory_where_it_can():
    for head_dim in (64, 96, 128, 256):
        assert not Layout(AttentionConfig(head_dim=head_dim)).p_in_smem
    assert Layout(AttentionConfig(head_dim=512)).p_in_smem


def rarely(wrong: tuple, *right: object) -> st.SearchStrategy:
    """Draw one of `right`, and in about one draw of forty one of `wrong`."""
    return st.sampled_from(right * -(-39 * len(wrong) // len(right)) + wrong)


DIMS = ((64, 0), (64, 64), (96, 0), (128, 0), (192, 128), (256, 0), (512, 0))
STAGES = st.tuples(
    rarely((-1,), *(0,) * 6, *range(1, 8), 11), rarely((-2,), *(0,) * 6, *range(1, 7), 11)
)
CONFIGS = st.builds(
    lambda dims, stages, **fields: AttentionConfig(
        head_dim=dims[0], v_head_dim=dims[1], k_stages=stages[0], v_stages=stages[1], **fields
    ),
    dims=rarely(((72, 0), (64, 120), (0, 0), (1024, 0)), *DIMS),
    stages=STAGES,
    dtype=rarely(("fp32", "fp8"), "bf16", "fp16"),
    out_dtype=rarely(("fp64",), "", "bf16", "fp16", "fp32", "e4m3"),
    page_size=rarely((4, 48, 192, -16), 0, 0, 8, 16, 32, 64, 128, 256),
    rope_dim=rarely((1, 63, -2, 600), 0, 2, 32, 64, 96, 128),
    schedule=rarely(("fast",), "", "base", "pingpong"),
    rescale_log2=rarely((-0.5, 15.5, 16.0), -1.0, 0.0, 8.0, 15.0),
    left=st.booleans(),
    group=rarely((0,), 1, 1, 5, 8),
    **{name: rarely((True,), False) for name in ("sink_tokens", "sinks", "varlen_k")},
    **{name: rarely((False,), True) for name in ("normalize", "kv_lens")},
)


def test_check_agrees_with_arithmetic_done_by_hand():
    verdicts = []

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(CONFIGS)
    def agrees(config):
        broken = broken_rules(config)
        verdicts.append(not broken)
        if broken:
            with pytest.raises((ValueError, NotImplementedError)) as raised:
                make_plan(config)
            assert any(word in str(raised.value) for word in broken)
            return
        plan = make_plan(config)
        assert plan.smem.bytes == shared_bytes(config, *plan.layout.stages)
        assert plan.tmem.allocated == columns(config)

    agrees()
    assert len(verdicts) >= EXAMPLES
    assert EXAMPLES / 5 < sum(verdicts) < EXAMPLES * 4 / 5, "both verdicts are to be frequent"


@pytest.mark.parametrize("schedule", ["base", "pingpong"])
@pytest.mark.parametrize("dims", DIMS)
def test_free_rings_are_as_deep_as_is_useful_and_fits(dims, schedule):
    config = AttentionConfig(head_dim=dims[0], v_head_dim=dims[1], schedule=schedule, kv_lens=True)
    if broken_rules(config):
        return  # there is nothing to fill
    k, v = plan_unchecked(config).layout.stages
    k_pieces, v_pieces = {192: (3, 1), 256: (2, 1), 512: (2, 2)}.get(dims[0], (1, 1))
    assert shared_bytes(config, k, v) <= 232_448
    assert k >= k_pieces
    assert v >= v_pieces
    k_depth, v_depth = k / k_pieces, v / v_pieces
    assert max(k_depth, v_depth) <= 3
    one_more = (k + 1, v) if k_depth <= v_depth else (k, v + 1)
    assert min(k_depth, v_depth) == 3 or shared_bytes(config, *one_more) > 232_448
    # With one of them given, the other one fills what is left.
    for wish in ({"k_stages": k_pieces}, {"v_stages": v_pieces}):
        k, v = plan_unchecked(replace(config, **wish)).layout.stages
        free_depth = v / v_pieces if "k_stages" in wish else k / k_pieces
        one_more = (k, v + 1) if "k_stages" in wish else (k + 1, v)
        assert free_depth == 3 or shared_bytes(config, *one_more) > 232_448
