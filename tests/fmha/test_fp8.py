"""K and V in e4m3, Q in e4m3 or bf16: every head dim and option, and what few bits make hard."""

from __future__ import annotations

import dataclasses
import math

import cutlass.cute as cute
import pytest
import torch
from cutlass import Uint32

from fmha import AttentionConfig, attention, reference
from fmha.plan import make_plan
from fmha.shared.fp8 import largest_of, power_of, two_terms
from fmha.sm100 import kernel
from fmha.sm100.roles import correction, mma, softmax
from kernelkit.call.launch import emulation
from kernelkit.device.words import float_of
from lab.problems import attention as cases
from lab.problems.attention import Case
from ptxemu import Options
from tests.fmha import test_kernel
from tests.fmha.space import MATRIX, QUICK
from tests.fmha.test_kernel import EVERY_POLICY, by_group
from tests.fmha.test_sm90 import CHECKED, FRIENDLY, noticed
from tests.kernelkit.row_kernel import apply_to_rows

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCHS = ("sm_100a", "sm_90a")
FORMS = {"e4m3": {"dtype": "e4m3"}, "two terms": {"dtype": "bf16", "kv_dtype": "e4m3"}}
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))

every_arch = pytest.mark.parametrize("arch", ARCHS)
every_form = pytest.mark.parametrize("form", FORMS)


def check(case: Case, arch: str, *schedules: Options) -> None:
    test_kernel.check(case, schedules, arch)


def small(form: str, dims: tuple[int, int] = (64, 64), **fields: object) -> Case:
    """Two blocks of queries and three tiles of keys, of which the lengths leave some unused."""
    return Case(130, 300, (2, 1), 2, dims=dims, kv_lens=(290, 130), **FORMS[form], **fields)


@every_form
@pytest.mark.parametrize("dims", DIMS, ids=str)
@every_arch
def test_every_head_dim(arch, dims, form):
    check(small(form, dims, scales=True, causal=True), arch, *EVERY_POLICY)


@every_form
@pytest.mark.parametrize("dims", DIMS[:4], ids=str)
def test_two_query_tiles(dims, form):
    """Head dim 192 is included, since its tiles of K are whole in this dtype."""
    case = dataclasses.replace(small(form, dims, schedule="pingpong"), sq=300)
    check(case, "sm_100a", *EVERY_POLICY)


def in_e4m3(case: Case, form: str) -> Case:
    """A row of the pairwise array in these dtypes, with tiles that MMAs of 32 keys divide."""
    tile_n = case.tile_n // 32 * 32
    return dataclasses.replace(case, tile_n=tile_n, scales=True, **FORMS[form])


OPTIONS = tuple(
    in_e4m3(case, form)
    for case, form in zip(QUICK + MATRIX, (*FORMS,) * len(MATRIX), strict=False)
    if case.dims[0] < 512
)


