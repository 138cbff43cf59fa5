"""Tensor memory: allocator rules, register maps of the data movement shapes, D and A layouts."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import POLICIES, aligned_copy
from ptxemu.check.undefined import TensorCodes
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tmem import POISON, Tmem
from ptxemu.machine.tmem_fill import SHAPES, fill, read_matrix, shape_of
from ptxemu.machine.umma_desc import smem_desc
from ptxemu.report import LaunchReport
from tests.ptxemu import kernels
from tests.ptxemu.kernels import POINTER, kernel, launch
from tests.ptxemu.umma_operands import put_operand


def full_tmem() -> Tmem:
    """All columns allocated; the cell at (column c, lane l) holds l << 16 | c, its own address."""
    tmem = Tmem()
    tmem.try_alloc(512)
    tmem.cells[:] = np.arange(512)[:, None] | np.arange(128)[None, :] << 16
    return tmem


def test_alloc_takes_the_lowest_free_columns():
    tmem = Tmem()
    assert tmem.try_alloc(128) == 0
    assert tmem.try_alloc(256) == 128
    assert tmem.try_alloc(256) is None
    assert tmem.try_alloc(32) == 384
    tmem.dealloc(0, 128)
    assert tmem.try_alloc(64) == 0
    assert tmem.allocations == {0: 64, 128: 256, 384: 32}


@pytest.mark.parametrize("columns", [0, 16, 48, 96, 1024])
def test_alloc_sizes(columns):
    with pytest.raises(HardwareRefusal, match=f"{columns} columns"):
        Tmem().try_alloc(columns)


def test_dealloc_must_match():
    tmem = full_tmem()
    with pytest.raises(HardwareRefusal, match="256 columns at 0x0; allocated: 512 at 0x0"):
        tmem.dealloc(0, 256)
    with pytest.raises(HardwareRefusal, match="at 0x20"):
        tmem.dealloc(32, 512)
    tmem.dealloc(0, 512)
    with pytest.raises(HardwareRefusal, match="nothing"):
        tmem.dealloc(0, 512)


def test_freed_columns_keep_their_cells_until_allocated_again():
    findings = []
    tmem = Tmem(lambda *finding: findings.append(finding))
    tmem.try_alloc(64)
    tmem.store("32x32b", 1, 5, 0, np.full((1, 32), 7, np.uint32))
    assert not findings
    tmem.dealloc(0, 64)
    assert (tmem.load("32x32b", 1, 5, 0) == 7).all()
    assert [check for check, _ in findings] == ["tmem"]
    tmem.try_alloc(64)
    assert (tmem.cells == POISON).all()


def test_no_alloc_after_relinquish():
    tmem = Tmem()
    tmem.try_alloc(32)
    tmem.relinquish()
    with pytest.raises(HardwareRefusal, match="relinquish"):
        tmem.try_alloc(32)
    tmem.dealloc(0, 32)


def test_columns_must_be_allocated():
    tmem = Tmem()
    tmem.try_alloc(64)
    tmem.check(0, 64)
    tmem.load("32x32b", 32, 32, 0)
    for access in (
        lambda: tmem.check(64),
        lambda: tmem.check(0, 65),
        lambda: tmem.load("32x32b", 64, 32, 0),
        lambda: tmem.store("32x32b", 1, 64, 0, np.zeros((1, 32), np.uint32)),
        lambda: tmem.load("16x256b", 8, 8, 0),
        lambda: tmem.load("16x32bx2", 1, 0, 0, half_split=64),
        lambda: tmem.accumulator(0, 128, 128, 1),
        lambda: tmem.operand_image(60, 128, 1, 32),
    ):
        with pytest.raises(HardwareRefusal, match="TMEM not allocated: column 0x40"):
            access()
    with pytest.raises(HardwareRefusal, match="column 0x200"):
        full_tmem().load("32x32b", 4, 510, 0)


# The cell of register r of thread t relative to the address: (lane, column).
FORMULAS = {
    "32x32b": (1, lambda t, r: (t, r)),
    "16x64b": (1, lambda t, r: (t // 4 + (8 if t % 2 else 0), 2 * r + t % 4 // 2)),
    "16x128b": (2, lambda t, r: (t // 4 + (8 if r % 2 else 0), 4 * (r // 2) + t % 4)),
    "16x256b": (4, lambda t, r: (t // 4 + 8 * (r % 4 // 2), 8 * (r // 4) + 2 * (t % 4) + r % 2)),
    "16x32bx2": (1, lambda t, r: (t % 16, r + (100 if t >= 16 else 0))),
}
CASES = [
    (shape, num, warp, half)
    for shape in FORMULAS
    for num in (1, 2, 8, 16)
    for warp, half in ((0, 0), (3, 0), (2, 16))
    if not (shape == "32x32b" and half)
]


@pytest.mark.parametrize(("shape", "num", "warp", "half"), CASES)
@pytest.mark.parametrize("packed", [False, True])
def test_load_and_store_follow_the_register_map(shape, num, warp, half, packed):
    per_num, cell = FORMULAS[shape]
    tmem, base = full_tmem(), 24
    address = (32 * warp + half) << 16 | base
    registers = tmem.load(shape, num, address, warp, pack16=packed, half_split=100)
    assert registers.shape == (num * per_num, 32)
    assert registers.dtype == np.uint32

    written = np.random.default_rng(0).integers(0, 2**32, registers.shape, dtype=np.uint32)
    expected_cells = tmem.cells.copy()
    for r in range(num * per_num):
        for t in range(32):
            lane, column = cell(t, r)
            lane += 32 * warp + half
            if not packed:
                assert registers[r, t] == lane << 16 | base + column
                expected_cells[base + column, lane] = written[r, t]
                continue
            split = 100 if shape == "16x32bx2" and t >= 16 else 0
            even = base + split + 2 * (column - split)
            assert registers[r, t] == even + 1 << 16 | even
            expected_cells[even, lane] = 0xFFFF0000 | written[r, t] & 0xFFFF
            expected_cells[even + 1, lane] = 0xFFFF0000 | written[r, t] >> 16

    tmem.store(shape, num, address, warp, written, unpack16=packed, half_split=100)
    np.testing.assert_array_equal(tmem.cells, expected_cells)
    again = tmem.load(shape, num, address, warp, pack16=packed, half_split=100)
    np.testing.assert_array_equal(again, written)


def test_load_returns_a_copy():
    tmem = full_tmem()
    registers = tmem.load("32x32b", 2, 0, 0)
    tmem.cells[:] = 0
    assert registers[1, 31] == 31 << 16 | 1


@pytest.mark.parametrize(
    ("shape", "lane", "warp"),
    [("32x32b", 32, 0), ("32x32b", 16, 0), ("16x64b", 8, 0), ("16x256b", 48, 2), ("16x128b", 8, 3)],
)
def test_a_warp_reaches_its_own_lanes_only(shape, lane, warp):
    with pytest.raises(HardwareRefusal, match=f"lane {lane}, warp {warp} .* {32 * warp} to"):
        full_tmem().load(shape, 1, lane << 16, warp)


@pytest.mark.parametrize(("shape", "inner"), [("32x32b", 0), ("16x256b", 0), ("16x256b", 16)])
def test_an_address_in_the_first_quarter_means_the_warps_own(shape, inner):
    tmem = full_tmem()
    own = tmem.load(shape, 2, (96 + inner) << 16, 3)
    np.testing.assert_array_equal(tmem.load(shape, 2, inner << 16, 3), own)


@pytest.mark.parametrize(
    ("shape", "num"), [("32x32b", 256), ("32x32b", 3), ("16x128b", 128), ("16x256b", 64)]
)
def test_num_is_limited(shape, num):
    with pytest.raises(HardwareRefusal, match=f"x{num}"):
        full_tmem().load(shape, num, 0, 0)


# m, n, CTAs, the address, and (lane, column) of an element of D
ACCUMULATORS = [
    (128, 40, 1, 8, lambda r, n: (r, 8 + n)),
    (256, 40, 2, 8, lambda r, n: (r, 8 + n)),
    (64, 24, 1, 4, lambda r, n: (r // 16 * 32 + r % 16, 4 + n)),
    (64, 24, 1, 16 << 16 | 4, lambda r, n: (r // 16 * 32 + r % 16 + 16, 4 + n)),
    (128, 32, 2, 0, lambda r, n: (r + n // 16 * 64, n % 16)),
]


@pytest.mark.parametrize(("m", "n", "ctas", "address", "cell"), ACCUMULATORS)
def test_where_an_accumulator_is(m, n, ctas, address, cell):
    found = full_tmem().accumulator(address, m, n, ctas).reshape(n, -1).T
    assert found.shape == (m // ctas, n)
    for r, k in np.ndindex(found.shape):
        assert (found[r, k] >> 16, found[r, k] & 0xFFFF) == cell(r, k)


def test_accumulator_is_a_view():
    tmem = full_tmem()
    for m, cta_group in ((128, 1), (64, 1), (128, 2)):
        assert np.shares_memory(tmem.accumulator(0, m, 32, cta_group), tmem.cells)
    with pytest.raises(HardwareRefusal, match="M=128 at TMEM lane 16"):
        tmem.accumulator(16 << 16, 128, 32, 1)


def test_operand_image_packs_k_along_columns():
    image = full_tmem().operand_image(8, 128, 1, 32)
    assert image.shape == (128, 32)
    words = image.view(np.uint32)
    assert all(words[r, c] == r << 16 | 8 + c for r in range(128) for c in range(8))
    half = full_tmem().operand_image(16 << 16 | 8, 64, 1, 32).view(np.uint32)
    assert [word >> 16 for word in half[::16, 0]] == [16, 48, 80, 112]
    with pytest.raises(HardwareRefusal, match="A of M=64 at TMEM lane 8"):
        full_tmem().operand_image(8 << 16, 64, 1, 32)


def test_a_shift_moves_31_rows_of_a_quarter():
    tmem = full_tmem()
    before = tmem.cells.copy()
    tmem.shift_rows(64 << 16 | 20)
    expected = before.copy()
    expected[20:28, 64:95] = before[20:28, 65:96]
    assert (tmem.cells == expected).all()
    with pytest.raises(HardwareRefusal, match="not allocated"):
        Tmem().shift_rows(0)


# (shape, multicast): the first row of each quarter of the lanes, number of rows, bytes of a row
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
# source format -> 16 bytes of shared memory, and the 16 bytes that arrive in tensor memory
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
    """Widen the elements of `matrix`, in chunks of 16 bytes, to bytes."""
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
    """Return tensor memory after one copy, and the matrix."""
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


def launch_fill(
    copy: str, ctas: int, policy: str, lacks: str = ""
) -> tuple[LaunchReport, np.ndarray, np.ndarray]:
    """Input and output are uint32 (CTAs, 128 threads, 8 words); each thread copies 32 bytes to
    shared memory. There the descriptor addresses rows of 16 bytes; their second halves follow 2 KiB
    later.

    lacks: beginning of a line that is removed from the program.
    """
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
    report, source, target = launch_fill(copy_of(form, ctas), ctas, policy)
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
    report, source, target = launch_fill(f"{copy_of(form, ctas)}.b8x16.{narrow}", ctas, policy)
    assert not report.findings
    compare(form, narrow, source, target)


# stored bytes of every 16 -> source formats for which they are enough
_STORED = {
    4: (),
    8: ("b4x16_p64",),
    12: ("b4x16_p64", "b6x16_p32"),
    16: ("b4x16_p64", "b6x16_p32", ""),
}


@pytest.mark.parametrize("stored", _STORED)
@pytest.mark.parametrize("narrow", ["", *CHUNKS])
def test_padding_may_be_undefined(monkeypatch, stored, narrow):
    """An undefined element is reported."""
    text = _PROGRAM
    for offset in ("", "+16"):
        whole = f"st.shared.v4.b32 [%r6{offset}], {{{{%r10, %r11, %r12, %r13}}}};"
        assert whole in text
        words = [f"st.shared.b32 [%r6+{16 * bool(offset) + 4 * k}], %r{10 + k};" for k in range(4)]
        text = text.replace(whole, " ".join(words[: stored // 4]))
    monkeypatch.setattr(sys.modules[__name__], "_PROGRAM", text)
    formats = f".b8x16.{narrow}" if narrow else ""
    report, *_ = launch_fill(f"tcgen05.cp.cta_group::1.128x256b{formats}", 1, "round-robin")
    enough = narrow in _STORED[stored]
    assert [f.check for f in report.findings] == ([] if enough else ["uninitialised"])


def test_stores_that_no_proxy_fence_follows_are_poison_to_a_copy():
    copy = "tcgen05.cp.cta_group::1.128x256b"
    report, _, found = launch_fill(copy, 1, "adversarial", "fence.proxy.async")
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
        launch_fill(f"tcgen05.cp.cta_group::1.{form}", 1, "round-robin")


@pytest.mark.parametrize(("form", "whole"), [(form, form == FORMS[0]) for form in FORMS])
def test_cells_that_a_copy_leaves_out_stay_undefined(form, whole):
    """Four rows of defined data, for example, do not make a column defined."""
    report, *_ = launch_fill(copy_of(form), 1, "round-robin", "tcgen05.st")
    assert [f.check for f in report.findings] == ([] if whole else ["uninitialised"])


def test_lanes_beside_four_defined_rows_stay_undefined():
    codes = TensorCodes()
    codes.fill(COLUMN, SHAPES["4x256b", ""], None)
    found = codes.read(("16x64b", 1, False, 0), COLUMN, 0)
    defined = np.flatnonzero(found[0] == 0).tolist()
    assert defined == [0, 2]  # the threads that get lane 0


@pytest.mark.parametrize("form", FORMS)
def test_undefined_data_is_copied_along(form):
    """Every other row has never been written."""
    copy = copy_of(form)
    report, *_ = launch_fill(copy, 1, "round-robin", "st.shared.v4.b32 [%r6+16]")
    (found,) = report.findings
    assert found.check == "uninitialised"
    assert found.accesses[0].text.startswith(copy)
    assert found.accesses[0].space == "shared memory of cta(0,0,0)"


SHARED = ".shared .align 16 .b32 fixed[4];\n"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 32;\n"
DEALLOC = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;\n"
BEGIN = f"""{POINTER}mov.u32 %r10, fixed;
{ALLOC}ld.shared.b32 %r1, [%r10];
add.u32 %r2, %r0, 5;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {{%r2, %r0}};
tcgen05.wait::st.sync.aligned;
"""
LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3, %r4}, [%r1];\n"
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
END = f"st.global.b32 [%rd2], %r5;\n{DEALLOC}"
BRANCH = "setp.eq.u32 %p0, %r1, 0xffffff;\n@%p0 bra L;\nL:\n"  # the next block
ADD = "add.u32 %r5, %r3, %r4;\n"
RIGHT = 2 * np.arange(32, dtype=np.uint32) + 5
POISONED = np.full(32, 2**32 - 2, np.uint32)


def result(body: str, policy: str) -> np.ndarray:
    out = np.zeros(32, np.uint32)
    launch(kernel(BEGIN + body + END, ".param .u64 d", SHARED), out, policy=policy, seed=1)
    return out


BODIES = {  # and whether a register is used before the wait
    "waited": (LOAD + WAIT + ADD, False),
    "waited in the next block": (LOAD + BRANCH + WAIT + ADD, False),
    "moved before the wait": (
        f"{LOAD}mov.b32 %r6, %r3;\n{WAIT}add.u32 %r5, %r6, %r4;\n",
        False,
    ),
    "no wait": (LOAD + ADD, True),
    "no wait, the next block": (LOAD + BRANCH + ADD, True),
    "used before the wait": (LOAD + ADD + WAIT, True),
    "a wait for stores": (LOAD + WAIT.replace("::ld", "::st") + ADD, True),
    "the wait of an earlier load": (LOAD + WAIT + LOAD + ADD, True),
}


@pytest.mark.parametrize("policy", ["round-robin", "random", "adversarial"])
@pytest.mark.parametrize("name", BODIES)
def test_registers_land_at_the_wait_at_the_latest_moment(name: str, policy: str):
    body, early = BODIES[name]
    expected = POISONED if early and policy == "adversarial" else RIGHT
    np.testing.assert_array_equal(result(body, policy), expected)


def test_a_deallocation_waits_for_no_load():
    """The freed columns, allocated again, hold poison, which a late load reads."""
    body = LOAD + DEALLOC + ALLOC + WAIT + ADD
    np.testing.assert_array_equal(result(body, "adversarial"), POISONED)


def test_a_store_lands_at_its_wait():
    late = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r0};\n"
    wait = WAIT.replace("::ld", "::st")
    moved = np.arange(32, dtype=np.uint32) * 2
    for between, expected in ((wait, moved), ("", RIGHT)):
        body = late + between + LOAD + WAIT + ADD
        np.testing.assert_array_equal(result(body, "adversarial"), expected)
        np.testing.assert_array_equal(result(body, "round-robin"), moved)


# tcgen05.shift in a kernel: 31 rows of a quarter of the lanes, in one CTA or in a pair, after the
# MMAs of its pipe and covered by a commit; findings without the wait; refusals.

COLUMNS, AT = 32, 12  # filled columns; the first shifted one
SHIFT = "tcgen05.shift.cta_group::{group}.down [%r12];"
SHIFT_WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r9+8], 0; @!%p2 bra W;"
DECLARED = ".shared .align 16 .b8 told[16];\n"


def launch_shift(
    shift: str,
    lane: int,
    group: int = 1,
    wait: str = SHIFT_WAIT,
    target: str = "sm_100a",
    **how: object,
) -> tuple[np.ndarray, ptxemu.LaunchReport]:
    """Return (tensor memory, uint32 [CTA, lane, column], the report): each cell held its own place
    before."""
    registers = ", ".join(f"%r{20 + k}" for k in range(COLUMNS))
    fills = "".join(f"mad.lo.u32 %r{20 + k}, %r0, 1000, {k};" for k in range(COLUMNS))
    stores = "".join(f"st.global.u32 [%rd2+{4 * k}], %r{20 + k};" for k in range(COLUMNS))
    of_group = f"cta_group::{group}"
    multicast = ".multicast::cluster" if group == 2 else ""
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    text = kernels.kernel(
        f"""ld.param.u64 %rd1, [d]; mov.u32 %r0, %tid.x; mov.u32 %r9, told; mov.b16 %h0, 3;
        mov.u32 %r8, %cluster_ctarank; mad.lo.u32 %r2, %r8, 128, %r0;
        mad.wide.u32 %rd2, %r2, {4 * COLUMNS}, %rd1;
        shr.u32 %r1, %r0, 5; setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r0, 0;
        @%p0 tcgen05.alloc.{of_group}.sync.aligned.shared::cta.b32 [%r9], 32;
        @%p1 mbarrier.init.shared.b64 [%r9+8], 1; fence.mbarrier_init.release.cluster;
        bar.sync 0; {meet}
        ld.shared.u32 %r10, [%r9]; shl.b32 %r11, %r1, 21; add.u32 %r11, %r11, %r10;
        {fills}
        tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%r11], {{{registers}}};
        tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; {meet}
        tcgen05.fence::after_thread_sync;
        setp.eq.and.u32 %p1, %r8, 0, %p1; @!%p1 bra OTHERS;
        add.u32 %r12, %r10, {(lane << 16) + AT};
        {shift.format(group=group)}
        tcgen05.commit.{of_group}.mbarrier::arrive::one.shared::cluster{multicast}.b64 [%r9+8]
            {", %h0" if group == 2 else ""};
        OTHERS: {wait}
        tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {{{registers}}}, [%r11];
        tcgen05.wait::ld.sync.aligned;
        {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0; {meet}
        @%p0 tcgen05.dealloc.{of_group}.sync.aligned.b32 %r10, 32;""",
        ".param .u64 d",
        DECLARED,
    ).replace("sm_100a", target)
    out = np.zeros((group, 128, COLUMNS), np.uint32)
    shape = {"grid": (group,), "cluster": (group,), "block": (128,)}
    report = kernels.launch(text, out, **{"check": True, **shape, **how})
    return out, report


@pytest.mark.parametrize("how", [
    {}, {"policy": "adversarial", "seed": 0}, {"policy": "adversarial", "seed": 1},
])  # fmt: skip
@pytest.mark.parametrize(("lane", "group"), [(0, 1), (96, 1), (32, 2)])
def test_rows_of_a_quarter_move_by_one(lane, group, how):
    out, report = launch_shift(SHIFT, lane, group, **how)
    expected = np.arange(128)[:, None] * 1000 + np.arange(COLUMNS)
    expected[lane : lane + 31, AT : AT + 8] += 1000
    assert (out == expected).all()
    assert not report.findings


def test_who_does_not_wait_for_the_commit_races():
    _, report = launch_shift(SHIFT, 64, wait="")
    races = [finding for finding in report.errors if finding.check == "race"]
    assert races
    assert "tcgen05.shift" in str(races)


@pytest.mark.parametrize("lane", [16, 31, 128])
def test_lanes_that_are_no_quarter(lane):
    with pytest.raises(HardwareRefusal, match=f"at TMEM lane {lane}, must be 0, 32") as caught:
        launch_shift(SHIFT, lane)
    assert caught.value.line


def test_columns_that_are_not_allocated():
    with pytest.raises(HardwareRefusal, match="not allocated"):
        launch_shift(f"add.u32 %r12, %r12, 16; {SHIFT}", 0)


@pytest.mark.parametrize(("text", "target", "message"), [
    (SHIFT.replace(".down", ""), "sm_100a", "a .cta_group and .down are needed"),
    (SHIFT.replace(".cta_group::{group}", ""), "sm_100a", "a .cta_group and .down are needed"),
    (SHIFT.replace(".down", ".up"), "sm_100a", "shift"),
    (SHIFT, "sm_100f", "needs sm_100a"),
])  # fmt: skip
def test_forms_that_there_are_not(text, target, message):
    with pytest.raises(UnsupportedPtx, match=message) as caught:
        launch_shift(text, 0, target=target)
    assert caught.value.line
