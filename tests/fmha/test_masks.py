"""Functions of positions and lists of key blocks: every recipe, beside every other mask, and every
operation that a function may use."""

from __future__ import annotations

import dataclasses
import random
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import fmha
from fmha import (
    attention,
    attention_plan,
    block_lists,
    reference,
    trace_mask_mod,
    trace_score_mod,
)
from fmha.shared import load, mods, two_rows, walk
from fmha.sm90 import math, products
from kernelkit.call.launch import emulation
from kernelkit.numerics import tolerance
from lab.house.source import ROOT
from lab.problems import attention as cases
from lab.problems.attention import PATIENCE, Case
from lab.tools.groups import RECIPES
from ptxemu import Options
from tests.fmha import test_kernel
from tests.fmha.test_kernel import by_group

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCHS = ("sm_100a", "sm_90a", "sm_89")
CHECKED = Options(policy="adversarial", seed=2, check=True, limit=PATIENCE)
FRIENDLY = Options(policy="round-robin", limit=PATIENCE)

ALONE = tuple(Case(130, 300, (2, 1), 2, mask=name, pack_heads=False) for name in RECIPES)
OTHERS = (
    Case(64, 300, (4, 2), 2, mask="document", causal=True, pack_heads=True),
    Case(1, 300, (8, 1), 2, mask="alibi", pack_heads=True),
    Case(0, 0, (2, 1), 3, q_lens=(60, 3, 130), k_lens=(80, 200, 140), mask="document"),
    Case(0, 300, (2, 1), 3, q_lens=(40, 0, 7), kv_lens=(300, 9, 77), page_size=16, mask="prefix"),
    Case(70, 200, (2, 1), 2, mask="alibi", causal=True, kv_lens=(200, 77), sinks=True),
    Case(64, 60, (2, 2), 2, mask="document"),  # the first queries have positions below 0
    Case(40, 200, mask="prefix", q_offset=(300,)),
    Case(100, 400, (2, 1), mask="chunks", window=(150, 20), sink_tokens=5),
    Case(33, 300, (2, 1), 2, mask="alibi", tree="branches", window=(90, None)),
    Case(100, 300, (2, 1), mask="document", causal=True, softcap=15.0, dtype="fp16"),
    Case(64, 260, (2, 1), mask="softcap", dims=(192, 128), normalize=False),
    Case(64, 260, (2, 1), mask="sliding-global", dims=(256, 256), out_dtype="fp32"),
    Case(130, 333, (4, 1), mask="alibi", causal=True, dims=(96, 96), amplitude=64.0),
    Case(130, 333, (2, 1), mask="prefix", dims=(128, 128), dtype="fp16", amplitude=64.0),
)  # fmt: skip
OF_LARGE_GPUS = (
    Case(40, 200, (8, 1), mask="document", dims=(512, 512)),
    Case(40, 200, (2, 1), mask="alibi", dims=(512, 512), causal=True),
    Case(130, 333, (4, 1), 2, mask="alibi", dtype="e4m3", dims=(128, 128), scales=True),
    Case(130, 333, (4, 1), 2, mask="document", kv_dtype="e4m3", causal=True, scales=True),
    Case(130, 300, (2, 1), mask="alibi", causal=True, schedule="pingpong"),
)  # fmt: skip
BLOCKS = (
    Case(300, 300, (2, 1), 2, mask="document", causal=True, blocks=128),
    Case(260, 520, (4, 2), mask="prefix", blocks=256, pack_heads=True),
    Case(500, 300, (1, 1), 2, mask="sliding-global", blocks=128),
    Case(300, 640, (2, 2), 2, blocks=128),
    Case(200, 130, (4, 1), blocks=128, causal=True, dims=(128, 128), dtype="fp16"),
    Case(300, 300, (2, 1), mask="alibi", causal=True, blocks=128, sinks=True),
    Case(300, 384, (2, 1), blocks=128, dims=(192, 128), normalize=False),
    Case(200, 512, (4, 1), blocks=256, dims=(256, 256), softcap=15.0),
)
BLOCKS_OF_LARGE_GPUS = (
    Case(130, 256, (2, 1), blocks=128, dims=(512, 512)),
    Case(300, 640, (2, 1), 2, blocks=128, dtype="e4m3", dims=(128, 128), scales=True),
    Case(300, 300, mask="document", blocks=256, schedule="pingpong"),
)


