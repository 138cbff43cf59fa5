"""The plans of both schedules compared with numbers derived by hand."""

from __future__ import annotations

import pytest

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from kernelkit.plan import hw

KIB = 1024


@pytest.fixture
def plan():
    return make_plan(AttentionConfig())


@pytest.mark.parametrize(("schedule", "warps"), [("base", 12), ("pingpong", 16)])
def test_warps_share_all_registers(schedule, warps):
    """At most the remainder is unused that setmaxnreg, in steps of 8, cannot assign."""
    roles = make_plan(AttentionConfig(schedule=schedule)).roles
    assert roles.warps == warps
    registers = sum(role.registers * role.threads for role in roles.roles)
    assert hw.REGISTERS_PER_SM - 8 * roles.threads < registers <= hw.REGISTERS_PER_SM
    assert [(role.name, role.warps) for role in roles.roles] == [
        ("softmax", warps - 8), ("correction", 4), ("mma", 1), ("load_qk", 1), ("load_v", 1),
        ("store", 1),
    ]  # fmt: skip


def test_arrivals_of_two_tiles():
    # Each of two tiles has its own warpgroup of 128 threads, and the correction warps serve both.
    edges = make_plan(AttentionConfig(head_dim=128, schedule="pingpong")).edges
    full = {edge.name: edges.full(edge.name).arrivals for edge in edges.edges}
    assert full == {
        "q": 1, "k": 1, "v": 1, "s": 1, "p": 128, "p_tail": 128, "o": 1, "row": 128, "out": 128,
    }  # fmt: skip
    assert all(edge.stages == 2 for edge in edges.edges)


def test_arrivals(plan):
    # TMA and the tensor core signal once; 4 warps of 32 threads signal P, and give O back.
    full = {edge.name: plan.edges.full(edge.name).arrivals for edge in plan.edges.edges}
    assert full == {"q": 1, "k": 1, "v": 1, "s": 1, "p": 128, "o": 1, "row": 128, "out": 128}
    empty = {name: plan.edges.empty(name).arrivals for name in full if name not in "sp"}
    assert empty == {"q": 1, "k": 1, "v": 1, "o": 128, "row": 128, "out": 32}
    with pytest.raises(ValueError, match="freed by p"):
        plan.edges.empty("s")


def test_p_comes_in_parts_where_there_are_two_s():
    parts = {
        dim: make_plan(AttentionConfig(head_dim=dim, schedule="pingpong")).layout.p_columns
        for dim in (64, 96, 128)
    }
    assert parts == {64: (128,), 96: (96, 32), 128: (96, 32)}


@pytest.mark.parametrize("head_dim", [256, 512])
def test_a_pair_signals_its_leader(head_dim):
    plan = make_plan(AttentionConfig(head_dim=head_dim))
    assert plan.edges.full("p").arrivals == 2 * 128, "both CTAs have written their rows of P"
    assert plan.edges.empty("o").arrivals == 2 * 128, "and have read theirs of O"
    assert plan.edges.full("k").arrivals == 1
    assert plan.edges.full("k").tx_bytes == 2 * 64 * head_dim // 2 * 2, "the keys of both CTAs"
    assert plan.edges.full("out").arrivals == 128, "each CTA stores its own rows"


@pytest.mark.parametrize(
    ("head_dim", "group", "heads", "tokens", "parts"),
    [
        (64, 1, 1, 128, 1), (64, 8, 8, 16, 1), (64, 5, 5, 25, 1), (128, 200, 100, 1, 2),
        (512, 96, 48, 1, 2),
    ],
)  # fmt: skip
def test_heads_share_tiles(head_dim, group, heads, tokens, parts):
    plan = make_plan(AttentionConfig(head_dim=head_dim, group=group))
    layout = plan.layout
    assert (layout.box_heads, layout.box_tokens, layout.head_parts) == (heads, tokens, parts)
    assert plan.edges["q"].tx_bytes == heads * tokens * head_dim * 2


@pytest.mark.parametrize(
    "ragged", [{"kv_lens": True}, {"varlen_k": True}, {"kv_lens": True, "page_size": 16}]
)
def test_the_tile_with_the_end_goes_past_the_softmax(plan, ragged):
    assert "tail" not in [edge.name for edge in plan.edges.edges]
    tail = make_plan(AttentionConfig(head_dim=256, **ragged)).edges["tail"]
    assert (tail.producer, tail.consumer) == ("load_v", "correction")
    assert tail.tx_bytes == 128 * 128 * 2


