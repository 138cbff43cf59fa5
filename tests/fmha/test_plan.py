"""The plans of both schedules against numbers derived by hand."""

from __future__ import annotations

import pytest

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from kernelkit import hw

KIB = 1024


@pytest.fixture
def plan():
    return make_plan(AttentionConfig())


def test_six_warps_keep_their_registers(plan):
    assert [(role.name, role.first_warp, role.last_warp) for role in plan.roles.roles] == [
        ("softmax", 0, 3), ("mma", 4, 4), ("load", 5, 5),
    ]  # fmt: skip
    assert plan.roles.threads == 192
    assert all(role.registers is None for role in plan.roles.roles)
    assert 192 * hw.REGISTERS_PER_THREAD <= hw.REGISTERS_PER_SM


def test_sixteen_warps_share_all_registers():
    roles = make_plan(AttentionConfig(schedule="pingpong")).roles
    assert roles.threads == 512
    assert sum(role.registers * role.warps * 32 for role in roles.roles) == hw.REGISTERS_PER_SM
    assert [(role.name, role.warps) for role in roles.roles] == [
        ("softmax", 8), ("correction", 4), ("mma", 1), ("load", 1), ("idle", 2),
    ]  # fmt: skip


def test_arrivals_of_two_tiles():
    # Each of two tiles has its own warpgroup of 128 threads, and the correction warps serve both.
    edges = make_plan(AttentionConfig(schedule="pingpong")).edges
    full = {edge.name: edges.full(edge.name).arrivals for edge in edges.edges}
    assert full == {
        "q": 1, "k": 1, "v": 1, "s": 1, "p": 128, "o": 1, "rescaled": 128, "row": 128, "out": 128,
    }  # fmt: skip
    assert {edge.name for edge in edges.edges if edge.stages == 2} == {
        "q", "s", "p", "o", "rescaled", "row", "out",
    }  # fmt: skip


def test_arrivals(plan):
    # TMA and the tensor core signal once; 4 warps of 32 threads signal P and O.
    full = {edge.name: plan.edges.full(edge.name).arrivals for edge in plan.edges.edges}
    assert full == {"q": 1, "k": 1, "v": 1, "s": 1, "p": 128, "o": 1, "out": 128}
    assert [plan.edges.empty(name).arrivals for name in "kv"] == [1, 1]
    with pytest.raises(ValueError, match="freed by p"):
        plan.edges.empty("s")


def test_a_pair_signals_its_leader():
    plan = make_plan(AttentionConfig(head_dim=512))
    assert plan.edges.full("p").arrivals == 2 * 128, "both CTAs have written their rows of P"
    assert plan.edges.full("k").arrivals == 1
    assert plan.edges.full("k").tx_bytes == 2 * 64 * 256 * 2, "the keys of both CTAs"
    assert plan.edges.full("out").arrivals == 128, "each CTA stores its own rows"


def test_packed_rows_are_gathered_and_stored_by_threads():
    plan = make_plan(AttentionConfig(pack_heads=True))
    assert plan.edges.full("q").arrivals == 128
    assert plan.edges["q"].tx_bytes == 0
    assert "out" not in [edge.name for edge in plan.edges.edges]


@pytest.mark.parametrize(
    "ragged", [{"kv_lens": True}, {"varlen_k": True}, {"kv_lens": True, "page_size": 16}]
)
def test_the_tile_with_the_end_goes_past_the_softmax(plan, ragged):
    assert "tail" not in [edge.name for edge in plan.edges.edges]
    tail = make_plan(AttentionConfig(head_dim=256, **ragged)).edges["tail"]
    assert (tail.producer, tail.consumer) == ("load", "softmax")
    assert tail.tx_bytes == 128 * 256 * 2


def test_bytes_on_the_edges(plan):
    # 128 rows x 64 columns x 2 bytes.
    assert {plan.edges[name].tx_bytes for name in "qkv"} == {16 * KIB}
    assert {plan.edges[name].tx_bytes for name in "spo"} == {0}