def check(case: Case, arch: str, *schedules: Options) -> None:
    if arch == "sm_89":
        case = dataclasses.replace(case, instructions="mma.sync", schedule="")
    test_kernel.check(case, schedules, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", by_group(ALONE))
def test_recipes(case, arch):
    check(case, arch, CHECKED)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", by_group(OTHERS))
def test_functions_beside_other_masks(case, arch):
    check(case, arch, CHECKED, FRIENDLY)


@pytest.mark.parametrize("arch", ARCHS[:2])
@pytest.mark.parametrize("case", by_group(OF_LARGE_GPUS + BLOCKS_OF_LARGE_GPUS))
def test_functions_and_blocks_beside_what_tma_and_fp8_need(case, arch):
    if case.schedule and arch != "sm_100a":
        case = dataclasses.replace(case, schedule="base")
    check(case, arch, CHECKED, FRIENDLY)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("case", by_group(BLOCKS))
def test_lists_of_blocks(case, arch):
    check(case, arch, CHECKED, FRIENDLY)


@pytest.mark.parametrize("seed", range(50))
def test_random_lists(seed):
    """Four problems each, for the kernels of all architectures."""
    pick = random.Random(seed)
    for _ in range(4):
        mask, keys = pick.choice(("", "", *RECIPES)), pick.randint(128, 900)
        case = Case(
            pick.randint(1, 500), keys, (2, 1), 2, mask=mask, blocks=128, pack_heads=False,
            causal=bool(mask) and pick.random() < 0.5, amplitude=pick.choice((1.0, 4.0)),
        )  # fmt: skip
        check(case, pick.choice(ARCHS), FRIENDLY)


# -- operations -----------------------------------------------------------------------------------

FLAGS, BIAS = torch.tensor([True, False, True]), torch.linspace(-1, 1, 6).view(2, 3).bfloat16()


def of_ints(score, b, h, q, k):
    """Integer operations, of both signs."""
    far = q - k
    parts = (far // 3) + (far % 5) - (far // 8) * 2 + (far % 16) + (far >> 1) - (k << 1)
    bits = ((q & 7) | (k ^ 3)) - ~far
    near = torch.minimum(torch.abs(far), torch.tensor(40)) + far.clamp(min=-9, max=11)
    return score + (parts + bits + near) * 0.01 + (5 - h) * 0.1 - (-b)


def of_floats(score, b, h, q, k):
    """Floating-point operations."""
    x = (k - q) / 64.0 + 0.3
    smooth = torch.tanh(x) + torch.sigmoid(x) + torch.sin(x) * torch.cos(x) + torch.exp(-x * x)
    roots = torch.sqrt(x.abs() + 1) + torch.rsqrt(torch.square(x) + 1) + torch.floor(x)
    logs = torch.log(torch.abs(x) + 2) + torch.log2(x * x + 2) + torch.exp2(-torch.abs(x))
    return score * 0.5 + smooth + roots + torch.where(k > q, logs, 1.5) + 2.0**-3


def of_tables(score, b, h, q, k):
    """Elements of tensors, by computed indices, constant ones and booleans."""
    flag = FLAGS[(q + k) % 3] & (q != k) ^ (k <= 7)
    bias = torch.where(flag, BIAS[h, k % 3], BIAS[b, 0]).float()
    return torch.where(~flag | (k * 2 >= q), score + bias, -torch.inf)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("function", [of_ints, of_floats, of_tables])
def test_operations_are_those_of_torch(function, arch):
    case = Case(100, 170, (2, 1), 2, pack_heads=False)
    inputs = case.inputs()
    with emulation(FRIENDLY, arch=arch):
        found = attention(*inputs, score_mod=function, return_lse=True)
    judge(found, inputs, score_mod=function)


def judge(found, inputs, **options):
    exact, rounded = (f(*inputs, **options) for f in (reference.definition, reference.rounded))
    for report in (
        tolerance.compare_output(found[0], exact.o, rounded.o, inputs[0].dtype),
        tolerance.compare_lse(found[1], exact.lse, rounded.lse),
    ):
        assert report.ok, str(report)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_row_may_see_nothing(arch):
    """Whole tiles are hidden before the first key that a row sees, and all keys of some rows."""
    inputs = Case(100, 400, (2, 1), 2, pack_heads=True).inputs()

    def mask(b, h, q, k):
        return (q % 3 != 0) & (k < 20) & (h == b)

    with emulation(CHECKED, arch=arch):
        o, lse = attention(*inputs, mask_mod=mask, return_lse=True)
    judge((o, lse), inputs, mask_mod=mask)
    assert (o[0, :, 1] == 0).all()
    assert (lse[1, 0] == -torch.inf).all()


def test_indices_are_clamped_to_a_table():
    inputs = Case(64, 200).inputs()
    short, long = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 1, 1, 0] + [1] * 300)
    with emulation(CHECKED, arch="sm_90a"):
        found, wanted = (
            attention(*inputs, mask_mod=lambda b, h, q, k, t=table: t[k] == 1)
            for table in (short, long)
        )
    assert torch.equal(found, wanted)


