"""The functional traps of the design: for each, the kernel without its cure has to be noticed.

A cure is a few words of the source. Each test takes them out of a copy of the file, compiles that,
and expects wrong numbers, a deadlock or a refusal under some schedule; the kernel as it is passes
under all of them. (Publishing late costs time, not correctness: a static test.)
"""

from __future__ import annotations

import pytest
import torch

from fmha.sm100 import kernel
from fmha.sm100.roles import correction, epilogue, mma, publish, softmax
from kernelkit import online_softmax
from ptxemu import Deadlock, PtxEmuError
from workbench.problems import attention as cases
from workbench.problems.attention import Case

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

POLICIES = (("round-robin", 0), ("adversarial", 0), ("adversarial", 1))


def moving(p_path: str, schedule: str) -> Case:
    """Row maxima move from tile to tile, so O is rescaled."""
    return Case(130, 640, amplitude=4.0, causal=True, p_path=p_path, schedule=schedule)


def noticed(case: Case, policies: tuple = POLICIES) -> str:
    """What was noticed first, under one policy or another; nothing where all is right."""
    verdicts = (_verdict(case, *policy) for policy in policies)
    return next((verdict for verdict in verdicts if verdict != "right"), "")


def _verdict(case: Case, policy: str, seed: int) -> str:
    try:
        results, reports = cases.run_reported(case, policy, seed)
    except Deadlock:
        return "deadlock"
    except PtxEmuError as error:
        return type(error).__name__
    if any(launch.findings for report in reports for launch in report.launches):
        return "finding"
    wrong = [report.name for report in cases.judge(case, results) if not report.ok]
    return f"wrong {' and '.join(wrong)}" if wrong else "right"


BOTH_PATHS = pytest.mark.parametrize("p_path", ["smem", "tmem"])
BROKEN_AND_CURED = pytest.mark.parametrize("cured", [True, False])
BOTH_SCHEDULES = pytest.mark.parametrize("schedule", ["base", "pingpong"])


@BOTH_PATHS
@BOTH_SCHEDULES
def test_the_kernel_as_it_is_passes(p_path, schedule):
    assert not noticed(moving(p_path, schedule))


# A kernel that keeps the registers of its first S until others have overwritten it, and returns
# O = 0 where they are not what they were. Only waiting for loads makes that safe.
_KEEP_FIRST_S = (
    (
        "        row_max, row_sum = -Float32.inf, Float32(0.0)\n",
        "        row_max, row_sum = -Float32.inf, Float32(0.0)\n"
        "        kept = cute.make_rmem_tensor(self.plan.layout.lane_columns, Float32)\n"
        "        lane.pipes.s.wait(s_state, lane.row.q_tile)\n"
        "        self.read_scores(lane, s_state.index + lane.row.q_tile)\n"
        "        tmem.wait_loads( )\n"
        "        total = row_total(lane.scores)\n"
        "        again = Lane(row, kept, scope.scalars, scope.buffers, scope.pipes)\n"
        "        self.read_scores(again, s_state.index + lane.row.q_tile)\n",
    ),
    (
        "        if cutlass.const_expr(self.plan.config.ctas == 2):\n            row_sum +=",
        "        if row_total(kept) != total:\n"
        "            row_sum = Float32(0.0)\n"
        "        if cutlass.const_expr(self.plan.config.ctas == 2):\n            row_sum +=",
    ),
)


@BOTH_SCHEDULES
@BROKEN_AND_CURED
def test_registers_of_s_have_arrived_when_s_is_given_away(changed, schedule, cured):
    # Small scores: nothing is rescaled, which waits for loads as well.
    case = Case(130, 640, p_path="smem", schedule=schedule)
    removal = () if cured else (("        tmem.wait_loads()\n", ""),)
    changed(softmax, [kernel], "Softmax", *removal, *_KEEP_FIRST_S)
    assert bool(noticed(case)) == (not cured)


