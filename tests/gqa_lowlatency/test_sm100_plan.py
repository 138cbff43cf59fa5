"""The plan of the Blackwell kernel compared with numbers derived by hand."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from gqa_lowlatency import DecodeConfig
from gqa_lowlatency.choose import choose_columns
from gqa_lowlatency.config import CLUSTERS, COLUMNS, HEAD_DIMS, KV_DTYPES
from gqa_lowlatency.sm100.plan import MIN_STAGES, ROLES, TILE, make_plan
from kernelkit.plan import hw

KIB = 1024


def config_of(head_dim: int, columns: int, cluster: int, kv_dtype: str = "") -> DecodeConfig:
    return DecodeConfig(head_dim=head_dim, group=columns, cluster=cluster, kv_dtype=kv_dtype)


def test_epilogue_warps_reach_all_lanes():
    # Warp w of a CTA reaches lanes 32 (w mod 4) .. of tensor memory: warp w holds keys 32 w ...
    epilogue = ROLES["epilogue"]
    assert epilogue.first_warp % hw.WARPGROUP_WARPS == 0
    assert epilogue.threads == TILE == hw.TMEM_LANES
    assert ROLES.warps == 7
    assert ROLES.threads * hw.REGISTERS_PER_THREAD <= hw.REGISTERS_PER_SM


DEPTHS = [
    # By hand: (227 KiB - Q - P - mail - 4 KiB and less) / piece.
    (64, 8, 8, "", False, 1, 13),  # 227 - 1 - 2 - 2 -> 222 / 16
    (128, 8, 1, "", False, 1, 6),  # 227 - 2 - 2 - 4 -> 219 / 32
    (128, 8, 16, "", False, 1, 6),  # 227 - 2 - 2 - 8 -> 215 / 32
    (128, 64, 8, "", False, 1, 4),  # 227 - 16 - 16 - 32 -> 163 / 32
    (256, 8, 8, "", False, 1, 6),  # 227 - 4 - 2 - 8 -> 213 / 32
    (256, 64, 8, "", False, 1, 3),  # 227 - 32 - 16 - 64 -> 115 / 32
    (512, 8, 8, "", False, 1, 6),  # 227 - 8 - 2 - 16 -> 201 / 32
    (512, 16, 16, "", False, 1, 5),  # 227 - 16 - 4 - 32 -> 175 / 32
    (512, 32, 8, "e4m3", False, 1, 8),  # 227 - 16 - 4 - 64 -> 143 / 16
    (512, 8, 8, "e4m3", True, 2, 5),  # 113 - 4 - 1 - 16 - 2 -> 90 / 16
    # With PDL half of 228 KiB less 1 are 113; less Q, P, mail and barriers; by the piece.
    (64, 8, 8, "", True, 2, 6),  # 113 - 1 - 2 - 2 - 2 -> 106 / 16, 5 are enough: 1 + 54 / 16
    (64, 32, 8, "", True, 2, 5),  # 113 - 4 - 8 - 8 - 3 -> 90 / 16
    (64, 8, 8, "e4m3", True, 2, 13),  # 113 - 0.5 - 1 - 2 - 2.5 -> 107 / 8, 8 are enough
    (128, 8, 1, "", True, 2, 3),  # 113 - 2 - 2 - 4 - 2 -> 103 / 32, 3 are enough
    (128, 8, 16, "", True, 2, 3),  # 113 - 2 - 2 - 8 - 2 -> 99 / 32
    (128, 32, 8, "e4m3", True, 2, 5),  # 113 - 4 - 4 - 16 - 3 -> 86 / 16
    (256, 8, 8, "", True, 2, 3),  # 113 - 4 - 2 - 8 - 2 -> 97 / 32
    (256, 16, 8, "e4m3", True, 2, 5),  # 113 - 4 - 2 - 16 - 2 -> 89 / 16
    # A ring that would become too short stays long.
    (128, 16, 8, "", True, 1, 6),  # 113 - 4 - 4 - 8 - 2 -> 95 / 32: two pieces are no ring
    (256, 32, 8, "e4m3", True, 1, 11),  # 113 - 8 - 4 - 32 - 3 -> 66 / 16: of 5 that are enough
    (64, 64, 8, "", True, 1, 11),  # 113 - 8 - 16 - 16 - 6 -> 67 / 16: four, 64 scores a thread
    (64, 64, 8, "e4m3", True, 1, 24),  # nine of 8 KiB are enough, 128 registers a thread are not
]


@pytest.mark.parametrize(
    ("head_dim", "columns", "cluster", "kv_dtype", "pdl", "ctas", "stages"), DEPTHS
)
def test_the_depth_of_the_ring(head_dim, columns, cluster, kv_dtype, pdl, ctas, stages):
    config = config_of(head_dim, columns, cluster, kv_dtype)
    plan, plain = make_plan(dataclasses.replace(config, pdl=pdl)), make_plan(config)
    assert (plan.ctas_per_sm, plan.stages) == (ctas, stages)
    room = hw.SMEM_BYTES_PER_SM // ctas - hw.SMEM_RESERVED_BYTES
    assert room == (227 if ctas == 1 else 113) * KIB
    assert plan.smem.bytes <= room < plan.smem.bytes + plan.piece_bytes
    # One stage is being read, and 54 KB are in flight: 8 TB/s for 1 us, divided by 148 SMs.
    assert (plan.stages - 1) * plan.piece_bytes >= 54_000
    assert plain.stages == plan.stages if ctas == 1 else plain.stages > plan.stages
    alone = make_plan(dataclasses.replace(config, pdl=True, alone=True))
    assert (alone.ctas_per_sm, alone.stages) == (1, plain.stages)


@pytest.mark.parametrize(("head_dim", "columns", "allocated"), [
    (64, 8, 32), (128, 8, 32), (128, 64, 128), (256, 8, 32), (256, 64, 256), (512, 16, 128),
])  # fmt: skip
def test_columns_of_tensor_memory(head_dim, columns, allocated):
    assert make_plan(config_of(head_dim, columns, 8)).tmem.allocated == allocated


@pytest.mark.parametrize("shares", ["", "pdl", "beside"])
def test_a_wish_for_a_depth_is_kept(shares):
    # Six pieces of 16 KiB fit if two CTAs share an SM, 13 if one is alone.
    config = dataclasses.replace(config_of(64, 8, 8), **({shares: True} if shares else {}))
    for stages, ctas in ((3, 2), (6, 2), (7, 1), (13, 1)):
        plan = make_plan(dataclasses.replace(config, stages=stages))
        assert (plan.stages, plan.ctas_per_sm) == (stages, ctas if shares else 1)
    with pytest.raises(ValueError, match=r"bytes of shared memory .*ring 14 x 16384"):
        make_plan(dataclasses.replace(config, stages=14))
    with pytest.raises(ValueError, match="2 stages of 16384 bytes"):
        make_plan(dataclasses.replace(config, stages=2))


def test_neighbours_on_an_sm_get_their_tensor_memory(monkeypatch):
    # Two with PDL, in 105 KiB each; with a short ring four fit, in 55 KiB each.
    config = dataclasses.replace(config_of(64, 8, 8), pdl=True)
    short = dataclasses.replace(config, pdl=False, stages=3)
    for wanted, ctas in ((config, 2), (short, 4)):
        monkeypatch.setattr(hw, "TMEM_COLUMNS", 32 * ctas)
        make_plan(wanted)
        monkeypatch.setattr(hw, "TMEM_COLUMNS", 32 * ctas - 1)
        with pytest.raises(ValueError, match=f"{ctas} CTAs of .* each allocates 32 TMEM columns"):
            make_plan(wanted)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_default_fits(head_dim, kv_dtype):
    dtype = "" if kv_dtype == "fp16" else kv_dtype
    most = choose_columns("sm_100a", head_dim, fp8=kv_dtype == "e4m3")
    for columns in (n for n in COLUMNS if n <= most):
        for cluster, pdl in itertools.product(CLUSTERS, (False, True)):
            config = config_of(head_dim, columns, cluster, dtype)
            plan = make_plan(dataclasses.replace(config, pdl=pdl))
            assert plan.stages >= plan.min_stages >= MIN_STAGES
            offsets = plan.smem.offsets()
            for name in ("sQ", "sP", "ring"):
                assert offsets[name][0] % hw.SMEM_SWIZZLE_ALIGN == 0
            # finish() keeps a flag after the mailbox's mbarrier.
            assert offsets["arrived"][1] - offsets["arrived"][0] == 2 * hw.MBARRIER_BYTES


def test_arrivals():
    edges = make_plan(DecodeConfig()).edges
    assert {edge.name: edges.full(edge.name).arrivals for edge in edges.edges} == {
        "q": 32, "kv": 1, "s": 1, "taken": 128, "p": 128, "o": 1,
    }  # fmt: skip
    assert edges.empty("kv").arrivals == 1
    assert edges["kv"].tx_bytes == 32 * KIB


def test_few_owners_need_much_mail():
    # One owner holds the columns of all CTAs: 64 x 16 x 256 x 4 bytes are 1 MiB.
    config = DecodeConfig(head_dim=256, group=64, cluster=16, owners=1)
    with pytest.raises(ValueError, match=r"at least 3, .* more owners need a smaller mailbox"):
        make_plan(config)


def test_a_box_of_tma_has_128_bytes():
    # A key of 64 e4m3 has 64 bytes: one of them is no box, two are.
    config = DecodeConfig(head_dim=64, kv_dtype="e4m3", page_size=1, lens=True)
    with pytest.raises(NotImplementedError, match="page_size 1 on sm_100a with 64 bytes of e4m3"):
        make_plan(config)
    assert make_plan(dataclasses.replace(config, page_size=2)).box_rows == 2
    assert make_plan(DecodeConfig(head_dim=64, page_size=1, lens=True)).box_rows == 1


def test_e4m3_halves_a_piece():
    plan = make_plan(config_of(64, 8, 8, "e4m3"))
    assert (plan.line_bytes, plan.panel, plan.piece_bytes) == (64, 64, 8 * KIB)
    plan = make_plan(config_of(128, 8, 8, "e4m3"))
    assert (plan.line_bytes, plan.panel, plan.piece_bytes) == (128, 128, 16 * KIB)
