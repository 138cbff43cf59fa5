"""The functional traps of the design: for each, the kernel without its cure has to be noticed.

A cure is a few words of the source. Each test removes them from a copy of the file, compiles that,
and expects wrong numbers, a deadlock or a refusal under some schedule; the unchanged kernel passes
under all of them. (Publishing late costs time, not correctness: a static test.)
"""

from __future__ import annotations

import pytest
import torch

from fmha.shared import epilogue as outputs
from fmha.shared import load
from fmha.sm100 import kernel
from fmha.sm100.roles import correction, epilogue, mma, softmax
from kernelkit.device import online_softmax
from lab.problems import attention as cases
from lab.problems.attention import Case
from ptxemu import Deadlock, Options, PtxEmuError

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

POLICIES = (("round-robin", 0), ("adversarial", 0), ("adversarial", 1))
CHECKED = (Options(check=True, limit=cases.PATIENCE),)


KINDS = {
    "base": {"schedule": "base"},
    "pingpong": {"schedule": "pingpong"},
    "P in parts": {"dims": (128, 128), "schedule": "pingpong"},
    "pair": {"dims": (256, 256)},
    "pair of halves": {"dims": (512, 512)},  # P in shared memory
}


def moving(kind: str) -> Case:
    """Row maxima move from tile to tile, so O is rescaled."""
    return Case(130, 640, amplitude=4.0, causal=True, **KINDS[kind])


def noticed(case: Case, policies: tuple = POLICIES) -> str:
    """Return the first verdict that is not "right" over the policies, or ''."""
    verdicts = (_verdict(case, policy) for policy in policies)
    return next((verdict for verdict in verdicts if verdict != "right"), "")


def _verdict(case: Case, policy: tuple[str, int] | Options) -> str:
    options = policy
    if not isinstance(policy, Options):
        options = Options(policy=policy[0], seed=policy[1], limit=cases.PATIENCE)
    try:
        results, reports = cases.run_reported(case, options)
    except Deadlock:
        return "deadlock"
    except PtxEmuError as error:
        return type(error).__name__
    if any(launch.findings for report in reports for launch in report.launches):
        return "finding"
    wrong = [report.name for report in cases.judge(case, results) if not report.ok]
    return f"wrong {' and '.join(wrong)}" if wrong else "right"


ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
BROKEN_AND_CURED = pytest.mark.parametrize("cured", [True, False])
BOTH_SCHEDULES = pytest.mark.parametrize("schedule", ["base", "pingpong"])


@ALL_KINDS
def test_the_kernel_as_it_is_passes(kind):
    assert not noticed(moving(kind), (*POLICIES, *CHECKED))


# A kernel that keeps the registers of its first S until S has been overwritten in TMEM, and returns
# O = 0 if they differ from what they were. Only waiting for loads makes that safe.
_BLOCK_BEGINS = "            row_max, row_sum, shift = -Float32.inf, Float32(0.0), Float32(0.0)\n"
_BLOCK_ENDS = "            if cutlass.const_expr(plan.layout.halves == 2):\n"
_KEEP_FIRST_S = (
    (
        _BLOCK_BEGINS,
        f"{_BLOCK_BEGINS}"
        "            kept = cute.make_rmem_tensor(plan.layout.lane_columns, Float32)\n"
        "            lane.pipes.s.wait(s_state)\n"
        "            self.read_scores(lane, s_state.index)\n"
        "            tmem.wait_loads( )\n"
        "            total = row_total(lane.scores, Float32(0.0))\n"
        "            again = Lane(row, kept, scope.scalars, scope.buffers, scope.pipes)\n"
        "            self.read_scores(again, s_state.index)\n",
    ),
    (
        _BLOCK_ENDS,
        "            if row_total(kept, Float32(0.0)) != total:\n"
        "                row_sum = Float32(0.0)\n"
        f"{_BLOCK_ENDS}",
    ),
)


@BOTH_SCHEDULES
@BROKEN_AND_CURED
def test_registers_of_s_have_arrived_when_s_is_given_away(changed, schedule, cured):
    # Scores are small, so nothing is rescaled; rescaling would wait for loads as well.
    case = Case(130, 640, schedule=schedule)
    removal = () if cured else (("        tmem.wait_loads()\n", ""),)
    changed(softmax, [kernel], "Softmax", *removal, *_KEEP_FIRST_S)
    assert bool(noticed(case)) == (not cured)


def test_p_in_shared_memory_waits_for_the_product_before(changed):
    """There is one buffer of P."""
    wait = "lane.pipes.o.wait(step.o_state, q_tile)  # the only buffer of P has been read"
    changed(softmax, [kernel], "Softmax", (wait, "pass"))
    assert noticed(moving("pair of halves"))