def test_shared_memory(plan):
    # q 1, k and v 2 x 3 each, s 2, p 2, o 1, out 1: 19 barriers of 8 bytes.
    assert plan.edges.barrier_bytes == 152
    assert plan.smem.offsets() == {
        "barriers": (0, 152),
        "tmem_base": (152, 156),
        "sQ": (1 * KIB, 17 * KIB),
        "sK": (17 * KIB, 65 * KIB),
        "sV": (65 * KIB, 113 * KIB),
        "sO": (1 * KIB, 17 * KIB),
    }
    assert plan.smem.bytes == 113 * KIB


def test_shared_memory_of_a_pair():
    # Q 64 rows, K 64 keys x 256 columns, V 128 keys x 64 columns, P 64 x 128, O over Q.
    plan = make_plan(AttentionConfig(head_dim=512))
    assert plan.layout.stages == (2, 4)
    offsets = plan.smem.offsets()
    assert offsets["statistics"] == (192, 192 + 4 * 128 * 4)
    assert {name: offsets[name] for name in ("sQ", "sK", "sV", "sP", "sO")} == {
        "sQ": (3 * KIB, 67 * KIB),
        "sK": (67 * KIB, 131 * KIB),
        "sV": (131 * KIB, 195 * KIB),
        "sP": (195 * KIB, 211 * KIB),
        "sO": (3 * KIB, 67 * KIB),
    }


@pytest.mark.parametrize(
    ("config", "ranges"),
    [
        (
            # Two fp32 S of 128 columns; 128 16-bit weights are 64 columns, the tail of their S.
            AttentionConfig(),
            {"S0": (0, 128), "P0": (64, 128), "S1": (128, 256), "P1": (192, 256), "O0": (256, 320)},
        ),
        (
            AttentionConfig(head_dim=128, p_path="smem"),
            {"S0": (0, 128), "S1": (128, 256), "O0": (256, 384)},
        ),
        (
            AttentionConfig(head_dim=256, p_path="smem"),
            {"S0": (0, 128), "S1": (128, 256), "O0": (256, 512)},
        ),
        (
            AttentionConfig(head_dim=128, schedule="pingpong"),
            {
                "S0": (0, 128), "P0": (64, 128), "S1": (128, 256), "P1": (192, 256),
                "O0": (256, 384), "O1": (384, 512),
            },
        ),
        # 64 rows take all lanes: their S 64 columns, their O half of 512.
        (AttentionConfig(head_dim=512), {"S0": (0, 64), "S1": (64, 128), "O0": (128, 384)}),
    ],
)  # fmt: skip
def test_tensor_memory(config, ranges):
    plan = make_plan(config)
    assert {item.name: (item.begin, item.end) for item in plan.tmem.ranges} == ranges
    assert plan.tmem.allocated == 512


@pytest.mark.parametrize(
    ("dims", "path", "pieces", "stages"),
    [
        ((64, 64), "tmem", (1, 1), (3, 3)),
        ((64, 64), "smem", (1, 1), (3, 3)),
        ((96, 96), "tmem", (1, 1), (3, 3)),
        ((96, 96), "smem", (1, 1), (3, 3)),
        ((128, 128), "tmem", (1, 1), (3, 3)),
        ((128, 128), "smem", (1, 1), (3, 2)),
        ((192, 128), "tmem", (3, 1), (7, 2)),
        ((192, 128), "smem", (3, 1), (5, 2)),
        ((256, 256), "tmem", (2, 2), (3, 2)),
        ((256, 256), "smem", (2, 2), (2, 2)),
        ((512, 512), "smem", (2, 4), (2, 4)),
    ],
)
def test_pieces_and_rings(dims, path, pieces, stages):
    layout = make_plan(AttentionConfig(dims[0], dims[1], p_path=path)).layout
    assert (layout.k_pieces, layout.v_pieces) == pieces
    assert layout.stages == stages
