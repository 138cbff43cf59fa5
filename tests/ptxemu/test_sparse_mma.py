"""tcgen05.mma.sp: products element by element, where metadata lie, what the checker finds, and what
is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import POLICIES, emulate
from ptxemu import watch
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.findings import Finding
from ptxemu.machine.umma_desc import instr_desc, require_shape

from .sparse_programs import Variant

DENSE_FORMATS = {
    "f16": [("f16", "f16", "f32"), ("bf16", "bf16", "f32"), ("f16", "f16", "f16")],
    "tf32": [("tf32", "tf32", "f32")],
    "f8f6f4": [("e4m3", "e5m2", "f32"), ("e5m2", "e2m1", "f16"), ("e2m1", "e4m3", "f32"),
               ("e3m2", "e2m3", "f32")],
    "i8": [("s8", "u8", "s32"), ("u8", "u8", "s32")],
}  # fmt: skip
# M, CTAs, first lane: each layout of D
PATHS = [(128, 1, 0), (64, 1, 0), (64, 1, 16), (256, 2, 0), (128, 2, 0), (128, 2, 16)]
PLAIN = [
    Variant(kind, *formats, m=m, ctas=ctas, lane=lane, n=n)
    for kind, all_formats in DENSE_FORMATS.items()
    for formats, (m, ctas, lane), n in product(all_formats, PATHS, (32, 128))
]
MAJORS = [
    Variant(kind, *formats[0], m=128 * ctas, ctas=ctas, mn_major=True, n=64, swizzle=swizzle)
    for kind, formats in DENSE_FORMATS.items()
    for ctas, swizzle in ((1, "128B"), (2, "64B"))
]
SWIZZLES = [
    Variant(*formats, swizzle=swizzle)
    for formats in (("f16",), ("i8", "s8", "s8", "s32"))
    for swizzle in ("none", "64B")
]
IN_TENSOR_MEMORY = [
    Variant(kind, *formats[0], m=m, ctas=ctas, lane=lane, a_in_tmem=True)
    for kind, formats in DENSE_FORMATS.items()
    for m, ctas, lane in PATHS
]
SCALED = [
    Variant(kind, a, b, m=128 * ctas, ctas=ctas, a_in_tmem=tmem, blocks=blocks, scale=scale)
    for (kind, blocks, scale), ctas, tmem in product(
        (("mxf8f6f4", 1, "ue8m0"), ("mxf4", 2, "ue8m0"), ("mxf4nvf4", 2, "ue8m0"),
         ("mxf4nvf4", 4, "ue8m0"), ("mxf4nvf4", 4, "ue4m3")),
        (1, 2),
        (False, True),
    )
    for a, b in ([("e4m3", "e2m1"), ("e5m2", "e3m2")] if kind == "mxf8f6f4" else [("e2m1", "e2m1")])
]  # fmt: skip
STATIONARY = [
    Variant(kind, *formats[0], m=m, n=n, a_in_tmem=tmem, stationary=True)
    for kind, formats in DENSE_FORMATS.items()
    for m, n, tmem in product((32, 64, 128), (64, 128), (False, True))
]
EVERY = [*PLAIN, *MAJORS, *SWIZZLES, *IN_TENSOR_MEMORY, *SCALED, *STATIONARY]
# a few of each, of every kind and layout
QUICK = [
    *PLAIN[::13],
    *MAJORS[::3],
    SWIZZLES[-1],
    *IN_TENSOR_MEMORY[4::9],
    *SCALED[::6],
    *STATIONARY[::11],
]
PAIR = Variant(m=256, ctas=2)


def run(variant: Variant, **options: object) -> tuple[np.ndarray, list[Finding]]:
    """D (m, n) and the findings."""
    made = variant.program()
    with watch.watched() as report:
        out = emulate(made, ptxemu.load(made.text), ptxemu.Options(**options))["d"]
    return variant.d_of(out), report.launches[0].findings


def replace_words(variant: Variant, changes: dict[str, str]) -> Variant:
    """The variant with the same numbers and other words of its program."""
    changed = replace(variant, changes=changes)
    changed.__dict__["numbers"] = variant.numbers
    return changed


def check(variant: Variant, **options: object) -> None:
    """D but for the roundings of its type."""
    d, expected = run(variant, **options)[0], variant.expected()
    step = {"s32": 0.0, "f16": 2.0**-10, "f32": 2.0**-20}[variant.d]
    np.testing.assert_allclose(d, expected, rtol=step, atol=step * np.max(np.abs(expected)))


@pytest.mark.parametrize("variant", QUICK, ids=str)
def test_products(variant: Variant) -> None:
    check(variant)


@pytest.mark.parametrize("variant", EVERY, ids=str)
def test_every_product(variant: Variant) -> None:
    check(variant)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_schedule_gives_the_same(policy: str) -> None:
    for seed in range(2):
        check(PAIR, policy=policy, seed=seed)


def test_a_group_of_zeros_needs_no_metadata() -> None:
    """CUTLASS's compressors write 0b0000 for it; with another number nobody knows what it means."""
    variant = Variant("f8f6f4", "e4m3", "e4m3")
    variant.numbers["kept"][37, 6:8] = 0
    variant.numbers["codes"][37, 3] = 0xE
    expected = variant.expected()
    variant.numbers["codes"][37, 3] = 0x0
    np.testing.assert_allclose(run(variant)[0], expected, rtol=1e-5, atol=1e-5)
    variant.numbers["kept"][37, 7] = 0x38
    with pytest.raises(HardwareRefusal, match=r"0b0000 of row 37, group 3 .* must be of 0b0100, "):
        run(variant)