def test_p_in_shared_memory_is_fenced_for_the_tensor_core(changed):
    where = "    if cutlass.const_expr(plan.layout.p_in_smem):\n        "
    fence = 'cute.arch.fence_proxy("async.shared", space="cta")'
    changed(softmax, [softmax], "store_p", (where + fence, where + "pass"))
    assert noticed(moving("pair of halves"))


RESCALE = "                    rescale_output(plan, lanes[q_tile], acc_scale)\n"


# With P in parts there are two S buffers: the S whose maximum moved follows the last product.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "P in parts"])
def test_o_is_not_rescaled_before_the_last_product_is_done(changed, kind):
    wait = "                    pipes.o.wait(o_state, q_tile)\n" + RESCALE
    changed(correction, [kernel], "Correction", (wait, RESCALE))
    assert noticed(moving(kind), CHECKED)


@ALL_KINDS
def test_no_product_runs_while_o_is_rescaled(changed, kind):
    changed(mma, [kernel], "Mma", ("pipes.o.wait_free(o_state, q_tile)", "pass"))
    assert noticed(moving(kind), CHECKED)


@ALL_KINDS
def test_no_product_starts_before_p_is_there(changed, kind):
    changed(mma, [kernel], "Mma", ("pipes.p.wait(p_state)", "pass"))
    assert noticed(moving(kind), CHECKED)


def test_no_product_starts_before_the_last_columns_of_p_are_there(changed):
    changed(mma, [kernel], "Mma", ("scope.pipes.p_tail.wait(p_state)", "pass"))
    assert noticed(moving("P in parts"), CHECKED)


# Three blocks of a CTA; none waits for all work that the previous one started.
SUCCESSION = Case(130, 300, (5, 1), causal=True, schedule="base", pack_heads=False)


@pytest.mark.parametrize(
    ("module", "name", "wait"),
    [
        (correction, "Correction", "pipes.out.wait_free(out_state)"),
        (epilogue, "Store", "cute.arch.cp_async_bulk_wait_group(0, read=True)"),
        (load, "LoadQK", "scope.pipes.q.wait_free(state, q_tile)"),
        (load, "LoadV", "pipes.v.wait_free(v_state)\n                    self"),
    ],
)
def test_a_block_waits_for_the_one_before(changed, module, name, wait):
    assert not noticed(SUCCESSION, CHECKED)
    changed(module, [kernel], name, (wait, f"pass{wait.partition(')')[2]}"))
    assert noticed(SUCCESSION, CHECKED)


@pytest.mark.parametrize(
    ("name", "cure", "uncured", "fields"),
    [
        ("refer", "base = finite(new_max)", "base = new_max", {}),
        ("shift_of", "base = finite(row_max)", "base = row_max", {"softcap": 20.0}),
        ("next_max", "acc_scale = Float32(1.0)\n    ret", "acc_scale = acc_scale\n    ret",
         {"dtype": "fp16"}),
    ],
)  # fmt: skip
def test_a_fully_masked_tile_makes_no_nan(changed, name, cure, uncured, fields):
    """The walk begins at the last tile, of which the first rows see nothing: their maximum is still
    -inf if all their keys score -inf."""
    case = Case(130, 200, causal=True, **fields)
    assert not noticed(case)
    changed(online_softmax, [softmax], name, (cure, uncured))
    assert "wrong O" in noticed(case)


@BOTH_SCHEDULES
def test_nan_in_values_past_a_length_stays_there(changed, schedule):
    case = Case(3, 300, kv_lens=(200,), schedule=schedule)
    assert not noticed(case)
    cure = "if lane.row.lane >= valid and lane.row.lane < layout.tile_n:"
    changed(correction, [kernel], "Correction", (cure, "if lane.row.lane >= layout.tile_n:"))
    assert noticed(case)


def test_raw_output_of_fp16_does_not_overflow():
    """The cure is the default out_dtype, fp32."""
    q, k, v = Case(8, 300, dtype="fp16").inputs()
    v.fill_(60000.0)
    raw, lse, row_max = cases.attention(q, k, v, normalize=False)
    assert raw.dtype == torch.float32
    assert raw.max() > torch.finfo(torch.float16).max
    assert torch.allclose(cases.normalised(raw, lse, row_max), v[:1, :1].float(), rtol=1e-3)
    raw, *_ = cases.attention(q, k, v, normalize=False, out_dtype=torch.float16)
    assert torch.isposinf(raw).any()


@pytest.mark.parametrize("normalize", [True, False])
def test_lse_is_in_natural_log(changed, normalize):
    case = Case(3, 70, normalize=normalize, schedule="base")
    assert not noticed(case)
    cure = ("    return factor, (max_log2 + ", "    LN_2 = 1.0\n    return factor, (max_log2 + ")
    changed(online_softmax, [outputs], "finish_row", cure)
    assert noticed(case)