# -- blocks ---------------------------------------------------------------------------------------


def test_work_falls_with_the_number_of_blocks():
    inputs, counts = Case(128, 2048, dims=(128, 128)).inputs(), {}
    for number in (2, 4, 16):
        order = torch.arange(16, dtype=torch.int32).view(1, 1, 1, 16)
        lists = SimpleNamespace(
            mask_block_cnt=torch.zeros(1, 1, 1, dtype=torch.int32), mask_block_idx=order,
            full_block_cnt=torch.full((1, 1, 1), number, dtype=torch.int32), full_block_idx=order,
        )  # fmt: skip
        with emulation(FRIENDLY, arch="sm_90a") as active:
            o = attention(*inputs, block_mask=lists)
        (launch,) = active.reports[0].launches
        counts[number] = launch.by_warp[0].total()
        q, k, v = inputs
        judge_first = reference.definition(q, k[:, : 128 * number], v[:, : 128 * number])
        assert (o - judge_first.o).abs().max() < 0.01
    step = (counts[4] - counts[2]) / 2  # warp instructions of a block
    assert counts[16] - counts[4] == pytest.approx(12 * step, rel=0.15)


def test_a_block_mask_brings_its_function():
    inputs, mask = Case(200, 200, (2, 2)).inputs(), lambda b, h, q, k: (k <= q) & (k % 7 != h)
    found = create_block_mask(mask, 1, 2, 200, 200, device="cpu")
    with emulation(FRIENDLY, arch="sm_90a"):
        o, lse = attention(*inputs, block_mask=found, return_lse=True)
    judge((o, lse), inputs, mask_mod=mask)


def test_lists_without_whole_blocks():
    inputs, mask = Case(200, 200).inputs(), lambda b, h, q, k: k <= q
    found = create_block_mask(mask, 1, 1, 200, 200, device="cpu", separate_full_blocks=False)
    with emulation(FRIENDLY, arch="sm_90a"):
        o, lse = attention(*inputs, block_mask=found, return_lse=True)
    judge((o, lse), inputs, mask_mod=mask)


def blocks_of(counts, indices, **changes):
    counts = torch.tensor(counts, dtype=torch.int32).view(1, 1, -1)
    none, indices = torch.zeros_like(counts), torch.tensor([[indices]], dtype=torch.int32)
    lists = block_lists(
        SimpleNamespace(
            mask_block_cnt=none, mask_block_idx=indices,
            full_block_cnt=counts, full_block_idx=indices,
        )
    )[0]  # fmt: skip
    return dataclasses.replace(lists, **changes)


