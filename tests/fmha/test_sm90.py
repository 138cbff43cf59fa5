"""The Hopper kernel on the problems of the Blackwell kernel, and on its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fmha import attention
from fmha.api import fields_of
from fmha.arguments import Arguments
from fmha.choose import choose_config
from fmha.config import HEAD_DIMS, AttentionConfig
from fmha.plan import make_plan
from fmha.shared import two_rows
from fmha.sm90 import fp8, kernel, math
from fmha.sm90.layout import Layout
from kernelkit.call.launch import emulation
from lab.problems import attention as cases
from lab.problems.attention import PATIENCE, Case
from ptxemu import Options, PtxEmuError
from tests.fmha import test_kernel
from tests.fmha.space import MATRIX, PLAIN, QUICK, SWEPT
from tests.fmha.test_kernel import EXACT, MOVING, by_group

pytestmark = pytest.mark.usefixtures("poisoned_outputs")

ARCH = "sm_90a"
CHECKED = Options(policy="adversarial", seed=2, check=True, limit=PATIENCE)
FRIENDLY = Options(policy="round-robin", limit=PATIENCE)


def check(case: Case, *schedules: Options) -> None:
    test_kernel.check(case, schedules, ARCH)


@pytest.mark.parametrize("case", by_group(PLAIN))
def test_shapes(case):
    check(case, CHECKED, FRIENDLY)


@pytest.mark.parametrize("case", by_group((*QUICK, *MOVING, *EXACT)))
def test_every_value_of_every_factor(case):
    check(case, CHECKED)


@pytest.mark.parametrize("case", by_group(MATRIX + SWEPT))
def test_every_pair_of_values(case):
    check(case, CHECKED, FRIENDLY)


GROWING = Case(130, 640, (1, 1), dims=(128, 128), amplitude=12.0)  # maxima move between tiles


@pytest.mark.parametrize("config", [{"tile_m": 64}, {}, {"schedule": "base"}])
def test_maxima_that_move_are_found(config):
    check(dataclasses.replace(GROWING, **config), CHECKED, FRIENDLY)


PAIRED = (
    Case(600, 700, (2, 1), causal=True, pack_heads=False),
    Case(150, 300, (1, 1), 2, dims=(256, 256), k_lens=(290, 130), normalize=False),
    Case(
        0, 300, (1, 1), 3, q_lens=(130, 0, 300), dims=(128, 128), page_size=16,
        kv_lens=(160, 5, 300), causal=True,
    ),
    Case(140, 200, (2, 1), dims=(512, 512), causal=True, kv_lens=(190,)),
    Case(200, 400, (4, 1), dims=(192, 128), window=(90, 20), sink_tokens=8, pack_heads=True),
)  # fmt: skip


@pytest.mark.parametrize("case", PAIRED)
def test_ctas_share_what_they_fetch(case):
    check(dataclasses.replace(case, ctas=2), CHECKED, FRIENDLY)


@pytest.mark.parametrize("polynomial", [0, 16])
def test_weights_beyond_fp32_ask_for_the_maximum(polynomial):
    """The polynomial is included: an exponent that overflows into the sign looks like a small
    weight."""
    check(dataclasses.replace(GROWING, amplitude=300.0, polynomial=polynomial), CHECKED)


# Relative to a maximum of 0 no weight would be left, and some rows see nothing of the first tile.
LOW = Case(100, 100, causal=True, tile_n=48, amplitude=0.0, depth=16.0, scale=1.0)
LOW_E4M3 = dataclasses.replace(LOW, dims=(128, 128), dtype="e4m3", tile_n=64, q_offset=(-16,))


@pytest.mark.parametrize(
    "case", [LOW, LOW_E4M3, dataclasses.replace(LOW, dims=(512, 512), tile_n=0)], ids=str
)
def test_rows_find_their_first_maximum_however_low(case):
    check(case, FRIENDLY)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_large_scores_are_as_exact_as_a_tensor_core(dtype):
    """The tensor core truncates each step's sum; products here are positive, so errors add up."""
    case = Case(8, 64, (1, 1), dims=(512, 512), dtype=dtype, amplitude=400.0)
    q, k, v = case.inputs()
    inputs = q.abs(), k.abs(), v
    with emulation(Options(limit=PATIENCE, accumulation="aligned"), arch=ARCH):
        results = attention(*inputs, return_lse=True)
    assert all(report.ok for report in cases.judge(case, results, inputs, aligned_sums=True))
    o, lse = cases.judge(case, results, inputs)
    assert o.ok
    assert not lse.ok


