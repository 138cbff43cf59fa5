"""wgmma of sm_90a: products element by element, warps that arrive in any order, findings of a
checker, and refusals.

The programs and inputs are those of `conformance.wgmma`, which run on a GPU, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import wgmma
from lab.silicon.conformance.ptx_program import POLICIES, emulate
from lab.silicon.conformance.wgmma import Variant, program
from ptxemu import watch
from ptxemu.errors import Deadlock, HardwareRefusal, UnsupportedPtx
from ptxemu.findings import NOTE, Finding
from ptxemu.machine.wgmma import smem_desc
from ptxemu.ops import registry
from ptxemu.syntax.tree import Instr

VARIANTS = {variant.name: variant for variant in wgmma.variants()}
PLAIN = Variant("f32.f16.f16", 16)
IN_REGISTERS = replace(PLAIN, a="registers")
DESCRIPTOR = "add.u64 %w12, %w10"  # B's descriptor in the programs
WAIT = "wgmma.wait_group.sync.aligned 0;"
COMMIT = "wgmma.commit_group.sync.aligned;"
FENCE = "wgmma.fence.sync.aligned;"
PROXY_FENCE = "fence.proxy.async.shared::cta;"
OVERWRITE = "setp.eq.u32 %p2, %thread, 127; @%p2 st.shared.b32 [s], 0;"


def run(
    variant: Variant, *changes: tuple[str, str], policy: str = "round-robin", **options: object
) -> tuple[np.ndarray, list[Finding]]:
    """Return D and the findings of a variant's program with replaced words."""
    made = program(variant).program
    text = made.text
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    module, how = ptxemu.load(text), ptxemu.Options(policy=policy, **options)
    with watch.watched() as report:
        out = emulate(replace(made, text=text), module, how)["out"]
    return out, [finding for launch in report.launches for finding in launch.findings]


def right(variant: Variant) -> np.ndarray:
    return wgmma.expected(variant).reshape(-1)


# -- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_products(name: str) -> None:
    """Each shape of each type, alternating layouts, signs, transposes and A in registers."""
    assert np.array_equal(run(VARIANTS[name])[0], right(VARIANTS[name]))


@pytest.mark.parametrize("b_mn", [False, True])
@pytest.mark.parametrize("a_mn", [False, True])
@pytest.mark.parametrize("swizzle", wgmma.SPANS)
def test_layouts(swizzle: str, a_mn: bool, b_mn: bool) -> None:
    variant = Variant("f32.bf16.bf16", 64, swizzle, swizzle, a_mn, b_mn, (-1, 1))
    assert np.array_equal(run(variant)[0], right(variant))


@pytest.mark.parametrize("types", ["s32.s8.u8", "s32.s8.u8.satfinite", "satfinite.s32.u8.u8"])
def test_integers_wrap_or_saturate(types: str) -> None:
    """Every other element of D starts near a limit."""
    variant = Variant(types, 16)
    assert np.array_equal(run(variant)[0], right(variant))
    ends = np.isin(right(variant), [2**31 - 1, 2**31])
    assert ends.any() == variant.saturates


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("a", ["64B", "registers"])
def test_every_schedule_gives_the_same(a: str, policy: str) -> None:
    variant = Variant("f16.f16.f16", 24, a)
    for seed in range(2):
        assert np.array_equal(run(variant, policy=policy, seed=seed)[0], right(variant))


def test_a_wait_leaves_the_newest_groups() -> None:
    """Under the adversarial schedule a group that it does not wait for has not run."""
    variant = replace(PLAIN, n=8)
    last = program(variant).program.text.rsplit("wgmma.mma_async", 1)[1].split(";")[0]
    chained = f"wgmma.mma_async{last};"
    committed = (chained, f"{COMMIT} {chained}")
    for allowed, complete in ((0, True), (1, False)):
        change = (WAIT, f"wgmma.wait_group.sync.aligned {allowed};")
        out, _ = run(variant, committed, change, policy="adversarial")
        assert np.array_equal(out, right(variant)) == complete


