"""The functional traps of the design: for each, the kernel without its cure has to be noticed.

A cure is a few words of the source. Each test takes them out of a copy of the file, compiles that,
and expects wrong numbers, a deadlock or a refusal under some schedule; the kernel as it is passes
under all of them. (Publishing late costs time, not correctness: test_static.py.)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path

import pytest
import torch

import kernelkit.compile
from fmha.sm100 import kernel
from fmha.sm100.roles import correction, epilogue, publish, softmax
from kernelkit import online_softmax
from ptxemu import Deadlock, PtxEmuError
from tests.fmha import cases
from tests.fmha.cases import Case

SCHEDULES = (("round-robin", 0), ("adversarial", 0), ("adversarial", 1))
SMEM = Case(130, 640, amplitude=4.0, causal=True, p_path="smem")  # maxima move: O is rescaled
TMEM = dataclasses.replace(SMEM, p_path="tmem")
_serial = itertools.count()


@pytest.fixture(autouse=True)
def poisoned_outputs():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def changed(monkeypatch, tmp_path):
    """changed(module, user, name, (old, new), ...): `user` gets the `name` of a copy of `module`
    in which each old text, which stands there once, is the new one."""

    def change(module, user, name, *replacements):
        source = Path(module.__file__).read_text(encoding="utf-8")
        for old, new in replacements:
            assert source.count(old) == 1, f"the cure {old!r} is not where it was"
            source = source.replace(old, new)
        path = tmp_path / f"changed_{next(_serial)}.py"  # the DSL reads functions from their files
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        monkeypatch.setattr(user, name, getattr(copy, name))
        monkeypatch.setattr(kernelkit.compile, "_compiled", {})

    return change


def verdicts(case: Case) -> list[str]:
    """'right', or what was noticed, under each schedule."""
    return [_verdict(case, *schedule) for schedule in SCHEDULES]


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
    return f"wrong {', '.join(wrong)}" if wrong else "right"


def noticed(case: Case) -> bool:
    return set(verdicts(case)) != {"right"}


@pytest.mark.parametrize("case", [SMEM, TMEM], ids=str)
def test_the_kernel_as_it_is_passes(case):
    assert not noticed(case)


# A kernel that keeps the registers of its first S to the end, when S has long been overwritten, and
# returns O = 0 where they are not what they were. Only waiting for loads makes that safe.
_KEEP_FIRST_S = (
    (
        "        row_max, row_sum = -Float32.inf, Float32(0.0)\n",
        "        row_max, row_sum = -Float32.inf, Float32(0.0)\n"
        "        kept = cute.make_rmem_tensor(self.plan.layout.lane_columns, Float32)\n"
        "        lane.pipes.s.wait(s_state)\n"
        "        self.read_scores(lane, s_state.index)\n"
        "        tmem.wait_loads( )\n"
        "        total = row_total(lane.scores)\n"
        "        again = Lane(row, kept, scope.scalars, scope.buffers, scope.pipes)\n"
        "        self.read_scores(again, s_state.index)\n",
    ),
    (
        "        store_results(self.plan, work, walk, lane, (row_max, row_sum), scope.tensors)\n",
        "        if row_total(kept) != total:\n"
        "            row_sum = Float32(0.0)\n"
        "        store_results(self.plan, work, walk, lane, (row_max, row_sum), scope.tensors)\n",
    ),
)


@pytest.mark.parametrize("path", ["smem", "tmem"])
@pytest.mark.parametrize("cured", [True, False])
def test_registers_of_s_have_arrived_when_s_is_given_away(changed, path, cured):
    case = Case(130, 640, p_path=path)  # small scores: no O is rescaled, which waits for loads, too
    removal = () if cured else (("        tmem.wait_loads()\n", ""),)
    changed(softmax, kernel, "Softmax", *removal, *_KEEP_FIRST_S)
    assert noticed(case) == (not cured)


def test_p_in_shared_memory_waits_for_the_product_before(changed):
    wait = "            lane.pipes.o.wait(o_state)  # the P V before has read the one buffer of P\n"
    store = "            store_p(self.plan, lane, s_state.index)\n"
    changed(softmax, kernel, "Softmax", (wait + store, store + wait))
    assert noticed(SMEM)


def test_p_in_shared_memory_is_fenced_for_the_tensor_core(changed):
    fence = (
        "    if cutlass.const_expr(plan.config.p_in_smem):\n"
        '        cute.arch.fence_proxy("async.shared", space="cta")\n'
    )
    changed(publish, softmax, "store_p", (fence, ""))
    assert noticed(SMEM)


def test_o_is_not_rescaled_while_a_product_adds_to_it(changed):
    store = "            store_p(self.plan, lane, s_state.index)\n"
    wait = "            lane.pipes.o.wait(o_state)\n"
    changed(softmax, kernel, "Softmax", (store + wait, store))
    assert noticed(TMEM)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("exponentiate", "        finite_max = Float32(0.0)\n"),
        ("next_max", "        shrink = Float32(1.0)\n"),
    ],
)
def test_a_fully_masked_tile_makes_no_nan(changed, name, cure):
    """The first tile of the walk is the last one; the causal rows of QUERIES before it see nothing
    of it, and their maximum is still -inf."""
    case = Case(130, 200, causal=True)
    statement = cure.strip().split(" = ")[0]
    changed(online_softmax, softmax, name, (cure, f"        {statement} = {statement}\n"))
    assert noticed(case)


def test_nan_in_values_past_a_length_stays_there(changed):
    case = Case(3, 300, kv_lens=(200,))
    assert not noticed(case)
    changed(
        correction,
        softmax,
        "clear_tail_rows",
        ("        if lane.row.lane >= valid:\n", "        if lane.row.lane >= TILE_N:\n"),
    )
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
    case = Case(3, 70, normalize=normalize)
    assert not noticed(case)
    changed(
        online_softmax,
        epilogue,
        "finish_row",
        ("    return factor, (max_log2 + ", "    LN_2 = 1.0\n    return factor, (max_log2 + "),
    )
    assert noticed(case)