def test_p_in_shared_memory_waits_for_the_product_before(changed):
    """P has one buffer. The ping-pong schedule has its wait from S, which is made after P V."""
    changed(
        softmax,
        [kernel],
        "Softmax",
        ("lane.pipes.o.wait(o_state)  # the P V before has read the one buffer of P", "pass"),
        ("if cutlass.const_expr(not self.plan.config.p_in_smem):", "if cutlass.const_expr(True):"),
    )
    assert noticed(moving("smem", "base"))


@BOTH_SCHEDULES
def test_p_in_shared_memory_is_fenced_for_the_tensor_core(changed, schedule):
    fence = 'cute.arch.fence_proxy("async.shared", space="cta")'
    changed(publish, [softmax], "store_p", (fence, "pass"))
    assert noticed(moving("smem", schedule))


def test_o_is_not_rescaled_before_the_last_product_is_done(changed):
    wait = "if cutlass.const_expr(not self.plan.config.p_in_smem):"
    changed(softmax, [kernel], "Softmax", (wait, "if cutlass.const_expr(False):"))
    assert noticed(moving("tmem", "base"))


def delayed(line: str) -> tuple[str, str]:
    """`line` of a device function, and the same after a long wait."""
    indent = line[: len(line) - len(line.lstrip())]
    loop = f"{indent}for _ in cutlass.range(300, unroll=1):\n{indent}    cute.arch.sync_warp()\n"
    return line, loop + line


@BOTH_PATHS
@BROKEN_AND_CURED
def test_no_product_runs_while_o_is_rescaled(changed, p_path, cured):
    """Correction warps so slow that a tensor core that does not wait for them overtakes them. Only
    the random policy lets it: others run it when no warp can go on."""
    rescale = "                rescale_output(self.plan, lanes[q_tile], acc_scale)\n"
    changed(correction, [kernel], "Correction", delayed(rescale))
    if not cured:
        wait = "if cutlass.const_expr(pipes.rescaled is not None):"
        changed(mma, [kernel], "Mma", (wait, "if cutlass.const_expr(False):"))
    policies = tuple(("random", seed) for seed in range(3))
    assert bool(noticed(moving(p_path, "pingpong"), policies)) == (not cured)


@BOTH_PATHS
@BROKEN_AND_CURED
def test_no_product_starts_before_p_is_there(changed, p_path, cured):
    """The same for slow softmax warps."""
    changed(softmax, [kernel], "Softmax", delayed("        store_p(self.plan, lane, stage)\n"))
    if not cured:
        changed(mma, [kernel], "Mma", ("pipes.p.wait(p_state, q_tile)", "pass"))
    policies = tuple(("random", seed) for seed in range(3))
    assert bool(noticed(moving(p_path, "pingpong"), policies)) == (not cured)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("exponentiate", "finite_max = Float32(0.0)"),
        ("next_max", "acc_scale = Float32(1.0)\n    ret"),
    ],
)
def test_a_fully_masked_tile_makes_no_nan(changed, name, cure):
    """The walk begins at the last tile, of which the first rows see nothing: their maximum is still
    -inf when they meet only keys that score -inf."""
    case = Case(130, 200, causal=True)
    assert not noticed(case)
    variable, _, value = cure.partition(" = ")
    uncured = f"{variable} = {variable}{value.partition(')')[2]}"
    changed(online_softmax, [softmax], name, (cure, uncured))
    assert "wrong O" in noticed(case)


@BOTH_SCHEDULES
def test_nan_in_values_past_a_length_stays_there(changed, schedule):
    case = Case(3, 300, kv_lens=(200,), schedule=schedule)
    assert not noticed(case)
    cure = "if lane.row.lane >= valid:"
    users = [correction, softmax]
    changed(correction, users, "clear_tail_rows", (cure, "if lane.row.lane >= TILE_N:"))
    # The ping-pong schedule calls it from the copied file.
    changed(correction, [kernel], "Correction", (cure, "if lane.row.lane >= TILE_N:"))
    assert noticed(case)


def test_raw_output_of_fp16_does_not_overflow():
    """Its cure is the default out_dtype, fp32."""
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
    changed(online_softmax, [epilogue], "finish_row", cure)
    assert noticed(case)
