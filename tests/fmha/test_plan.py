"""The plan of the six-warp schedule against numbers derived by hand."""

from __future__ import annotations

import pytest

from fmha.config import MAX_KV_STAGES, AttentionConfig
from fmha.plan import make_plan
from kernelkit import hw


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


def test_arrivals(plan):
    # TMA and the tensor core signal once; 4 warps of 32 threads signal P.
    full = {edge.name: plan.edges.full_arrivals(edge.name) for edge in plan.edges.edges}
    assert full == {"q": 1, "k": 1, "v": 1, "s": 1, "p": 128, "o": 1}
    assert [plan.edges.empty_arrivals(name) for name in "kv"] == [1, 1]
    with pytest.raises(ValueError, match="freed by p"):
        plan.edges.empty_arrivals("s")


def test_bytes_on_the_edges(plan):
    # 128 rows x 64 columns x 2 bytes.
    assert {plan.edges[name].tx_bytes for name in "qkv"} == {16384}
    assert {plan.edges[name].tx_bytes for name in "spo"} == {0}


def test_shared_memory(plan):
    # q 1, k and v 2 x 3 each, s 2, p 2, o 1: 18 barriers of 8 bytes.
    assert plan.edges.barrier_bytes == 144
    assert plan.smem.offsets() == {
        "barriers": (0, 144),
        "tmem_base": (144, 148),
        "sQ": (1024, 1024 + 16384),
        "sK": (17408, 17408 + 3 * 16384),
        "sV": (66560, 66560 + 3 * 16384),
    }
    assert plan.smem.bytes == 115712


def test_deepest_rings_fit():
    plan = make_plan(AttentionConfig(kv_stages=MAX_KV_STAGES))
    assert plan.smem.bytes <= hw.SMEM_BYTES_PER_CTA
    assert plan.smem.bytes + 2 * 16384 > hw.SMEM_BYTES_PER_CTA, "one more stage would fit"


def test_tensor_memory(plan):
    ranges = {item.name: (item.begin, item.end) for item in plan.tmem.ranges}
    # Two fp32 S of 128 columns; 128 16-bit weights are 64 columns, the tail of their S.
    assert ranges == {
        "S0": (0, 128), "P0": (64, 128), "S1": (128, 256), "P1": (192, 256), "O": (256, 320),
    }  # fmt: skip
    assert plan.tmem.allocated == 512


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("stages", range(2, MAX_KV_STAGES + 1))
def test_every_config_has_a_plan(dtype, stages):
    make_plan(AttentionConfig(dtype=dtype, kv_stages=stages))
