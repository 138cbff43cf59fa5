"""wgmma.mma_async.sp: products element by element, lanes whose metadata count, findings of
undefined metadata, and refusals.

The programs and inputs are those of `conformance.wgmma_sparse`, which run on a GPU, too.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance import wgmma, wgmma_sparse
from lab.silicon.conformance.ptx_program import POLICIES, emulate
from lab.silicon.conformance.wgmma import program
from lab.silicon.conformance.wgmma_sparse import Sparse
from ptxemu import watch
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.findings import Finding
from ptxemu.ops import registry
from ptxemu.syntax.tree import Instr
from tests.ptxemu import kernels

VARIANTS = {variant.name: variant for variant in wgmma_sparse.variants()}
PLAIN = Sparse("f32.f16.f16", 16)
EIGHT = Sparse("f32.e4m3.e5m2", 8)
WAIT = "wgmma.wait_group.sync.aligned 0;"


def run(
    variant: Sparse, *changes: tuple[str, str], **options: object
) -> tuple[np.ndarray, list[Finding], Exception | None]:
    """Return D, the findings and the error of a variant's program with replaced words."""
    made = program(variant).program
    text, out, error = made.text, np.zeros(0, np.uint32), None
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    with watch.watched() as report:
        try:
            how = ptxemu.Options(**options)
            out = emulate(replace(made, text=text), ptxemu.load(text), how)["out"]
        except ptxemu.PtxEmuError as caught:
            error = caught
    return out, [finding for launch in report.launches for finding in launch.findings], error


def right(variant: Sparse) -> np.ndarray:
    return wgmma.expected(variant).reshape(-1)


@pytest.mark.parametrize("name", VARIANTS)
def test_products(name: str) -> None:
    """Each shape of each type, alternating layouts, signs, transposes, selectors and A in
    registers."""
    assert np.array_equal(run(VARIANTS[name])[0], right(VARIANTS[name]))


@pytest.mark.parametrize("types", ["f32.bf16.bf16", "f32.tf32.tf32"])
@pytest.mark.parametrize("a", ["64B", "registers"])
@pytest.mark.parametrize("selector", [0, 1])
def test_selectors(types: str, a: str, selector: int) -> None:
    """Lanes that the selector does not name hold invalid metadata in the programs."""
    variant = Sparse(types, 8, a, selector=selector)
    assert np.array_equal(run(variant)[0], right(variant))
    wrong = (f"%e0, {selector}, ", f"%e0, {1 - selector}, ")
    assert isinstance(run(variant, wrong)[2], HardwareRefusal)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("variant", [PLAIN, replace(EIGHT, a="registers")], ids=str)
def test_a_right_program_is_not_reported(variant: Sparse, policy: str) -> None:
    out, found, _ = run(variant, policy=policy, seed=1, check=True)
    assert np.array_equal(out, right(variant))
    assert not found


def test_b_is_read_to_its_end() -> None:
    """A row of B has 64 bytes in one operation, twice as many as in a dense one."""
    last = program(EIGHT).program.text.count("mma_async.sp")
    written = f"setp.eq.u32 %p2, %thread, 0; @%p2 st.shared.b32 [s+{64 * 128 + 60}], 0; {WAIT}"
    _, found, _ = run(EIGHT, (WAIT, written), check=True)
    assert last > 1
    assert [each.check for each in found] == ["race"]


def test_zeros_that_are_not_stored() -> None:
    """On an H100 they multiply nothing: a NaN in B reaches 66 of 128 rows of D, those that store an
    element for it. A group of zeros needs no metadata."""
    made, stored = wgmma_sparse.with_a_nan(PLAIN)
    out = emulate(made, ptxemu.load(made.text), ptxemu.Options())["out"].view(np.float32)
    rows = np.isnan(out.reshape(wgmma.GRID, -1, 128)[:, [0, 2], ::4])
    assert rows.sum() == stored < rows.size
    made = wgmma_sparse.without_metadata(PLAIN)
    assert not emulate(made, ptxemu.load(made.text), ptxemu.Options())["out"].any()


# -- undefined metadata ---------------------------------------------------------------------------

UNDEFINED = "@%p2 ld.shared.b32 %e0, [u]; wgmma.fence.sync.aligned;"
WHO = "setp.eq.u32 %p2, {}; " + UNDEFINED


