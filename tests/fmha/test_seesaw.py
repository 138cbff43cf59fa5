"""Two warpgroups that share a query tile on Hopper and take its key tiles in turn: head dim 512."""

from __future__ import annotations

import dataclasses

import pytest

from fmha.config import AttentionConfig
from fmha.plan import make_plan
from fmha.sm90 import kernel, seesaw
from lab.problems import attention as cases
from lab.problems.attention import Case
from ptxemu import Options
from tests.fmha.test_kernel import by_group
from tests.fmha.test_sm90 import ARCH, CHECKED, FRIENDLY, PATIENCE, check, noticed

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

DIMS = {"dims": (512, 512)}
LATENT = {"k_is_v": True, **DIMS}
# The walk starts at the last key and scores grow along it, so maxima move in tiles of both
# warpgroups.
GROWING = Case(64, 300, amplitude=8.0, climb=-6.0, **DIMS)
GROWING_LATENT = dataclasses.replace(GROWING, k_is_v=True)
# Two blocks of one CTA; their last tiles belong to different warpgroups.
BLOCKS = Case(128, 310, (2, 1), causal=True, kv_lens=(300,), pack_heads=False, **DIMS)
BLOCKS_LATENT = dataclasses.replace(BLOCKS, k_is_v=True)
# Blocks of one tile, in which nothing else orders one warpgroup after the other.
SHORT = Case(640, 60, (2, 1), ctas=1, pack_heads=False, **DIMS)


@pytest.mark.parametrize("keys", [1, 64, 65, 190, 256])
@pytest.mark.parametrize("latent", [False, True], ids=["apart", "latent"])
def test_any_number_of_tiles(keys, latent):
    check(Case(64, keys, k_is_v=latent, **DIMS), CHECKED, FRIENDLY)


@pytest.mark.parametrize(
    "case",
    by_group((BLOCKS, BLOCKS_LATENT, GROWING, GROWING_LATENT))
    + by_group((
        dataclasses.replace(BLOCKS, ctas=2),
        dataclasses.replace(BLOCKS_LATENT, ctas=2),
        dataclasses.replace(GROWING, softcap=15.0),
        SHORT,
    )),
)  # fmt: skip
def test_tiles_follow_each_other(case):
    check(case, CHECKED, FRIENDLY)


@pytest.mark.parametrize("case", [GROWING, GROWING_LATENT], ids=str)
def test_no_product_is_made_twice_where_a_maximum_moves(case):
    _, reports = cases.run_reported(case, Options(limit=PATIENCE), arch=ARCH)
    ((report,),) = (report.launches for report in reports)
    tiles = -(-case.skv // 64)
    assert report.counts["mma"] == tiles * (512 // 16 + 2 * 64 // 16)


READS_SUMS = """\
                every = sums_of_all(plan, lane, scope.buffers.statistics, own)
                reference.row_sum[0], reference.row_sum[1] = every
                # Not before: the sums of the next block come to the same place.
                pipes.q.release(0)
"""
*SUMS, _, RELEASE = READS_SUMS.splitlines(keepends=True)
WAITS_FOR_OTHER = (
    "            self.issue_other(block, step - 1, team)\n            warpgroup.wait_group(0)\n"
)
MATH = (seesaw, [kernel], "Seesaw")
TRAPS = {
    "waits for P": (
        BLOCKS, MATH, ("scope.pipes.p.wait(self.other_p(block, step), 1 - team)", "pass"),
    ),
    "waits for room for P": (
        BLOCKS, MATH, ("scope.pipes.p.wait_free(producer_state_at(1, filling), team)", "pass"),
    ),
    "fences P": (
        BLOCKS, (seesaw, [seesaw], "share_p"),
        ('cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
    ),
    "waits for S": (
        BLOCKS, MATH, ("warpgroup.wait_group(1)\n        else:", "pass\n        else:"),
    ),
    "waits for S of a piece": (
        BLOCKS, MATH,
        ("warpgroup.wait_group(1)\n                self.release_k", "self.release_k"),
    ),
    "waits for P V of its own": (
        BLOCKS, MATH,
        ("warpgroup.wait_group(0)\n        block.scope.pipes.v", "block.scope.pipes.v"),
    ),
    "waits for P V of the other's": (BLOCKS_LATENT, MATH, (
        WAITS_FOR_OTHER, "            self.issue_other(block, step - 1, team)\n",
    )),
    "keeps K for P V": (
        BLOCKS_LATENT, MATH,
        ("if cutlass.const_expr(not self.plan.config.k_is_v):", "if cutlass.const_expr(True):"),
    ),
    "takes turns": (
        BLOCKS, MATH, ("self.wait_turn(Int32(team))\n        for piece", "for piece"),
    ),
    "takes up what the other's P refers to": (
        GROWING, MATH,
        ("rescale(tile.o, refer_to(plan, tops, tile.reference, scope.scalars))", "pass"),
    ),
    "rescales for its own": (GROWING, MATH, ("rescale(o, factors)", "pass")),
    "finds the maximum": (
        dataclasses.replace(GROWING, dtype="fp16"), MATH,
        ("if cute.arch.vote_any_sync(too_large(lane, tile.reference, sums)):",
         "if cute.arch.vote_any_sync(step < 1):"),
    ),
    "clears": (
        BLOCKS, MATH,
        ("self.clear_tail_rows(scope, walk, self.own_v(block, Int32(0), team))", "pass"),
    ),
    "tells for whole warps": (
        BLOCKS, MATH, ("cute.arch.sync_warp()\n        scope.pipes.p", "scope.pipes.p"),
    ),
    "keeps Q until the sums are read": (SHORT, MATH, (READS_SUMS, RELEASE + "".join(SUMS))),
    "meets before it adds the sums of others": (
        BLOCKS, (seesaw, [seesaw], "sums_of_all"),
        ('meet(plan.barriers, "sums")', "pass"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_a_tile_shared_without_its_cure_is_noticed(changed, trap):
    case, (module, users, name), replacement = TRAPS[trap]
    changed(module, users, name, replacement)
    assert noticed(case)


@pytest.mark.parametrize(
    ("config", "stages"), [({}, (2, 2)), ({"k_is_v": True}, (4, 4)), ({"ctas": 2}, (2, 2))]
)
def test_pieces_are_half_of_the_columns(config, stages):
    plan = make_plan(AttentionConfig(head_dim=512, **config), ARCH)
    layout = plan.layout
    assert (layout.k_pieces, layout.v_pieces, layout.stages) == (2, 2, stages)
    assert layout.k_bytes == 64 * 256 * 2
    start, end = plan.smem.offsets()["sP"]
    assert end - start == 2 * 64 * 64 * 2
    assert plan.edges.empty("k").arrivals == plan.edges.full("p").arrivals * layout.ctas


@pytest.mark.parametrize("config", [{"k_stages": 3}, {"v_stages": 1}])
def test_a_ring_is_whole_tiles(config):
    with pytest.raises(ValueError, match="multiples of 2 and 2"):
        make_plan(AttentionConfig(head_dim=512, **config), ARCH)