def test_moves_pass_accumulators_on_before_the_wait() -> None:
    moved = ("mov.b32 %r9, %d0; mov.f32 %f0, %d1;", "mov.b32 %d0, %r9; mov.f32 %d1, %f0;")
    change = (f"{COMMIT} {WAIT}", f"{COMMIT} {moved[0]} {WAIT} {moved[1]}")
    declared = (".reg .b32 %d<", ".reg .f32 %f<2>; .reg .b32 %d<")
    for policy in POLICIES:
        out, found = run(PLAIN, change, declared, policy=policy, check=True)
        assert not found
        assert np.array_equal(out, right(PLAIN))


# -- the checker ----------------------------------------------------------------------------------

# replaced text -> what the finding says is missing
WRONG: dict[str, tuple[Variant, tuple[str, str], str]] = {
    "no wait": (PLAIN, (WAIT, ""), "wgmma.wait_group"),
    "no commit": (PLAIN, (COMMIT, ""), "wgmma.commit_group"),
    "no fence": (PLAIN, (FENCE, ""), "wgmma.fence"),
    "a use before the wait": (PLAIN, (WAIT, f"add.u32 %r9, %d3, 1; {WAIT}"), "wgmma.wait_group"),
    "D written behind the fence": (PLAIN, (FENCE, f"{FENCE} add.u32 %d1, %d1, 0;"), "wgmma.fence"),
    "A written behind the fence": (
        IN_REGISTERS,
        (FENCE, f"{FENCE} add.u32 %a5, %a5, 0;"),
        "wgmma.fence",
    ),
    "A written before the wait": (
        IN_REGISTERS,
        (WAIT, f"add.u32 %a5, %a5, 1; {WAIT}"),
        "wgmma.wait_group",
    ),
    "no proxy fence": (PLAIN, (PROXY_FENCE, ""), "fence.proxy.async"),
    "no barrier": (PLAIN, ("bar.sync 0;", ""), "a barrier"),
    "operands overwritten": (PLAIN, (WAIT, f"{OVERWRITE} {WAIT}"), "wgmma.wait_group"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_missing_is_found(name: str) -> None:
    variant, change, missing = WRONG[name]
    _, found = run(variant, change, check=True)
    assert any(missing in finding.missing for finding in found), found
    assert all(finding.check == "race" and finding.line for finding in found)
    assert len(found) <= variant.steps, "told once of each wgmma"


@pytest.mark.parametrize("variant", [PLAIN, IN_REGISTERS, replace(PLAIN, a_mn=True, b_mn=True)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_right_program_is_not_reported(variant: Variant, policy: str) -> None:
    assert not run(variant, policy=policy, check=True)[1]


def test_accumulators_that_were_only_read_are_a_note() -> None:
    """CUTLASS's dense_gemm_fp8_2xacc.py has no fence there."""
    change = (FENCE, f"{FENCE} st.global.b32 [%w62], %d0;")
    (note,) = run(PLAIN, change, check=True)[1]
    assert (note.check, note.severity, note.rule) == ("manual", NOTE, "wgmma.fence")


def test_the_wait_of_any_warp_tells_that_operands_were_read() -> None:
    assert not run(PLAIN, (WAIT, f"{WAIT} {OVERWRITE}"), check=True)[1]


@pytest.mark.parametrize("name", ["no wait", "no commit", "no proxy fence"])
def test_the_adversarial_schedule_shows_it(name: str) -> None:
    variant, change, _ = WRONG[name]
    out, _ = run(variant, change, policy="adversarial")
    assert not np.array_equal(out, right(variant))


def test_a_warp_writes_its_own_rows_of_a_without_a_barrier() -> None:
    """FlashAttention-3 does this with P; rows of another warp, and B, need a barrier."""
    own = "mad.lo.u32 %r9, %thread, 64, 0; add.u32 %r9, %r9, %r10;"
    for shift, races in ((0, False), (2048, True)):
        written = (
            f"bar.sync 0; mov.u32 %r10, s; add.u32 %r10, %r10, {shift}; {own}"
            f" ld.shared.b32 %r11, [%r9]; st.shared.b32 [%r9], %r11; {PROXY_FENCE}"
            " bar.warp.sync 0xffffffff;"
        )
        _, found = run(PLAIN, ("bar.sync 0;", written), check=True)
        assert bool(found) == races


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_90", "sm_100a", "sm_120a"])
def test_only_sm_90a_has_it(target: str) -> None:
    with pytest.raises(UnsupportedPtx, match=f"sm_90a.*{target}"):
        run(PLAIN, (".target sm_90a", f".target {target}"))


@pytest.mark.parametrize(
    "form",
    [
        "m64n12k16.f32.f16.f16",
        "m64n264k16.f32.f16.f16",
        "m64n8k8.f32.f16.f16",
        "m64n8k16.f32.f16.bf16",
        "m64n8k16.f16.bf16.bf16",
        "m64n40k32.s32.s8.s8",
        "m64n8k32.s32.s8.e4m3",
        "m64n8k256.s32.b1.b1.xor.popc",
        "m64n8k256.s32.b1.b1",
    ],
)
def test_forms_that_it_has_not(form: str) -> None:
    opcode = f"wgmma.mma_async.sync.aligned.{form}"
    with pytest.raises(UnsupportedPtx):
        registry.match(Instr(opcode, (), None, 1, opcode))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (", 1, 1, 0, 0;", ", 1, 1;"),
        (", 1, 1, 0, 0;", ", 2, 1, 0, 0;"),
        (", 1, 1, 0, 0;", ", 1, 1, 0, 2;"),
        ("%d6, %d7}", "%d6}"),
        ("%w11, %w12", "{%d0, %d1}, %w12"),
        ("mma_async.sync.aligned.m64", "mma_async.sp.sync.aligned.m64"),
    ],
)
def test_operands_that_do_not_fit(old: str, new: str) -> None:
    with pytest.raises(UnsupportedPtx):
        run(PLAIN, (old, new))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (DESCRIPTOR, "cvt.u64.u32 %w12, %thread; shr.u64 %w12, %w12, 5; shl.b64 %w12, %w12, 4; "
         "add.u64 %w10, %w10, %w12; add.u64 %w12, %w10", "equal operands"),
        (DESCRIPTOR, "cvt.u64.u32 %w12, %lane; add.u64 %w10, %w10, %w12; add.u64 %w12, %w10",
         "differs between the lanes"),
        (DESCRIPTOR, "or.b64 %w10, %w10, 0x4000; add.u64 %w12, %w10", "reserved"),
        (FENCE, "setp.eq.u32 %p2, %lane, 31; @%p2 exit; " + FENCE, "must be all 32"),
    ],
    ids=["of warps", "of lanes", "descriptor", "lanes"],
)  # fmt: skip
def test_what_hardware_refuses(old: str, new: str, told: str) -> None:
    with pytest.raises(HardwareRefusal, match=told):
        run(PLAIN, (old, new))


def test_a_warpgroup_has_four_warps() -> None:
    made = program(PLAIN).program
    text = made.text.replace("bar.sync 0;", "")
    with pytest.raises(HardwareRefusal, match="four warps"):
        emulate(replace(made, text=text, block=(64,)), ptxemu.load(text), ptxemu.Options())


def test_a_warp_that_does_not_come_is_named() -> None:
    leave = (FENCE, "setp.eq.u32 %p2, %thread, %lane; @%p2 exit; " + FENCE)
    with pytest.raises(Deadlock, match=r"wgmma m64n16k16 .* not executed by warp 0"):
        run(PLAIN, leave)
    with pytest.raises(HardwareRefusal, match=r"the CTA has ended, but wgmma .* by warp 0"):
        run(PLAIN, leave, (WAIT, ""))


def test_descriptors_of_reserved_bits_and_base_offsets() -> None:
    with pytest.raises(HardwareRefusal, match="reserved"):
        smem_desc(1 << 46)
    with pytest.raises(UnsupportedPtx, match="base offset"):
        smem_desc(1 << 49)
