"""tcgen05.cp: every shape and multicast, alone and by programs for one CTA and for a pair."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from lab.silicon.conformance.ptx_program import POLICIES, aligned_copy
from ptxemu.check.undefined import TensorCodes
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tmem import POISON, Tmem
from ptxemu.machine.tmem_fill import SHAPES, fill, read_matrix, shape_of
from ptxemu.machine.umma_desc import smem_desc
from ptxemu.report import LaunchReport
from tests.ptxemu import kernels
from tests.ptxemu.umma_operands import put_operand

# (shape, multicast): the first row that each quarter of the lanes gets, how many, bytes of a row
QUARTERS = {
    ("128x256b", ""): ((0, 32, 64, 96), 32, 32),
    ("128x128b", ""): ((0, 32, 64, 96), 32, 16),
    ("4x256b", ""): ((0, 1, 2, 3), 1, 32),
    ("64x128b", "warpx2::02_13"): ((0, 32, 0, 32), 32, 16),
    ("64x128b", "warpx2::01_23"): ((0, 0, 32, 32), 32, 16),
    ("32x128b", "warpx4"): ((0, 0, 0, 0), 32, 16),
}
FORMS = list(QUARTERS)
COLUMN = 5
# source format -> 16 bytes of shared memory, and the 16 that get to tensor memory
CHUNKS = {
    "b4x16_p64": (
        "10 32 54 76 98 ba dc fe  a5 a5 a5 a5 a5 a5 a5 a5",
        "00 04 08 0c 10 14 18 1c 20 24 28 2c 30 34 38 3c",
    ),
    "b6x16_p32": (
        "81 30 10  3f 10 7a  00 00 80  85 71 20  a5 a5 a5 a5",
        "01 02 03 04 3f 00 21 1e 00 00 00 20 05 06 07 08",
    ),
}


def expected(form: tuple[str, str], matrix: np.ndarray, empty: int) -> np.ndarray:
    """uint32 (128 lanes, 8 columns) of `matrix`, uint8 (rows, bytes)."""
    firsts, count, nbytes = QUARTERS[form]
    words = np.ascontiguousarray(matrix[:, :nbytes]).view(np.uint32)
    lanes = np.full((128, 8), empty, np.uint32)
    for quarter, first in enumerate(firsts):
        lanes[32 * quarter :][:count, : nbytes // 4] = words[first : first + count]
    return lanes


def widened(source: str, matrix: np.ndarray) -> np.ndarray:
    """The bytes that those of `matrix`, in chunks of 16, become."""
    size = {"": 8, "b4x16_p64": 4, "b6x16_p32": 6}[source]
    out = np.zeros_like(matrix).reshape(-1, 16)
    for chunk, found in zip(matrix.reshape(-1, 16), out, strict=True):
        stream = int.from_bytes(chunk.tobytes(), "little")
        for i in range(16):
            found[i] = (stream >> i * size & (1 << size) - 1) << (2 if size == 4 else 0)
    return out.reshape(matrix.shape)


def filled(
    form: tuple[str, str], swizzle: str, address: int = COLUMN, source: str = ""
) -> tuple[Tmem, np.ndarray]:
    """Tensor memory after one copy, and the matrix."""
    shape = shape_of(*form, source)
    rows = max(shape.rows, 8)  # of a core matrix
    matrix = np.random.default_rng(7).integers(0, 256, (rows, shape.nbytes), np.uint8)
    smem = np.zeros(32 * 1024, np.uint8)
    desc = smem_desc(put_operand(smem, 0x480, matrix, swizzle, False))
    tmem = Tmem()
    tmem.try_alloc(32)
    fill(tmem, address, shape, read_matrix(smem, desc, shape))
    return tmem, matrix


def test_every_shape_is_here():
    assert set(SHAPES) == set(FORMS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("swizzle", ["none", "32B", "128B"])
@pytest.mark.parametrize("source", ["", *CHUNKS])
def test_shapes(form, swizzle, source):
    tmem, matrix = filled(form, swizzle, source=source)
    found = tmem.cells[COLUMN : COLUMN + 8].T
    np.testing.assert_array_equal(found, expected(form, widened(source, matrix), POISON))
    tmem.cells[COLUMN : COLUMN + 8] = POISON
    assert (tmem.cells == POISON).all()


@pytest.mark.parametrize("source", CHUNKS)
def test_elements_get_a_byte_each(source):
    narrow, wide = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in CHUNKS[source])
    smem = np.tile(narrow, 64)
    found = read_matrix(
        smem, smem_desc(0x0000_4008_0000_0000), shape_of("32x128b", "warpx4", source)
    )
    np.testing.assert_array_equal(found.view(np.uint8), np.tile(wide, (32, 1)))


def test_four_rows_go_to_any_lane_of_the_quarters():
    tmem, matrix = filled(("4x256b", ""), "none", 31 << 16 | COLUMN)
    found = tmem.cells[COLUMN : COLUMN + 8, 31::32].T
    np.testing.assert_array_equal(found, matrix[:4].view(np.uint32))


@pytest.mark.parametrize(
    ("form", "address", "message"),
    [
        (FORMS[0], 16 << 16, "tcgen05.cp of 128 rows to TMEM lane 16"),
        (FORMS[2], 32 << 16, "tcgen05.cp of 4 rows to TMEM lane 32"),
        (FORMS[3], 32 << 16, "tcgen05.cp of 64 rows to TMEM lane 32"),
        (FORMS[5], 1 << 16, "tcgen05.cp of 32 rows to TMEM lane 1"),
        (FORMS[5], 29, "TMEM not allocated: column 0x20"),
    ],
)
def test_refusals(form, address, message):
    with pytest.raises(HardwareRefusal, match=message):
        filled(form, "none", address)


def test_a_matrix_past_the_end_of_shared_memory():
    shape = SHAPES["128x256b", ""]
    desc = smem_desc(0x0000_4008_0080_0000)
    with pytest.raises(HardwareRefusal, match="limit is 0x800"):
        read_matrix(np.zeros(2048, np.uint8), desc, shape)


# -- programs -------------------------------------------------------------------------------

_PROGRAM = """
    ld.param.u64 %rd0, [a];
    ld.param.u64 %rd1, [d];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %cluster_ctarank;
    mov.u32 %r2, dynamic;
    add.u32 %r3, %r2, 4096;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [%r3], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    shr.u32 %r4, %r0, 5;
    setp.ne.u32 %p1, %r4, 0;
    @%p1 bra ALLOCATED;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [%r3+8], 32;
    tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
