"""Head dim 512: two warps of the mma.sync kernel divide it, the Blackwell kernel has four pieces.

The space is that of the other head dims, with the architecture as a factor.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gqa_lowlatency import decode
from gqa_lowlatency.choose import choose_columns, choose_config
from gqa_lowlatency.config import CLUSTERS, DecodeConfig
from gqa_lowlatency.launch import DECODE, check_config
from gqa_lowlatency.portable import queries, stream, team
from gqa_lowlatency.portable.plan import WITHOUT_E4M3, PortablePlan
from gqa_lowlatency.sm100.plan import make_plan
from kernelkit.call.launch import Target
from kernelkit.plan import hw
from lab.problems.attention import PATIENCE
from lab.problems.decode import Case, verdicts
from ptxemu import Options, PtxEmuError
from tests.gqa_lowlatency import cases
from tests.gqa_lowlatency.space import FACTORS, case_of
from tests.gqa_lowlatency.space import SPACE as OTHERS
from tests.support.pairwise import Rule, Space, covering

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

CHECKED = Options(policy="round-robin", check=True, limit=PATIENCE)
ADVERSARIAL = Options(policy="adversarial", seed=1, limit=PATIENCE)
WIDE = 512
HOPPER, BLACKWELL, ADA = "sm_90a", "sm_100a", "sm_89"
SPACE = Space(
    FACTORS | {"head_dim": (WIDE,), "arch": (HOPPER, BLACKWELL, ADA)},
    (
        *OTHERS.rules,
        Rule(("cluster", "arch"), lambda cluster, arch: cluster < 2 or arch != ADA),
        Rule(("pdl", "arch"), lambda pdl, arch: not pdl or arch != ADA),
    ),
)
ROWS = [(row["arch"], case_of(row)) for row in covering(SPACE)]
FP8 = {"kv_dtype": "e4m3", "scales": "heads"}
SMALL = (
    (HOPPER, Case((150, 20), (16, 1), head_dim=WIDE, cluster=2, **FP8)),
    (ADA, Case((150, 0), (4, 1), 2, head_dim=WIDE, keys=16, window=70, sink_tokens=9, parts=2)),
    # The first tile is masked and not the last, so rows of V are cleared in a ring of five pieces.
    (BLACKWELL, Case((300,), (9, 1), head_dim=WIDE, window=250, cluster=1, amplitude=4.0)),
)


def named(rows):
    return [pytest.param(arch, case, id=f"{arch}-{case}") for arch, case in rows]


@pytest.mark.parametrize(("arch", "case"), named(SMALL))
def test_a_small_step(arch, case):
    cases.check(case, arch, CHECKED, ADVERSARIAL)


@pytest.mark.parametrize(("arch", "case"), named(ROWS))
def test_every_pair_of_values(arch, case):
    cases.check(case, arch, CHECKED)


OTHER_PLANS = (
    (HOPPER, Case((700, 33), (8, 1), head_dim=WIDE, cluster=2, tuning=(("step", 32),), **FP8)),
    (HOPPER, Case((300,), (8, 1), head_dim=WIDE, cluster=1, tuning=(("warps", 16),), **FP8)),
    (HOPPER, Case((300,), (8, 1), head_dim=WIDE, cluster=2, tuning=(("warps", 4), ("stages", 5)))),
    (HOPPER, Case((200,), (40, 1), 2, head_dim=WIDE, cluster=2)),
    ("sm_80", Case((300, 40), (16, 1), head_dim=WIDE, parts=4)),
    ("sm_120a", Case((300, 40), (12, 2), 2, head_dim=WIDE, pdl="ready", out_dtype="e4m3", **FP8)),
    (BLACKWELL, Case((600,), (32, 1), head_dim=WIDE, window=500, cluster=2, **FP8)),
    (BLACKWELL, Case((600,), (8, 1), head_dim=WIDE, window=500, sink_tokens=5, cluster=1,
                     tuning=(("stages", 4),), **FP8)),
    (BLACKWELL, Case((600,), (8, 1), head_dim=WIDE, keys=1, cluster=1, pdl="pdl", **FP8)),
)  # fmt: skip


@pytest.mark.parametrize(("arch", "case"), named(OTHER_PLANS))
def test_other_plans(arch, case):
    cases.check(case, arch, CHECKED, ADVERSARIAL)


# -- what two warps exchange ----------------------------------------------------------------------


STEPS = Case((400,), (4, 1), head_dim=WIDE, cluster=1, amplitude=4.0)  # several of each team
TRAPS = {
    "sums are read before they are there": (
        'meet(plan.barriers, "team", team_of(plan))\n    for block', "for block",
    ),
    "sums of two steps share a place": ("step % SCORE_STAGES *", "0 *"),
    "each warp weighs by its own half": ("scores[k, tile, block] += others[k]", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_what_each_cure_is_for(changed, trap):
    changed(team, [stream], "add_slices", TRAPS[trap])
    with pytest.raises((AssertionError, PtxEmuError)):
        cases.check(STEPS, HOPPER, CHECKED, ADVERSARIAL)


def halves(value: float, *, first: bool) -> tuple[torch.Tensor, ...]:
    """q, k and v; one half of the first row of Q is times `value`."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn((1, 3, WIDE), generator=generator)
    q[0, 0, slice(0, 256) if first else slice(256, WIDE)] *= value
    k, v = torch.randn((2, 1, 70, 1, WIDE), generator=generator).to(torch.float8_e4m3fn)
    return q.bfloat16(), k, v


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("value", [2.0**20, 2.0**-40])
def test_both_halves_of_q_become_fp16_by_one_factor(value, first):
    """fp16 holds neither of them, and only the larger half counts."""
    tensors = halves(value, first=first)
    options = {"scale": 2.0**-24 if value > 1 else 0.05, "arch": HOPPER}
    results = decode(*tensors, return_lse=True, **options)
    cases.expect(verdicts(tensors, options, results, torch.bfloat16))