def test_rows_that_nobody_has_find_no_maximum():
    """Three heads share tiles with 63 of 64 rows each. The last row's contents, NaN here, must not
    make the warpgroup compute S again."""
    case = Case(42, 512, (3, 1), 1, pack_heads=True, tile_m=128, amplitude=0.1)
    _, reports = cases.run_reported(case, FRIENDLY, arch=ARCH)
    ((report,),) = (report.launches for report in reports)
    plan = make_plan(AttentionConfig(group=3, tile_m=128), ARCH)
    tiles = 512 // plan.layout.tile_n
    assert report.counts["mma"] == 2 * tiles * (64 // 16 + plan.layout.tile_n // 16)


def test_a_pair_fetches_each_key_once():
    """Blocks of one CTA have half the rows, and fetch each key twice as often."""
    fetched, q_bytes = [], 2 * 2 * 512 * 64
    for ctas in (1, 2):
        case = Case(512, 640, (2, 2), dims=(64, 64), ctas=ctas, tile_m=128)
        _, reports = cases.run_reported(case, Options(limit=PATIENCE), arch=ARCH)
        ((report,),) = (report.launches for report in reports)
        fetched.append(report.bytes["tma.load"] - q_bytes)
    assert fetched[0] == 2 * fetched[1]


LARGE = dataclasses.replace(GROWING, amplitude=60.0, dtype="fp16")
LENGTHS = Case(100, 200, (1, 1), kv_lens=(150,))
TRAPS = {
    # The weights show if their reference maximum is too small; a kernel that does not check
    # overflows.
    "asks": (
        LARGE,
        ('if any_of(self.plan.barriers, "warpgroup", lane.team, mine):', "if walk.tiles < 0:"),
    ),
    "clears": (LENGTHS, ("self.clear_tail_rows(scope, walk, v_state)", "pass")),
    "fences": (LENGTHS, ('cute.arch.fence_proxy("async.shared", space="cta")', "pass")),
    "waits for S": (GROWING, ("warpgroup.wait_group(1)", "pass")),
    "waits for P V": (
        GROWING,
        ("warpgroup.wait_group(0)\n        exponentiate(", "exponentiate("),
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_kernel_without_its_cure_is_noticed(changed, trap):
    case, replacement = TRAPS[trap]
    changed(math, [kernel], "Math", replacement)
    assert noticed(case)


FP8 = Case(100, 400, (1, 1), dims=(128, 128), kv_lens=(350,), dtype="e4m3", causal=True)
NARROW, WIDE = (dataclasses.replace(FP8, dims=dims) for dims in ((64, 64), (256, 256)))
TERMS = dataclasses.replace(FP8, dtype="bf16", kv_dtype="e4m3")
TURN, SPLIT = (fp8, [kernel], "Turn"), (fp8, [fp8], "split_q")
MATH = (fp8, [kernel], "MathFp8")
FENCE = 'cute.arch.fence_proxy("async.shared", space="cta")'
FP8_TRAPS = {
    "turns no rows past the keys": (
        FP8, TURN, ("words = self.kept(words, valid - own - keys - lane % 4 * 2)", "pass"),
    ),
    "fences what it turned": (
        FP8, TURN, (f"(walk, step))\n                {FENCE}", "(walk, step))"),
    ),
    "waits for room": (FP8, TURN, ("pipes.vt.wait_free(vt_state)", "pass")),
    "waits for V": (FP8, TURN, ("pipes.v.wait(v_state)", "pass")),
    "adds every part": (NARROW, MATH, ("self.add_part(tile, part)", "pass")),
    "waits for the part": (NARROW, MATH, ("warpgroup.wait_group(waits[part])", "pass")),
    "waits for some of all parts": (
        WIDE, MATH, ("waits.append(behind + (following", "waits.append(behind + 1 + (following"),
    ),
    "waits for P V beside S": (
        FP8, MATH, ("warpgroup.wait_group(0)\n            self.add_part", "self.add_part"),
    ),
    "asks whether a weight was too large": (
        dataclasses.replace(FP8, climb=6.0),
        (two_rows, [two_rows], "is_full"),
        ("return found & SIGNS != 0", "return found & SIGNS == 1"),
    ),
    "reads Q before it writes terms": (
        TERMS, SPLIT,
        ('meet(plan.barriers, "warpgroup", lane.team)  # all of Q is in registers', "pass"),
    ),
    "fences terms": (TERMS, SPLIT, (f"terms[2:])\n    {FENCE}", "terms[2:])")),
    "scales rows by their power": (
        TERMS,
        MATH,
        ("reference.factor[half] = bounded_factor(reference.factor[half], powers[half])", "pass"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("trap", FP8_TRAPS)
def test_e4m3_without_its_cure_is_noticed(changed, trap):
    case, (module, users, name), replacement = FP8_TRAPS[trap]
    changed(module, users, name, replacement)
    assert noticed(case)


@pytest.mark.parametrize("case", [FP8, TERMS, dataclasses.replace(FP8, climb=6.0)], ids=str)
def test_e4m3_with_all_cures_is_not(case):
    assert not noticed(case)


def noticed(case: Case, arch: str = ARCH) -> bool:
    for options in (FRIENDLY, CHECKED):
        try:
            results, reports = cases.run_reported(case, options, arch=arch)
        except PtxEmuError:
            return True
        if any(report.findings for report in reports):
            return True
        if not all(report.ok for report in cases.judge(case, results)):
            return True
    return False


@pytest.mark.parametrize("dims", HEAD_DIMS)
def test_every_variant_is_a_plan(dims):
    variants = [*Layout(AttentionConfig(*dims)).variants()]
    assert {config.tile_n for config in variants} >= ({64, 80} if dims[0] < 512 else {64})
    for config in variants:
        plan = make_plan(config, ARCH)
        assert min(plan.layout.stages) >= (2 if dims[0] < 512 else 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"head_dim": 512, "tile_m": 128}, "tile_m 128: one of \\(64,\\)"),
        ({"head_dim": 512, "tile_n": 80}, "tile_n 80 with 64 query rows"),
        ({"ctas": 3}, "ctas 3"),
        ({"tile_m": 256}, "tile_m 256"),
        ({"tile_m": 100}, "tile_m 100"),
        ({"tile_n": 136}, "tile_n 136"),
        ({"tile_m": 192, "tile_n": 144}, "tile_n 144 with 192 query rows"),
    ],
)
def test_what_registers_cannot_hold_is_refused(config, words):
    with pytest.raises(NotImplementedError, match=words):
        make_plan(AttentionConfig(**config), ARCH)


@pytest.mark.parametrize(
    ("case", "ctas"),
    [
        (Case(8192, 8192, (8, 8), 2, dims=(256, 256)), 2),
        (Case(8192, 8192, (8, 8), 2, dims=(256, 256), causal=True), 2),
        (Case(4096, 4096, (8, 8), 4, dims=(256, 256), causal=True), 0),
        (Case(1024, 8192, (8, 8), 1, dims=(256, 256)), 0),
        (Case(8192, 8192, (16, 16), 2, dims=(128, 128), causal=True), 0),
        (Case(8192, 8192, (64, 8), 1, causal=True, window=(127, None)), 0),
    ],
    ids=["long", "long, causal", "shorter, causal", "few blocks", "head dim 128", "a window"],
)
def test_ctas_share_where_it_spares_power(case, ctas):
    options = {name: given for name, given in case.arguments().items() if name != "return_lse"}
    arguments = Arguments(**fields_of(*case.inputs("meta"), options))
    assert choose_config(arguments, ARCH).ctas == ctas


def test_windows_share_tiles_between_heads():
    """gpt-oss: eight query heads per KV head; each row sees 128 keys."""
    q, k = (torch.empty(1, 8192, heads, 64, device="meta").bfloat16() for heads in (64, 8))
    arguments = Arguments(**fields_of(q, k, k, {"causal": True, "window": (127, None)}))
    config = choose_config(arguments, ARCH)
    assert (config.group, config.tile_m, config.tile_n) == (8, 192, 80)