ALLOCATED:
    mad.lo.u32 %r5, %r1, 128, %r0;
    mad.wide.u32 %rd2, %r5, 32, %rd0;
    mad.lo.u32 %r6, %r0, 32, %r2;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2];
    st.shared.v4.b32 [%r6], {{%r10, %r11, %r12, %r13}};
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2+16];
    st.shared.v4.b32 [%r6+16], {{%r10, %r11, %r12, %r13}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    ld.shared.b32 %r7, [%r3+8];
    shl.b32 %r8, %r4, 21;
    add.u32 %r8, %r8, %r7;
    mov.u32 %r9, 0;
    tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8], {{%r9, %r9, %r9, %r9, %r9, %r9, %r9, %r9}};
    tcgen05.wait::st.sync.aligned;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    setp.eq.u32 %p2, %r1, 0;
    and.pred %p2, %p2, %p0;
    @!%p2 bra WAIT;
    and.b32 %r20, %r2, 0x3ffff;
    shr.u32 %r20, %r20, 4;
    cvt.u64.u32 %rd3, %r20;
    or.b64 %rd3, %rd3, 0x0000400800800000;
    mov.b16 %h0, 3;
    {copy} [%r7], %rd3;
    tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster{commit};
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r3], 0;
    @!%p3 bra WAIT;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    mad.wide.u32 %rd2, %r5, 32, %rd1;
    st.global.v4.b32 [%rd2], {{%r10, %r11, %r12, %r13}};
    st.global.v4.b32 [%rd2+16], {{%r14, %r15, %r16, %r17}};
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p1 exit;
    tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 %r7, 32;