def test_two_factors_of_a_row_are_noticed(changed):
    larger = "exponents[tile] = cutlass.max(exponents[tile], others[tile])"
    changed(queries, [stream], "fragments", (larger, "pass"))
    with pytest.raises(AssertionError):
        test_both_halves_of_q_become_fp16_by_one_factor(2.0**20, first=True)


# -- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [HOPPER, BLACKWELL, "sm_80", "sm_86", "sm_87", ADA, "sm_120a"])
@pytest.mark.parametrize("kv_dtype", ["", "e4m3"])
def test_what_is_chosen_fits(arch, kv_dtype):
    if kv_dtype and arch in WITHOUT_E4M3:
        pytest.skip("no conversion of e4m3")
    for group, tokens in ((1, 1), (8, 1), (16, 1), (40, 1), (8, 4), (16, 8)):
        for keys, kv_heads, batch in ((1, 1, 1), (4096, 2, 1), (100_000, 4, 3), (8192, 2, 200)):
            shape = batch, tokens, group * kv_heads, WIDE
            q = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            dtype = torch.float8_e4m3fn if kv_dtype else torch.bfloat16
            k = torch.empty(1, device="meta", dtype=dtype).expand(batch, keys, kv_heads, WIDE)
            given = {"q": q, "k": k, "v": k, "arch": arch}
            config = choose_config(DECODE.arguments(given), Target("emulate", arch))
            check_config(config, arch)


def test_the_team_of_the_mma_sync_kernel():
    plan = PortablePlan(DecodeConfig(WIDE, group=16, cluster=8), HOPPER)
    assert (plan.warps, plan.slices, plan.teams, plan.dims, plan.tile) == (8, 2, 4, 256, 64)
    assert plan.barriers["team"].threads == 64
    assert len(plan.barriers.ids("team")) == 4
    half = PortablePlan(DecodeConfig(256, group=16, cluster=8), HOPPER)
    assert (half.slices, half.score_bytes, half.slot_bytes) == (1, 0, plan.slot_bytes)
    # fp32 sums of 16 keys and 16 columns, of this step and of the one before.
    assert plan.score_bytes == 2 * 16 * 16 * 4
    many = DecodeConfig(WIDE, group=32, cluster=8)
    with pytest.raises(NotImplementedError, match=r"32 columns of head_dim 512 .* 2 of them"):
        check_config(many, HOPPER)


@pytest.mark.parametrize(("arch", "kv_dtype", "columns"), [
    (HOPPER, "", 16), (HOPPER, "e4m3", 16), (BLACKWELL, "", 16), (BLACKWELL, "e4m3", 32),
    ("sm_103a", "e4m3", 32), ("sm_80", "", 16), (ADA, "", 8), (ADA, "e4m3", 8), ("sm_121a", "", 8),
])  # fmt: skip
def test_how_many_rows_a_cta_has(arch, kv_dtype, columns):
    assert choose_columns(arch, WIDE, fp8=bool(kv_dtype)) == columns
    config = DecodeConfig(WIDE, group=64, max_columns=columns, kv_dtype=kv_dtype)
    check_config(config, arch)
    with pytest.raises((ValueError, NotImplementedError)):
        check_config(replace(config, max_columns=2 * columns), arch)


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize(("kv_dtype", "columns", "stages"), [("", 16, 5), ("e4m3", 32, 8)])
def test_the_ring_of_blackwell_holds_v_of_a_tile(kv_dtype, columns, stages, cluster):
    plan = make_plan(DecodeConfig(WIDE, group=columns, cluster=cluster, kv_dtype=kv_dtype))
    assert (plan.pieces, plan.in_turn) == (4, True)
    assert plan.stages <= stages
    assert plan.stages >= plan.min_stages == 4
    assert plan.smem.bytes <= hw.SMEM_BYTES_PER_CTA
    assert plan.tmem.allocated == {16: 128, 32: 256}[columns]


def test_a_ring_of_three_pieces_is_refused():
    with pytest.raises(ValueError, match="3 stages of 32768 bytes: at least 4"):
        make_plan(DecodeConfig(WIDE, stages=3))