def test_lanes_that_are_disabled_keep_what_they_have() -> None:
    """Tensor memory is all ones before, which is no number."""
    words = "{%r20, %r21, %r21, %r22}"
    changes = {
        "mov.b16 %h0, 3;": "mov.u32 %r20, 0x60; mov.u32 %r21, 0; mov.u32 %r22, 0x80000000;",
        "0x8080014, 0;": f"0x8080014, {words}, 0;",
        "0x8080015, 1;": f"0x8080015, {words}, 1;",
    }
    variant = Variant()
    d = run(replace_words(variant, changes))[0]
    kept = [5, 6, 127]
    assert np.isnan(d[kept]).all()
    expected = np.delete(variant.expected(), kept, 0)
    np.testing.assert_allclose(np.delete(d, kept, 0), expected, rtol=1e-5, atol=1e-5)


# -- the checker ----------------------------------------------------------------------------------

STORE = "tcgen05.st.sync.aligned.32x32b.x64.b32"
BEHIND_STORE = """barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    tcgen05.fence::after_thread_sync;
    setp"""
OVERWRITE = """WAIT: add.u32 %r15, %r7, %r8;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r15], {%x0}; tcgen05.wait::st.sync.aligned;"""


@pytest.mark.parametrize("variant", [PAIR, Variant("f8f6f4", "e4m3", "e4m3"), SCALED[0]], ids=str)
def test_a_right_program_is_not_reported(variant: Variant) -> None:
    assert not run(variant, check=True)[1]


def test_metadata_that_nobody_wrote() -> None:
    """Of zeros, so that the MMA is executed all the same."""
    for variant in (Variant(), Variant("i8", "s8", "s8", "s32")):
        variant.numbers["kept"][:] = 0
        _, found = run(replace_words(variant, {STORE: f"// {STORE}"}), check=True)
        (first, *_) = found
        assert first.check == "uninitialised"
        assert first.message.startswith("the sparsity metadata of an MMA gets data")
        assert first.accesses[0].first == variant.n, "the column"
        assert first.line
        assert {each.check for each in found} == {"uninitialised"}


RACES = {
    "no barrier": (BEHIND_STORE, "setp", "tcgen05.mma is not ordered after tcgen05.st"),
    "overwritten": ("WAIT:", OVERWRITE, "tcgen05.st is not ordered after tcgen05.mma"),
}