"""
_COMMITS = {1: ".b64 [%r3]", 2: ".multicast::cluster.b64 [%r3], %h0"}


def launch(
    copy: str, ctas: int, policy: str, lacks: str = ""
) -> tuple[LaunchReport, np.ndarray, np.ndarray]:
    """Input and output are uint32 (CTAs, 128 threads, 8 words); each thread brings 32 bytes to
    shared memory. There the descriptor sees rows of 16 bytes, the second half of all 2 KiB on.
    lacks: the start of a line that the program is to lack."""
    text = _PROGRAM.format(copy=copy, group=ctas, commit=_COMMITS[ctas])
    assert lacks in text
    if lacks:
        text = re.sub(rf"^ *{re.escape(lacks)}.*\n", "", text, count=1, flags=re.MULTILINE)
    text = kernels.kernel(text, ".param .u64 a, .param .u64 d", kernels.DYNAMIC)
    rng = np.random.default_rng(3)
    source = aligned_copy(rng.integers(1, 1 << 32, ctas * 1024, np.uint32))
    target = aligned_copy(np.zeros(ctas * 1024, np.uint32))
    how = {"grid": (ctas,), "block": (128,), "cluster": (ctas,), "smem_bytes": 8192}
    report = kernels.launch(text, source, target, policy=policy, check=True, **how)
    return report, source.reshape(ctas, 128, 8), target.reshape(ctas, 128, 8)


def copy_of(form: tuple[str, str], ctas: int = 1) -> str:
    return ".".join(("tcgen05.cp", f"cta_group::{ctas}", *filter(None, form)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ctas", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_programs(form, ctas, policy):
    report, source, target = launch(copy_of(form, ctas), ctas, policy)
    assert not report.findings
    compare(form, "", source, target)


def compare(form: tuple[str, str], narrow: str, source: np.ndarray, target: np.ndarray) -> None:
    for own, found in zip(source, target, strict=True):
        halves = own.view(np.uint8).reshape(2, 128, 16)
        matrix = np.concatenate([*halves], axis=1)
        np.testing.assert_array_equal(found, expected(form, widened(narrow, matrix), 0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("narrow", CHUNKS)
@pytest.mark.parametrize(("ctas", "policy"), [(1, "adversarial"), (2, "random")])
def test_programs_that_widen(form, narrow, ctas, policy):
    report, source, target = launch(f"{copy_of(form, ctas)}.b8x16.{narrow}", ctas, policy)
    assert not report.findings
    compare(form, narrow, source, target)


# what is stored of every 16 bytes -> source format of a copy that finds it to be enough
_STORED = {
    4: (),
    8: ("b4x16_p64",),
    12: ("b4x16_p64", "b6x16_p32"),
    16: ("b4x16_p64", "b6x16_p32", ""),
}


@pytest.mark.parametrize("stored", _STORED)
@pytest.mark.parametrize("narrow", ["", *CHUNKS])
def test_padding_may_be_undefined(monkeypatch, stored, narrow):
    """An element that is not may not."""
    text = _PROGRAM
    for offset in ("", "+16"):
        whole = f"st.shared.v4.b32 [%r6{offset}], {{{{%r10, %r11, %r12, %r13}}}};"
        assert whole in text
        words = [f"st.shared.b32 [%r6+{16 * bool(offset) + 4 * k}], %r{10 + k};" for k in range(4)]
        text = text.replace(whole, " ".join(words[: stored // 4]))
    monkeypatch.setattr(sys.modules[__name__], "_PROGRAM", text)
    formats = f".b8x16.{narrow}" if narrow else ""
    report, *_ = launch(f"tcgen05.cp.cta_group::1.128x256b{formats}", 1, "round-robin")
    enough = narrow in _STORED[stored]
    assert [f.check for f in report.findings] == ([] if enough else ["uninitialised"])


def test_stores_that_no_proxy_fence_follows_are_poison_to_a_copy():
    copy = "tcgen05.cp.cta_group::1.128x256b"
    report, _, found = launch(copy, 1, "adversarial", "fence.proxy.async")
    assert [f.missing.split()[0] for f in report.findings if f.check == "race"]
    assert (found == POISON).all()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("64x128b", r"tcgen05.cp.64x128b with multicast none"),
        ("32x128b", r"tcgen05.cp.32x128b with multicast none"),
        ("32x128b.warpx2::01_23", r"tcgen05.cp.32x128b with multicast warpx2::01_23"),
        ("128x256b.warpx4", r"tcgen05.cp.128x256b with multicast warpx4"),
        ("128x128b.b8x16", r"tcgen05.cp with formats b8x16 "),
        ("128x128b.b4x16_p64", r"tcgen05.cp with formats b4x16_p64 "),
        ("128x128b.b8x16.b4x16_p64.b6x16_p32", r"with formats b4x16_p64, b6x16_p32, b8x16 "),
        ("64x128b.b8x16.b4x16_p64", r"tcgen05.cp.64x128b with multicast none"),
    ],
)
def test_forms_that_are_not_here(form, message):
    with pytest.raises(UnsupportedPtx, match=message):
        launch(f"tcgen05.cp.cta_group::1.{form}", 1, "round-robin")


@pytest.mark.parametrize(("form", "whole"), [(form, form == FORMS[0]) for form in FORMS])
def test_cells_that_a_copy_leaves_out_stay_undefined(form, whole):
    """Four rows of defined data, say, are no defined column."""
    report, *_ = launch(copy_of(form), 1, "round-robin", "tcgen05.st")
    assert [f.check for f in report.findings] == ([] if whole else ["uninitialised"])


def test_lanes_beside_four_defined_rows_stay_undefined():
    codes = TensorCodes()
    codes.fill(COLUMN, SHAPES["4x256b", ""], None)
    found = codes.read(("16x64b", 1, False, 0), COLUMN, 0)
    defined = np.flatnonzero(found[0] == 0).tolist()
    assert defined == [0, 2]  # the threads that lane 0 goes to


@pytest.mark.parametrize("form", FORMS)
def test_undefined_data_is_copied_along(form):
    """Every other row has never been written."""
    copy = copy_of(form)
    report, *_ = launch(copy, 1, "round-robin", "st.shared.v4.b32 [%r6+16]")
    (found,) = report.findings
    assert found.check == "uninitialised"
    assert found.accesses[0].text.startswith(copy)
    assert found.accesses[0].space == "shared memory of cta(0,0,0)"