def test_lists_outside_the_limits_are_refused():
    q, k = torch.zeros(1, 200, 2, 64).bfloat16(), torch.zeros(1, 300, 1, 64).bfloat16()
    good = blocks_of([1, 1], [[0, 1], [0, 1]])
    heads = torch.zeros(1, 2, 2, dtype=torch.int32)
    per_head = dataclasses.replace(good, full_counts=heads, full_indices=heads[..., None])
    for lists, given, error in (
        (good, {"causal": True}, "block_mask with causal"),
        (good, {"window": (9, None)}, "block_mask with window_left"),
        (good, {"kv_lens": torch.tensor([9]).int()}, "block_mask with kv_lens"),
        (blocks_of([1], [[0, 1]]), {}, r"lists of shape \(1, 1, 1, 2\)"),
        (blocks_of([3, 1], [[0, 1], [0, 1]]), {}, "full_counts: from 0 to 2"),
        (blocks_of([2, 1], [[0, 7], [0, 1]]), {}, "full_indices 7: from 0 to 1"),
        (blocks_of([2, 1], [[0, 2], [0, 1]]), {}, "full_indices 2: .* seen in part"),
        (blocks_of([2, 1], [[1, 1], [0, 1]]), {}, "listed twice"),
        (dataclasses.replace(good, order=heads[:, :1]), {}, "order .* once"),
        (dataclasses.replace(good, block_rows=100), {}, "blocks of 100 x 128: multiples"),
        (dataclasses.replace(good, block_keys=0), {}, "blocks of 128 x 0"),
        (per_head, {"pack_heads": True}, "heads share tiles"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=error):
            attention(q, k, k, block_mask=lists, arch="sm_90a", **given)
    with pytest.raises(TypeError, match="block_mask is int"):
        attention(q, k, k, block_mask=3)


# -- the page -------------------------------------------------------------------------------------


def test_examples_of_the_page_are_right(monkeypatch):
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/masks.md").read_text(), re.DOTALL)
    functions, calls = {}, []

    def trace(function):
        functions[trace_score_mod(function)] = function
        return trace_score_mod(function)

    def judged(*inputs, **options):
        o, lse = attention(*inputs, **options, return_lse=True)
        if "score_mod" in options:
            options["score_mod"] = functions.get(options["score_mod"], options["score_mod"])
        if "block_mask" in options:
            options["mask_mod"] = options.pop("block_mask").mask_mod
        judge((o, lse), inputs, **options)
        calls.append(options)
        return o

    monkeypatch.setattr(fmha, "attention", judged)
    monkeypatch.setattr(fmha, "trace_score_mod", trace)
    with emulation(FRIENDLY, arch="sm_90a"):
        exec(program, {})
    assert len(calls) == 6


# -- plans, and other ways to call ----------------------------------------------------------------


def test_plans_and_traced_functions_compute_the_same():
    inputs, ids = Case(130, 200, (2, 1)).inputs(), torch.arange(200)[None] // 40

    def document(b, h, q, k):
        return ids[b, q] == ids[b, k]

    traced = trace_mask_mod(document)
    with emulation(FRIENDLY, arch="sm_90a"):
        found = attention(*inputs, mask_mod=document)
        plan = attention_plan(*inputs, mask_mod=document)
        compiled = torch.compile(
            lambda *tensors: attention(*tensors, mask_mod=traced), backend="eager", fullgraph=True
        )
        assert torch.equal(attention(*inputs, mask_mod=traced), found)
        assert torch.equal(plan(*inputs)[0], found)
        assert torch.equal(compiled(*inputs), found)


# -- mutants --------------------------------------------------------------------------------------

CURES = {  # what the kernel of Hopper does -> (module, its users, name, text, replacement)
    "hides keys by the function": (
        mods, [two_rows], "hide_scores", "choose(seen, scores[element]",
        "choose(True, scores[element]",
    ),
    "evaluates a row's own position": (
        walk, [products], "row_of", "Spot(work.batch, head, position)",
        "Spot(work.batch, head, work.offset)",
    ),
    "compares a line in its own column": (
        mods, [two_rows], "hide_scores", "-a.slope * column)", "-a.slope * 0)",
    ),
    "reads another entry's documents": (
        walk, [products], "row_of", "Spot(work.batch, head, position)", "Spot(0, head, position)",
    ),
    "walks the blocks that are listed": (
        walk, [load, math], "first_key", "return listed_key(plan, walk, step)",
        "return step * plan.layout.tile_n",
    ),
    "masks only blocks that are seen in part": (
        walk, [load, math], "plan_walk", "masked=masked,", "masked=Int32(0),",
    ),
}  # fmt: skip
SEEN_BY = {
    "walks": Case(300, 640, (2, 1), 2, blocks=128),
    "masks": Case(300, 300, (2, 1), 2, mask="document", causal=True, blocks=128),
    "compares": Case(130, 300, (2, 1), 2, mask="prefix", pack_heads=False),
}


@pytest.mark.parametrize("cure", CURES)
def test_a_kernel_without_its_cure_is_noticed(changed, cure):
    module, users, name, *replacement = CURES[cure]
    changed(module, users, name, tuple(replacement))
    case = SEEN_BY.get(cure.split()[0], Case(130, 300, (2, 1), 2, mask="document"))
    results = cases.run(case, FRIENDLY, arch="sm_90a")
    assert not all(report.ok for report in cases.judge(case, results))