def test_bytes_on_the_edges(plan):
    # 128 rows x 64 columns x 2 bytes.
    assert {plan.edges[name].tx_bytes for name in "qkv"} == {16 * KIB}
    assert {plan.edges[name].tx_bytes for name in "spo"} == {0}


def test_shared_memory(plan):
    # Rings of two barriers a stage: q 1, k and v 3 each, o 1, row 1, out 2; s and p 3 each.
    assert plan.edges.barrier_bytes == 8 * (2 * 11 + 6)
    assert plan.smem.offsets() == {
        "barriers": (0, 224),
        "tmem_base": (224, 228),
        "statistics": (240, 240 + 2 * 128 * 4),
        "sQ": (2 * KIB, 18 * KIB),
        "sK": (18 * KIB, 66 * KIB),
        "sV": (66 * KIB, 114 * KIB),
        "sO": (114 * KIB, 146 * KIB),
    }


def test_two_tiles_of_128_take_all_shared_memory():
    # Q 2 x 32 KiB, K and V 2 x 32 KiB each, O 2 x 16 KiB, 3 KiB before them.
    plan = make_plan(AttentionConfig(head_dim=128, schedule="pingpong"))
    assert plan.smem.bytes == (64 + 64 + 64 + 32 + 3) * KIB == hw.SMEM_BYTES_PER_CTA


def test_shared_memory_of_a_pair():
    # Q 64 rows, K 64 keys x 256 columns, V 128 keys x 128 columns, P 64 x 128, a panel of O.
    plan = make_plan(AttentionConfig(head_dim=512))
    assert plan.layout.stages == (2, 2)
    offsets = plan.smem.offsets()
    assert offsets["statistics"] == (192, 192 + (2 + 3) * 128 * 4)
    assert {name: offsets[name] for name in ("sQ", "sK", "sV", "sP", "sO")} == {
        "sQ": (3 * KIB, 67 * KIB),
        "sK": (67 * KIB, 131 * KIB),
        "sV": (131 * KIB, 195 * KIB),
        "sP": (195 * KIB, 211 * KIB),
        "sO": (211 * KIB, 227 * KIB),
    }


@pytest.mark.parametrize(
    ("config", "ranges"),
    [
        (
            # Three fp32 S of 128 columns; 128 16-bit weights are 64 columns, the tail of their S.
            AttentionConfig(),
            {
                "S0": (0, 128), "P0": (64, 128), "S1": (128, 256), "P1": (192, 256),
                "S2": (256, 384), "P2": (320, 384), "O0": (384, 448),
            },
        ),
        (
            AttentionConfig(head_dim=256),
            {
                "S0": (0, 128), "P0": (64, 128), "S1": (128, 256), "P1": (192, 256),
                "O0": (256, 512),
            },
        ),
        (
            AttentionConfig(head_dim=128, schedule="pingpong"),
            {
                "S0": (0, 128), "P0": (64, 128), "S1": (128, 256), "P1": (192, 256),
                "O0": (256, 384), "O1": (384, 512),
            },
        ),
        (
            # 80 keys: 80 columns of S, 40 of P.
            AttentionConfig(tile_n=80, schedule="pingpong"),
            {
                "S0": (0, 80), "P0": (40, 80), "S1": (80, 160), "P1": (120, 160),
                "S2": (160, 240), "P2": (200, 240), "O0": (240, 304), "O1": (304, 368),
            },
        ),
        # 64 rows take all lanes: their S 64 columns, their O half of 512.
        (
            AttentionConfig(head_dim=512),
            {"S0": (0, 64), "S1": (64, 128), "S2": (128, 192), "O0": (192, 448)},
        ),
    ],
)  # fmt: skip
def test_tensor_memory(config, ranges):
    plan = make_plan(config)
    assert {item.name: (item.begin, item.end) for item in plan.tmem.ranges} == ranges
    assert plan.tmem.allocated == 512


@pytest.mark.parametrize(
    ("dims", "pieces", "stages"),
    [
        ((64, 64), (1, 1), (3, 3)),
        ((96, 96), (1, 1), (3, 3)),
        ((128, 128), (1, 1), (3, 2)),
        ((192, 128), (3, 1), (5, 2)),
        ((256, 256), (2, 1), (4, 2)),
        ((512, 512), (2, 2), (2, 2)),
    ],
)
def test_pieces_and_rings(dims, pieces, stages):
    layout = make_plan(AttentionConfig(dims[0], dims[1])).layout
    assert (layout.k_pieces, layout.v_pieces) == pieces
    assert layout.stages == stages
