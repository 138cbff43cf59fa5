"""The Blackwell kernel by itself: schedules, the traps of its design, and the limits of its plan.

`test_kernel.py` tests its results, for all architectures. A trap is a test that removes a cure from
a copy of the source and expects wrong numbers or a report of the checker.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gqa_lowlatency import DecodeConfig, decode, decode_plan, reference
from gqa_lowlatency.launch import compile_for
from gqa_lowlatency.sm100 import kernel
from gqa_lowlatency.sm100.roles import columns, correction, epilogue, load, mma
from kernelkit.numerics import tolerance
from lab.problems.attention import PATIENCE
from lab.problems.decode import Case
from ptxemu import Options, PtxEmuError
from tests.gqa_lowlatency import cases

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCH = "sm_100a"
SCHEDULES = (
    Options(policy="round-robin", check=True, limit=PATIENCE),
    Options(policy="adversarial", seed=0, check=True, limit=PATIENCE),
    Options(policy="adversarial", seed=1, check=True, limit=PATIENCE),
    Options(policy="random", seed=2, limit=PATIENCE),
)
# Maxima move from tile to tile and tiles are ragged at both ends; in the long one the ring wraps.
MOVING = Case((400,), (3, 1), 2, window=250, head_dim=128, amplitude=4.0, cluster=1)
LONG = Case((660,), (3, 1), 2, window=500, head_dim=128, amplitude=4.0, cluster=1)
# V of a tile uses stages of K of the next one, and the first tile is masked.
SHORT = Case((700,), (3, 1), head_dim=256, window=300, cluster=1, tuning=(("stages", 3),))
QUANTISED = Case((200,), (5, 1), kv_dtype="e4m3", head_dim=64, cluster=1)


SHAPES = (
    LONG,
    replace(LONG, pdl="ready"),  # the ring of three pieces
    # Two tiles per CTA, and parts that wait for each other; launches use the counters one after
    # another.
    Case((390, 0, 200), (5, 1), head_dim=64, cluster=1, parts=2, amplitude=4.0),
)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_no_schedule_shows(case):
    cases.check(case, ARCH, *SCHEDULES)


def test_a_plan_with_parts_leaves_its_counters_at_zero():
    case = SHAPES[2]
    given = case.options() | case.launch_options(ARCH)
    plan, lengths = decode_plan(*case.inputs(), **given), given["kv_lens"]
    first = [each.clone() for each in plan(*case.inputs(), kv_lens=lengths)]
    assert cases.same_bits(first, plan(*case.inputs(), kv_lens=lengths))


WIDE = (  # 64 columns of every head_dim, also on a shared SM; the ring of three pieces
    Case((400,), (64, 1), head_dim=64, cluster=2, amplitude=4.0),
    Case((300,), (12, 1), 8, head_dim=128, cluster=1, dtype="fp16"),
    Case((500,), (64, 1), head_dim=256, cluster=1, amplitude=4.0),
    Case((300,), (16, 1), head_dim=256, keys=32, kv_dtype="e4m3", cluster=2),
    Case((2049,), (4, 1), 2, window=2000, sink_tokens=3, cluster=16),
    Case((300, 3), (20, 1), 2, head_dim=128, cluster=2, tuning=(("max_columns", 16),)),
    Case((900,), (8, 1), head_dim=256, keys=32, cluster=2),
    Case((130, 0, 700), (24, 1), head_dim=64, cluster=4, tuning=(("owners", 2),)),
    Case((300,), (5, 1), kv_dtype="e4m3", head_dim=64, cluster=1),
    # Pages smaller than a swizzle atom, and more of them in a tile than lanes in a warp.
    *(Case((300, 1), (10, 2), window=150, sink_tokens=3, keys=n, cluster=2) for n in (1, 4)),
    Case((300,), (5, 1), kv_dtype="e4m3", head_dim=64, keys=2, cluster=1),
    Case((900,), (8, 1), head_dim=256, keys=32, cluster=2, pdl="pdl"),
    Case((900,), (8, 1), head_dim=64, cluster=1, tuning=(("stages", 4),)),
)


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_no_schedule_shows_at_the_edges_of_the_plan(case):
    cases.check(case, ARCH, *SCHEDULES)


@pytest.mark.parametrize("pdl", [False, True])
def test_two_ctas_get_their_registers_with_pdl(pdl):
    ptx = compile_for(DecodeConfig(head_dim=64, group=32, pdl=pdl), "sm_100a").ptx
    assert (".minnctapersm 2" in ptx) == pdl


def noticed(case: Case) -> bool:
    """Whether a schedule gives a wrong result, no result, or a finding."""
    try:
        cases.check(case, ARCH, *SCHEDULES[:3])
    except (AssertionError, PtxEmuError):
        return True
    return False


TRAPS = {
    "rows of V that nobody sees stay": (
        correction, (epilogue,), "clear_unseen_rows", MOVING,
        "if not any_row_sees(plan.config, share, first + thread):", "if first + thread < 0:",
    ),
    "zeros are written before V has landed": (
        correction, (epilogue,), "clear_unseen_rows", MOVING,
        "scope.pipes.kv.wait(Fill(stage, number // plan.stages % 2))", "pass",
    ),
    "V of the last tile is not where it is thought": (
        correction, (epilogue,), "clear_unseen_rows", MOVING, "place -= plan.pieces", "pass",
    ),
    "O is not rescaled": (
        epilogue, (kernel,), "Epilogue", MOVING, "rescale_o(plan, scope)", "pass",
    ),
    "O is rescaled without an end": (
        correction, (epilogue,), "rescale_o", MOVING, "    tmem.wait_stores()\n", "",
    ),
    "S is overwritten while it is read": (
        mma, (kernel,), "Mma", MOVING, "pipes.taken.wait(taken_state)", "pass",
    ),
    "P is overwritten while it is read": (
        epilogue, (kernel,), "Epilogue", MOVING,
        "pipes.o.wait(o_state)  # the previous product has read the only buffer of P", "pass",
    ),
    "P is not fenced for the tensor core": (
        epilogue, (kernel,), "Epilogue", MOVING,
        'cute.arch.fence_proxy("async.shared", space="cta")', "pass",
    ),
    "Q is not fenced for the tensor core": (
        load, (kernel,), "LoadQ", QUANTISED,
        'cute.arch.fence_proxy("async.shared", space="cta")', "pass",
    ),
    "maxima of two tiles share a place": (
        epilogue, (kernel,), "Epilogue", MOVING, "row_max, step % 2)", "row_max, Int32(0))",
    ),
    "warps do not meet for the maxima": (
        columns, (epilogue, correction), "update_row_max", MOVING,
        "begin = meet(buffers, columns, parity)\n    mine",
        "begin = part_of(buffers, columns, parity, Int32(0)) + own_column(columns) * 4\n    mine",
    ),
    "the bias of P is not in the statistics": (
        correction, (epilogue,), "deliver_statistics", QUANTISED,
        "row_max[k] - plan.bias_log2", "row_max[k]",
    ),
    "zeros are written over K of the next tile, which has not landed": (
        correction, (epilogue,), "clear_unseen_rows", SHORT,
        "scope.pipes.s.wait(Fill(Int32(0), (step + 1) % 2))", "pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_what_each_cure_is_for(changed, trap):
    module, users, name, case, old, new = TRAPS[trap]
    users = [user for user in users if hasattr(user, name)]
    changed(module, users, name, (old, new))
    assert noticed(case)


def test_v_is_cleared_in_a_ring_shorter_than_two_tiles():
    cases.check(SHORT, ARCH, *SCHEDULES)


def test_the_reference_rounds_as_the_kernel_does():
    """Relative to the same e4m3 numbers, an LSE differs only by sums in fp32, also if ties of Q
    move it by a hundredth: row 7 of this q has the maximum 49 / 16. The limits follow from that."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, 8, 128).bfloat16()
    q[..., 7, :] = (torch.randint(-112, 113, (128,)) * 7 / 256).bfloat16()
    q[..., 7, 0] = 49 / 16
    k, v = torch.randn(2, 1, 130, 1, 128).to(torch.float8_e4m3fn)
    o, lse = decode(q, k, v, return_lse=True, arch=ARCH, backend="emulate")
    exact = reference.definition(q, k, v, arch=ARCH)
    rounded = reference.rounded(q, k, v, arch=ARCH)
    assert (lse - rounded.lse).abs().max() < 2e-6
    assert tolerance.compare_output(o, exact.o, rounded.o, torch.bfloat16).ok