@pytest.mark.parametrize(
    ("variant", "lane", "reported"),
    [(PLAIN, 1, True), (PLAIN, 5, True), (PLAIN, 2, False), (replace(PLAIN, selector=1), 1, False),
     (replace(PLAIN, selector=1), 3, True), (EIGHT, 3, True)],
)  # fmt: skip
def test_undefined_metadata(variant: Sparse, lane: int, reported: bool) -> None:
    """Undefined metadata matter in lanes whose metadata count, and are reported even if the MMA is
    refused."""
    who = WHO.format(f"%thread, {lane}")
    out, found, error = run(
        variant,
        ("wgmma.fence.sync.aligned;", who),
        (".shared .align 1024", ".shared .b32 u;\n.shared .align 1024"),
        check=True,
    )
    assert [each.message.split(" gets ")[0] for each in found] == reported * [
        "the sparsity metadata of an MMA"
    ]
    if not reported:
        assert np.array_equal(out, right(variant))
        return
    assert isinstance(error, HardwareRefusal)
    assert "sparsity metadata 0b1111" in error.message
    assert found[0].line == error.line


MMA_SP = """setp.eq.u32 %p2, %r0, {lane}; mov.b32 %r1, 0x3C003C00; mov.b32 %r2, 0x44444444;
@%p2 ld.shared.b32 %r2, [u]; mov.b32 %r3, %r2;
mma.{sort}.sync.aligned.{form} {{%f0, %f1, %f2, %f3}}, {{%r1, %r1, %r1, %r1}},
    {{%r1, %r1, %r1, %r1}}, {{%f4, %f4, %f4, %f4}}, %r3, {selector};
st.global.f32 [%rd2], %f0;"""


@pytest.mark.parametrize(
    ("form", "selector", "lane", "reported"),
    [("m16n8k32.row.col.f32.f16.f16.f32", 0, 3, False),
     ("m16n8k32.row.col.f32.f16.f16.f32", 1, 3, True),
     ("m16n8k64.row.col.f32.e4m3.e4m3.f32", 0, 3, True)],
)  # fmt: skip
@pytest.mark.parametrize("sort", ["sp", "sp::ordered_metadata"])
def test_undefined_metadata_of_a_warp(
    sort: str, form: str, selector: int, lane: int, reported: bool
) -> None:
    body = kernels.POINTER + MMA_SP.format(sort=sort, form=form, selector=selector, lane=lane)
    text = kernels.kernel(".shared .b32 u;\n" + body, ".param .u64 d")
    out = np.zeros(32, np.float32)
    with watch.watched() as report, suppress(HardwareRefusal):
        kernels.launch(text, out, check=True)
    (launch,) = report.launches
    assert [each.message.split(" gets ")[0] for each in launch.findings] == reported * [
        "the sparsity metadata of an MMA"
    ]
    assert out.any() != reported


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        (PLAIN, ", %e0, 0, ", ", %e0, 2, "),
        (PLAIN, ", %e0, 0, ", ", %e0, %r0, "),
        (PLAIN, ", %e0, 0, ", ", "),
        (EIGHT, ", %e0, 0, ", ", %e0, 1, "),
        (PLAIN, "m64n16k32", "m64n16k16"),
        (PLAIN, ".target sm_90a", ".target sm_100a"),
    ],
)
def test_operands_that_do_not_fit(variant: Sparse, old: str, new: str) -> None:
    error = run(variant, (old, new))[2]
    assert isinstance(error, UnsupportedPtx)
    assert error.line


def test_metadata_without_a_meaning() -> None:
    """Indices may fall, since the manual requires no order; equal ones are refused."""
    load = "ld.global.b32 %e0, [%w63+0];"
    assert run(PLAIN, (load, "mov.b32 %e0, 0x11111111;"))[2] is None
    error = run(PLAIN, (load, "mov.b32 %e0, 0x44445444;"))[2]
    assert isinstance(error, HardwareRefusal)
    assert "0b0101 of row 0, group 3 of A" in error.message


@pytest.mark.parametrize("form", ["m64n8k512.s32.b1.b1.and.popc", "m64n12k32.f32.f16.f16"])
def test_forms_that_it_has_not(form: str) -> None:
    opcode = f"wgmma.mma_async.sp.sync.aligned.{form}"
    with pytest.raises(UnsupportedPtx):
        registry.match(Instr(opcode, (), None, 1, opcode))