@pytest.mark.parametrize("name", RACES)
def test_races_on_metadata(name: str) -> None:
    old, new, told = RACES[name]
    variant = Variant()
    _, found = run(replace_words(variant, {old: new}), check=True)
    assert told in {each.message for each in found}, found
    assert {each.check for each in found} == {"race"}
    columns = {access.first for each in found for access in each.accesses}
    assert variant.n in columns <= {variant.n, variant.n + 1}, "those that the selectors name"


# -- refusals -------------------------------------------------------------------------------------

F16 = Variant()
# warp 0 stores other metadata than those that have copies of them
DIFFERENT = {
    "add.u32 %r15, %r7, %r8;": "add.u32 %r15, %r7, %r8; @!%p1 xor.b32 %x0, %x0, 0x88888888;"
}
N64, N192 = (f"{STATIONARY[0].idesc(0) + (extra << 17):#x}" for extra in (0, 16))
REFUSED: dict[str, tuple[Variant, dict[str, str], type[Exception], str]] = {
    "odd column": (F16, {"[%r7+0]": "[%r7+1]"}, HardwareRefusal, "column 0x21, must be even"),
    "other lanes": (
        Variant(m=64), {"[%r7+0]": "[%r7+0x100000]"}, HardwareRefusal,
        "its metadata at TMEM lane 16, D at lane 0",
    ),
    "dense descriptor": (F16, {"0x8080014": "0x8080010"}, HardwareRefusal, "sp with .* of a dense"),
    "dense instruction": (
        F16, {"mma.sp.": "mma.", " [%r7+0],": ""}, HardwareRefusal, "mma with .* of a sparse",
    ),
    "no metadata": (F16, {" [%r7+0],": ""}, UnsupportedPtx, "without the address of sparsity"),
    "wide lines": (replace(F16, swizzle="32B"), {}, UnsupportedPtx, "K-major operand of 64 bytes"),
    "M of a pair": (
        replace(SCALED[4], m=128), {}, HardwareRefusal, r"of M=128 N=32, must be M of \(256,\)",
    ),
    "copies": (STATIONARY[0], DIFFERENT, UnsupportedPtx, "differ between the parts of N"),
    "wide N": (STATIONARY[0], {N64: N192}, HardwareRefusal, r"N=192, must be .* of \(64, 128\)"),
    "family": (SCALED[-1], {"sm_100a": "sm_100f"}, UnsupportedPtx, "needs sm_100a"),
    "target": (F16, {"sm_100a": "sm_90a"}, UnsupportedPtx, "sm_100a or"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    variant, changes, error, told = REFUSED[name]
    with pytest.raises(error, match=told) as caught:
        run(replace_words(variant, changes))
    assert caught.value.line


@pytest.mark.parametrize(
    ("kind", "word", "error"),
    [
        ("f16", 0x8080016, UnsupportedPtx),  # a selector above 1
        ("f16", 0x8080011, HardwareRefusal),  # a selector of a dense MMA
        ("f8f6f4", 0x8080015, HardwareRefusal),
        ("i8", 0x8080025, HardwareRefusal),
        ("mxf8f6f4", 0x10080005, HardwareRefusal),
        ("mxf4", 0x10081484, HardwareRefusal),  # the other version of sparsity
        ("mxf4nvf4", 0x90080484, HardwareRefusal),  # K = 96
    ],
)
def test_descriptors_that_are_refused(kind: str, word: int, error: type[Exception]) -> None:
    with pytest.raises(error):
        instr_desc(kind, word)


def test_shapes() -> None:
    """K is twice that of a dense MMA; N is as of one."""
    desc = instr_desc("mxf4", 0x10080484)
    assert (desc.m, desc.n, desc.k, desc.a_k) == (256, 32, 128, 64)
    require_shape(desc, 2)
    with pytest.raises(HardwareRefusal):
        require_shape(desc, 1)
    assert instr_desc("tf32", 0x8080914).k == 16