@pytest.mark.parametrize("case", by_group(OPTIONS))
@every_arch
def test_every_option(arch, case):
    if arch == "sm_90a":  # where transposed V is whole panels
        case = dataclasses.replace(case, tile_n=case.tile_n // 64 * 64)
    check(case, arch, CHECKED)


HOSTILE = {
    "one key": Case(5, 1, (2, 1)),
    "no key": Case(5, 7, (2, 1), 2, kv_lens=(0, 7)),
    "one weight of many": Case(130, 300, (1, 1), amplitude=64.0),
    "maxima that climb": Case(130, 640, (1, 1), climb=6.0),
    "maxima that lag by nothing": Case(130, 300, (1, 1), climb=6.0, rescale_log2=0.0),
    "maxima that lag by all": Case(130, 300, (1, 1), climb=6.0, rescale_log2=8.0),
    "tiny queries": Case(130, 300, (1, 1), amplitude=2.0**-125),
    "huge queries": Case(130, 300, (1, 1), amplitude=2.0**30, scale=2.0**-33),
    "heads in a tile": Case(42, 300, (3, 1), pack_heads=True, scales=True),
    "pages of an atom": Case(5, 130, (4, 2), 2, page_size=8, kv_lens=(83, 130), scales=True),
    "raw": Case(130, 300, (2, 2), normalize=False, scales=True),
}


@pytest.mark.parametrize(
    ("name", "form"),
    # e4m3 holds neither tiny nor huge numbers.
    [(name, form) for name in HOSTILE for form in FORMS if "queries" not in name or form != "e4m3"],
)
@every_arch
def test_hostile_numbers(arch, name, form):
    check(dataclasses.replace(HOSTILE[name], **FORMS[form]), arch, CHECKED, FRIENDLY)


@pytest.mark.parametrize(
    "case",
    [
        {"schedule": "base"},
        {"schedule": "pingpong"},
        {"dims": (256, 256)},
    ],
    ids=str,
)
@every_form
def test_blocks_without_keys_hold_nobody_up(at_once, form, case):
    """Several such blocks follow each other; their rows are published while the next Q waits to be
    split."""
    at_once(1)
    lengths = (200, 0, 0, 0, 130, 0, 7)
    check(
        Case(70, 200, (1, 1), 7, kv_lens=lengths, **FORMS[form], **case), "sm_100a", *EVERY_POLICY
    )


@every_arch
def test_rows_that_are_not_finite_spoil_no_others(arch):
    case = small("two terms")
    q, k, v = case.inputs()
    q[0, 3, 0, 5], q[0, 4, 0, 0], q[0, 129, 1] = math.inf, math.nan, 0.0
    with emulation(CHECKED, arch=arch):
        o, lse = attention(q, k, v, return_lse=True, **case.options())
    spoilt = torch.zeros_like(lse, dtype=torch.bool)
    spoilt[0, 0, 3:5] = True
    assert torch.equal(lse.isnan(), spoilt)
    assert torch.equal(o.isnan().all(-1), spoilt.transpose(1, 2))
    q[0, 3:5, 0], o[0, 3:5, 0], lse[0, 0, 3:5] = 0.0, 0.0, 0.0
    expected = reference.rounded(q, k, v, **case.options())
    o[0, 3:5, 0], lse[0, 0, 3:5] = expected.o[0, 3:5, 0], expected.lse[0, 0, 3:5]
    assert all(report.ok for report in cases.judge(case, (o, lse), (q, k, v)))


def split_eight(_scores: cute.Tensor, bits: cute.Tensor, _numbers: cute.Tensor) -> tuple:
    """Return the two terms of the last eight of sixteen bf16."""
    words = cute.make_rmem_tensor(8, Uint32)
    for word in range(8):
        words[word] = Uint32(bits[word])
    factor, _ = power_of(largest_of(words))
    return tuple(map(float_of, two_terms(tuple(words[word] for word in range(4, 8)), factor)))


@pytest.mark.parametrize("largest", [1.0, -1.9921875, 2.0**127, 2.0**-100])
def test_terms_are_those_of_the_reference(largest):
    """Both terms equal the reference for each bf16 of at least 2^-20 of the row's largest."""
    magnitudes = torch.arange(0x3580, 0x3F80).to(torch.int16).view(torch.bfloat16)
    numbers = torch.cat((magnitudes, -magnitudes)).reshape(-1, 8) * abs(largest)
    rows = torch.cat((torch.full_like(numbers, largest), numbers), 1)
    empty = torch.zeros(len(rows), 2)
    _, found = apply_to_rows(split_eight, empty, rows.view(torch.int32), empty)
    terms = found.contiguous().view(torch.float8_e4m3fn).reshape(-1, 2, 8).float()
    (second, first), power = reference._two_terms(rows.float())
    assert torch.equal(terms[:, 0], first[:, 8:])
    assert torch.equal(terms[:, 1], second[:, 8:])
    large = numbers.abs() >= abs(largest) * 2.0**-9
    assert torch.equal((terms.sum(1) * power)[large], numbers.float()[large])


TRAPS = {
    "clears the tail": (
        "e4m3",
        (correction, [correction], "clear_tail_rows"),
        ("if lane.row.lane >= valid and", "if lane.row.lane >= layout.tile_n and"),
    ),
    "waits for the terms": (
        "two terms",
        (mma, [mma], "own_q"),
        ("return pipes.q if pipes.terms is None else pipes.terms", "return pipes.o"),
    ),
    "fences the terms": (
        "two terms",
        (softmax, [softmax], "split_row"),
        ('high[2:]))\n    cute.arch.fence_proxy("async.shared", space="cta")', "high[2:]))"),
    ),
    "reads before it writes": (
        "two terms",
        (softmax, [softmax], "split_row"),
        ('meet(plan.barriers, "q_read", of.q_tile)', "pass"),
    ),
    "adds both terms": (
        "two terms",
        (mma, [kernel], "Mma"),
        ("for term in cutlass.range_constexpr(last, -1, -1):", "for term in (0,):"),
    ),
    "adds the last P V before it waits": (
        "two terms",
        (mma, [kernel], "Mma"),
        ("steps += layout.lag", "steps += 0"),
    ),
    "scales rows by their power": (
        "two terms",
        (softmax, [kernel], "Softmax"),
        (
            "factor = power if cutlass.const_expr(factor is None) else factor * power",
            "factor = power * 2.0",
        ),
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_kernel_without_its_cure_is_noticed(changed, trap):
    form, (module, users, name), replacement = TRAPS[trap]
    changed(module, users, name, replacement)
    assert noticed(small(form, causal=True), "sm_100a")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"head_dim": 512, "kv_dtype": "e4m3"}, "head_dim 512 with K and V in e4m3: at most 256"),
        ({"dtype": "e4m3", "tile_n": 80}, "tile_n 80: one of \\(64, 96, 128\\)"),
        ({"dtype": "fp16", "kv_dtype": "e4m3"}, "dtype 'fp16' with K and V in e4m3"),
    ],
)
def test_what_products_of_e4m3_cannot_do_is_refused(config, words):
    with pytest.raises(NotImplementedError, match=words):
        make_plan(AttentionConfig(**config), "sm_100a")
