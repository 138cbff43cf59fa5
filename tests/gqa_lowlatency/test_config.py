"""DecodeConfig's errors name value and limit; the cluster is chosen by its rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gqa_lowlatency.arguments import Arguments
from gqa_lowlatency.choose import (
    MACHINES,
    TILE,
    choose_cluster,
    choose_columns,
    choose_config,
    choose_num_splits,
    choose_step,
    choose_warps,
    most_sms,
    one_to_an_sm,
)
from gqa_lowlatency.config import CLUSTERS, COLUMNS, HEAD_DIMS, MAX_Q_TOKENS, DecodeConfig
from gqa_lowlatency.launch import check_config
from gqa_lowlatency.portable.plan import PortablePlan
from gqa_lowlatency.sm100.plan import make_plan
from kernelkit.call.launch import Target

quietly = settings(max_examples=300, derandomize=True, database=None, deadline=None)
ARCHS = st.sampled_from(sorted(MACHINES))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"head_dim": 96}, NotImplementedError, ("96", "64", "512")),
        ({"dtype": "fp32"}, NotImplementedError, ("fp32", "bf16")),
        ({"kv_dtype": "e5m2"}, NotImplementedError, ("e5m2", "e4m3")),
        ({"kv_dtype": "fp16"}, NotImplementedError, ("fp16", "bf16")),
        ({"out_dtype": "fp64"}, NotImplementedError, ("fp64", "fp32")),
        ({"cluster": 3}, NotImplementedError, ("cluster 3", "16")),
        ({"cluster": 32}, NotImplementedError, ("cluster 32", "16")),
        ({"max_columns": 24}, NotImplementedError, ("24", "32")),
        ({"group": 0}, ValueError, ("group 0", "1")),
        ({"q_tokens": 9}, ValueError, ("9", "8")),
        ({"q_tokens": 0}, ValueError, ("0", "8")),
        ({"page_size": -16, "lens": True}, ValueError, ("page_size -16", "at least 1")),
        ({"page_size": 16}, ValueError, ("pages without kv_lens",)),
        ({"sink_tokens": True}, ValueError, ("without a window",)),
        ({"kv_ready": True}, ValueError, ("without pdl",)),
        ({"early": True, "pdl": True}, ValueError, ("early without kv_ready",)),
        ({"owners": 4, "cluster": 2}, ValueError, ("owners 4", "cluster 2")),
        ({"owners": 3, "cluster": 4}, ValueError, ("owners 3", "8 columns")),
        ({"owners": -1, "cluster": 4}, ValueError, ("owners -1",)),
    ],
)
def test_refusals_name_value_and_limit(change, error, words):
    with pytest.raises(error) as raised:
        replace(DecodeConfig(), **change).check_values()
    assert all(word in str(raised.value) for word in words), raised.value


def test_too_many_rows_for_a_cta_of_hopper_are_refused():
    config = DecodeConfig(head_dim=256, group=64, max_columns=64)
    with pytest.raises(NotImplementedError, match="64 columns of head_dim 256 with 8 warps"):
        check_config(config, "sm_90a")
    config = DecodeConfig(head_dim=64, group=64, cluster=16, owners=1)
    with pytest.raises(ValueError, match="bytes of shared memory, limit 232448"):
        check_config(config, "sm_90a")


@quietly
@given(st.integers(1, 300), st.integers(1, MAX_Q_TOKENS), st.sampled_from((0, *COLUMNS)))
def test_rows_stand_in_as_few_columns_as_hold_them(group, tokens, limit):
    config = DecodeConfig(group=group, q_tokens=tokens, max_columns=limit)
    columns, rows = config.columns, config.rows
    assert columns in COLUMNS
    assert columns <= (limit or COLUMNS[-1])
    assert config.row_tiles * columns >= rows
    assert (config.row_tiles - 1) * columns < rows
    smaller = [n for n in COLUMNS if n < columns]
    assert not smaller or smaller[-1] < min(rows, limit or rows) or config.row_tiles > 1


@quietly
@given(ARCHS, st.integers(0, 300_000), st.integers(0, 5000), st.booleans(), st.integers(1, 200))
def test_the_choice_of_a_cluster(arch, keys, clusters, invariant, at_once):
    machine = MACHINES[arch]
    width = choose_cluster(
        arch,
        keys,
        clusters,
        batch_invariant=invariant,
        co_scheduled=lambda width: at_once // width,
    )
    assert width in CLUSTERS
    assert width <= machine.widest
    assert width == 1 or width * TILE < keys + TILE, "more CTAs than tiles"
    few = width > 1 and not invariant and clusters <= machine.sms
    assert not few or clusters <= at_once // width
    assert not few or clusters * width <= machine.sms, "more CTAs than SMs"
    assert width == 1 or invariant or at_once >= width
    if invariant:
        assert width == choose_cluster(arch, keys, clusters + 7, batch_invariant=True)


def at_once(ctas):
    """Options of a GPU that runs `ctas` CTAs at the same time."""
    return {"co_scheduled": lambda width: ctas // width}


WIDTHS = [
    ("sm_90a", 8192, 8, {}, 8),  # 8 KV heads of one entry: 64 CTAs, wider is slower
    ("sm_90a", 8192, 64, {}, 2),
    ("sm_90a", 8192, 132, {}, 1),
    ("sm_90a", 300, 1, {}, 2),  # 3 tiles
    ("sm_90a", 0, 1, {}, 1),
    ("sm_100a", 8192, 8, {}, 16),
    ("sm_100a", 8192, 64, {}, 2),
    # The cluster is no wider than what runs at once.
    ("sm_90a", 8192, 15, at_once(120), 8),
    ("sm_90a", 8192, 16, at_once(120), 4),
    ("sm_90a", 8192, 30, at_once(120), 4),
    ("sm_90a", 8192, 31, at_once(120), 2),
    ("sm_90a", 8192, 61, at_once(120), 1),
    # Batch-invariant bits do not depend on a limit of the batch either.
    ("sm_90a", 8192, 61, at_once(0) | {"batch_invariant": True}, 8),
    # Many clusters with long shares are halved.
    ("sm_90a", 8192, 132, at_once(132), 1),
    ("sm_90a", 8192, 133, at_once(132), 2),
    ("sm_90a", 8192, 512, at_once(132), 2),
    ("sm_90a", 8191, 512, {}, 1),
    ("sm_90a", 8192, 512, at_once(0), 1),
]


@pytest.mark.parametrize(("arch", "keys", "clusters", "options", "expected"), WIDTHS)
def test_the_width_of_a_cluster(arch, keys, clusters, options, expected):
    found = choose_cluster(arch, keys, clusters, **options)
    assert found == expected <= MACHINES[arch].widest
    if "co_scheduled" in options:
        assert found <= choose_cluster(arch, keys, clusters, **options | {"co_scheduled": None})


@pytest.mark.parametrize(
    ("arch", "keys", "clusters", "cluster", "expected"),
    [
        ("sm_90a", 8192, 1, 8, 4),  # 16 of 64 tiles a part, two for each of its CTAs
        ("sm_90a", 65536, 1, 8, 16),  # 128 of 132 SMs
        ("sm_90a", 65536, 4, 8, 4),
        ("sm_90a", 65536, 8, 8, 1),  # half of the SMs have work already
        ("sm_90a", 8191, 1, 8, 1),
        ("sm_90a", 65536, 1, 4, 1),  # a narrower cluster was requested
        ("sm_100a", 65536, 1, 16, 9),
    ],
)
def test_few_heads_with_many_keys_take_several_clusters(arch, keys, clusters, cluster, expected):
    assert choose_num_splits(arch, keys, clusters, cluster) == expected
    assert choose_num_splits(arch, keys, clusters, cluster, batch_invariant=True) == 1


@pytest.mark.parametrize(
    ("keys", "ctas", "elements", "warps"),
    [
        (1024, 64, 1024, 16),
        (511, 64, 1024, 0),
        (8192, 64, 1024, 0),
        (1024, 133, 1024, 0),
        (1024, 64, 2048, 0),
    ],
)
def test_long_shares_take_sixteen_warps(keys, ctas, elements, warps):
    assert choose_warps("sm_90a", keys, ctas, elements) == warps
    assert choose_warps("sm_100a", keys, ctas, elements) == 0


@pytest.mark.parametrize(
    ("keys", "group", "head_dim", "fp8", "step"),
    [
        (512, 8, 128, True, 32),
        (511, 8, 128, True, 0),
        (512, 8, 256, True, 0),
        (512, 16, 64, True, 0),
        (512, 8, 128, False, 0),
    ],
)
def test_long_shares_in_e4m3_take_steps_of_32_keys(keys, group, head_dim, fp8, step):
    assert choose_step("sm_90a", keys, group, head_dim, fp8=fp8) == step
    assert choose_step("sm_100a", keys, group, head_dim, fp8=fp8) == 0
    q, kind = torch.zeros(1, group, head_dim).bfloat16(), torch.float8_e4m3fn
    k = torch.zeros(1, keys * 8, 1, head_dim, dtype=kind if fp8 else torch.bfloat16)
    config = choose_config(Arguments(q, k, k), Target("emulate", "sm_90a"))
    assert (config.cluster, config.step) == (8, step)
    assert not (step and config.warps)


def test_wishes_of_warps_and_steps_suit_each_other():
    """Sixteen warps cannot hold scores of 32 keys with 128 dims: 6 spills. Steps of 16, if
    requested, are the default ones."""
    target, given = Target("emulate", "sm_90a"), {}
    for head_dim in (64, 128):
        q = torch.zeros(1, 8, head_dim).bfloat16()
        k = torch.zeros(1, 512 * 8, 1, head_dim, dtype=torch.float8_e4m3fn)
        for name, wish in (("warps", 16), ("warps", 8), ("step", 16)):
            config = choose_config(Arguments(q, k, k, **{name: wish}), target)
            given[head_dim, name, wish] = config.warps, config.step
    assert given == {
        (64, "warps", 16): (16, 32),
        (128, "warps", 16): (16, 0),
        **{(dim, "warps", 8): (8, 32) for dim in (64, 128)},
        **{(dim, "step", 16): (16, 16) for dim in (64, 128)},
    }


@pytest.mark.parametrize(
    ("keys", "ctas", "alone"),
    [(511, 64, False), (512, 132, True), (4095, 133, False), (4096, 512, True), (4096, 1024, True)],
)
def test_deep_rings_where_a_second_cta_would_not_help(keys, ctas, alone):
    assert one_to_an_sm("sm_90a", keys, ctas) == alone
    assert not one_to_an_sm("sm_100a", keys, ctas)


@pytest.mark.parametrize(
    ("arch", "pdl", "ctas", "beside"),
    [
        ("sm_100a", False, 148, False),
        ("sm_100a", False, 149, True),
        ("sm_100a", True, 149, False),
        ("sm_90a", False, 512, False),
    ],
)
def test_two_ctas_share_an_sm_where_there_are_more_than_sms(arch, pdl, ctas, beside):
    q, k = torch.zeros(ctas, 1, 64), torch.zeros(ctas, 128, 1, 64)
    arguments = Arguments(q.bfloat16(), k.bfloat16(), k.bfloat16(), pdl=pdl)
    config = choose_config(arguments, Target("emulate", arch))
    assert config.beside == beside
    if arch == "sm_100a":
        assert make_plan(config).ctas_per_sm == (2 if ctas > 148 else 1)


@pytest.mark.parametrize(
    ("arch", "ctas", "most", "alone"),
    [
        ("sm_90a", 66, False, False),
        ("sm_90a", 67, True, True),
        ("sm_90a", 132, True, True),
        ("sm_90a", 133, True, False),
        ("sm_100a", 74, False, False),
        ("sm_100a", 148, True, True),
    ],
)
def test_two_grids_share_sms_where_one_leaves_half_of_them(arch, ctas, most, alone):
    assert most_sms(arch, ctas) == most
    assert one_to_an_sm(arch, 8192, ctas, pdl=True) == alone
    q, k = torch.zeros(ctas, 1, 64), torch.zeros(ctas, 128, 1, 64)
    arguments = Arguments(
        q.bfloat16(), k.bfloat16(), k.bfloat16(), pdl=True, kv_ready_before_pdl=True
    )
    config = choose_config(arguments, Target("emulate", arch))
    assert (config.cluster, config.alone) == (1, alone)
    assert config.early == (most and arch == "sm_90a")


def test_the_depth_of_a_ring_of_hopper():
    """bf16 with 128 columns: 4 KB for 16 keys of K or V; 8 columns of 8 CTAs are 4 KB of
    mailbox."""
    config = DecodeConfig(cluster=8)
    assert [PortablePlan(replace(config, warps=w)).slots for w in (4, 8, 16)] == [6, 3, 2]
    wide = replace(config, alone=True)
    assert [PortablePlan(replace(wide, warps=w)).slots for w in (4, 8, 16)] == [8, 4, 2]
    shallow = replace(wide, stages=2, pdl=True)  # two CTAs fit on no SM, with either depth
    assert 113 * 1024 < PortablePlan(shallow).smem_bytes <= 114 * 1024
    assert PortablePlan(replace(shallow, pdl=False)).smem_bytes < 80 * 1024
    assert PortablePlan(replace(config, stages=5)).slots == 5
    with pytest.raises(ValueError, match="stages 1: at least 2"):
        check_config(replace(config, stages=1), "sm_90a")
    with pytest.raises(ValueError, match="bytes of shared memory, limit 232448"):
        check_config(replace(config, stages=8, warps=16), "sm_90a")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("warps", [0, 4, 8, 16])
def test_the_chosen_columns_fit_a_cta_of_hopper(head_dim, cluster, warps):
    columns = choose_columns("sm_90a", head_dim, warps)
    tuning = {"cluster": cluster, "max_columns": columns, "warps": warps}
    if head_dim >= 256 and warps == 16:  # two slots of K and V for each of 16 warps are too much
        with pytest.raises(ValueError, match="bytes of shared memory"):
            check_config(DecodeConfig(head_dim, group=1, **tuning), "sm_90a")
        return
    for rows in range(1, columns + 1):
        check_config(DecodeConfig(head_dim, group=rows, **tuning), "sm_90a")


@pytest.mark.parametrize(
    ("options", "cluster"),
    [
        ({}, 8),
        ({"window_left": 300}, 2),
        ({"window_left": 300, "sink_tokens": 200}, 4),
        ({"window_left": 8190}, 8),
    ],
)
def test_a_window_takes_the_ctas_that_it_keeps_busy(options, cluster):
    """301 keys are three tiles, 501 are four; 8 KV heads leave room for clusters of 16."""
    q, k = torch.empty(1, 64, 128), torch.empty(1, 8192, 8, 128)
    inputs = (tensor.to("meta", torch.bfloat16) for tensor in (q, k, k))
    config = choose_config(Arguments(*inputs, **options), Target("emulate", "sm_90a"))
    assert config.cluster == cluster
