"""tcgen05.mma.ws: D of M = 32, 64 and 128 in all lanes, A in shared memory or read from the lanes
of each part of N, against a product in float64; a kernel with it, and its refusals.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.exact_arithmetic import values_of
from ptxemu.check.undefined import TensorCodes
from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from ptxemu.machine.tmem import POISON
from ptxemu.machine.umma_desc import instr_desc, require_shape, stationary_desc
from tests.ptxemu import kernels
from tests.ptxemu.test_mma import A_TMEM, D_AT, Case

KINDS = [("f16", "bf16", "f32"), ("tf32", "tf32", "f32"), ("f8f6f4", "e4m3", "f16"),
         ("i8", "s8", "s32")]  # fmt: skip
SHAPES = [(32, 64), (32, 256), (64, 64), (64, 128), (128, 128)]


def made(kind: str, fmt: str, d_format: str, m: int, n: int) -> Case:
    case = Case(kind=kind, a_format=fmt, b_format=fmt, d_format=d_format, m=m, n=n)
    case.idesc = replace(case.idesc, stationary=True)
    require_shape(case.idesc, 1)
    return case


def read(case: Case) -> np.ndarray:
    """D [m, n]: row r of part p of N is in lane m p + r, its columns begin anew."""
    width = case.n * case.m // 128
    cells = case.group[0].tmem.cells
    bits = np.empty((case.m, case.n), np.uint32)
    for n in range(case.n):
        lanes = n // width * case.m + np.arange(case.m)
        bits[:, n] = cells[D_AT + n % width, lanes]
    assert (cells[D_AT + width] == POISON).all()
    if case.d_format == "f16":
        return (bits & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)
    return bits.view(np.int32 if case.d_format == "s32" else np.float32)


def close(found: np.ndarray, expected: np.ndarray, d_format: str) -> None:
    tolerance = 2e-3 if d_format == "f16" else 1e-5
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("kind", "fmt", "d_format"), KINDS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_a_in_shared_memory(kind, fmt, d_format, m, n):
    case = made(kind, fmt, d_format, m, n)
    case.run()
    close(read(case), case.expected(), d_format)


@pytest.mark.parametrize(("kind", "fmt", "d_format"), KINDS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_each_part_of_n_reads_a_in_its_lanes(kind, fmt, d_format, m, n):
    """Parts that differ make several products of one instruction."""
    case, parts = made(kind, fmt, d_format, m, n), 128 // m
    packed = np.ascontiguousarray(case.a_codes).view(np.uint32)
    columns = slice(A_TMEM, A_TMEM + packed.shape[1])
    copies = [np.roll(packed, part, axis=0) for part in range(parts)]
    case.group[0].tmem.cells[columns] = np.concatenate(copies).T
    case.run(a=A_TMEM)
    whole = values_of(fmt, case.a_codes) @ values_of(fmt, case.b_codes).T
    width = n // parts
    expected = [
        np.roll(whole[:, part * width : (part + 1) * width], part, axis=0) for part in range(parts)
    ]
    close(read(case), np.concatenate(expected, axis=1), d_format)


def test_it_accumulates():
    case = made("f16", "bf16", "f32", 32, 64)
    case.run()
    case.run(accumulate=True)
    close(read(case), 2 * case.expected(), "f32")


def test_undefined_rows_reach_their_lanes():
    """An undefined cell of any part of A counts for its row."""
    codes, instr = TensorCodes(), stationary_desc("f16", 1 << 4 | 64 >> 3 << 17 | 64 >> 4 << 24)
    codes.cells[:] = 0
    codes.cells[3, [5, 70]] = 7
    codes.suspects = -1
    assert np.flatnonzero(codes.operand(0, instr, 1)).tolist() == [5, 6]


@pytest.mark.parametrize(("m", "n"), [(16, 64), (256, 64), (64, 32), (64, 192)])
def test_shapes_that_there_are_not(m, n):
    desc = stationary_desc("f16", 1 << 4 | n >> 3 << 17 | m >> 4 << 24)
    with pytest.raises(HardwareRefusal, match=rf"MMA \.ws of M={m} N={n}, must be M of"):
        require_shape(desc, 1)


def test_a_shift_of_the_descriptor_is_refused():
    with pytest.raises(UnsupportedPtx, match=r"\.ws maximum shift"):
        instr_desc("f16", 1 << 30 | 1 << 4 | 64 >> 3 << 17 | 64 >> 4 << 24)


# -- in a kernel ----------------------------------------------------------------------------------

MMA = "tcgen05.mma.ws.cta_group::1.kind::f16.collector::b1::fill [%r10], [%r13], %rd4, %r14, {0}"
WAIT = "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r9+8], 0; @!%p2 bra W;"
IDESC = 1 << 4 | 64 >> 3 << 17 | 64 >> 4 << 24  # f16, D f32, N = 64, M = 64
B_DESC = 1 << 46 | 128 >> 4 << 32 | 1024 >> 4 << 16  # K-major, not swizzled


def launch(
    text: str = MMA.format("0, 0"), wait: str = WAIT, **how: object
) -> tuple[np.ndarray, ptxemu.LaunchReport]:
    """float32 [lane, 32]: D. A is 1 in column 0 of lane L, and L in column 1; B[n] = [n, 1, 0, ...]
    where n is counted in its part, and 1000 more in the second."""
    columns = ", ".join(f"%r{20 + k}" for k in range(32))
    stores = "".join(f"st.global.u32 [%rd2+{4 * k}], %r{20 + k};" for k in range(32))
    body = f"""ld.param.u64 %rd1, [d]; mov.u32 %r0, %tid.x; mov.u32 %r9, told;
        mad.wide.u32 %rd2, %r0, 128, %rd1; mov.u32 %r8, b;
        shr.u32 %r1, %r0, 5; setp.eq.u32 %p0, %r1, 0; setp.eq.u32 %p1, %r0, 0;
        @%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 64;
        @%p1 mbarrier.init.shared.b64 [%r9+8], 1;
        shl.b32 %r2, %r0, 4; add.u32 %r2, %r2, %r8; mov.b32 %r3, 0;
        st.shared.v4.b32 [%r2], {{%r3, %r3, %r3, %r3}}; bar.sync 0;
        and.b32 %r4, %r0, 31; cvt.rn.f32.u32 %f0, %r4; setp.ge.u32 %p3, %r0, 32;
        @%p3 add.f32 %f0, %f0, 0f447A0000;
        cvt.rn.f16.f32 %h0, %f0; mov.b16 %h1, 0x3C00; mov.b32 %r3, {{%h0, %h1}};
        setp.lt.u32 %p3, %r0, 64; @%p3 st.shared.b32 [%r2], %r3;
        cvt.rn.f32.u32 %f0, %r0; cvt.rn.f16.f32 %h0, %f0; mov.b32 %r20, {{%h1, %h0}};
        {"".join(f"mov.b32 %r{20 + k}, 0;" for k in range(1, 8))}
        fence.proxy.async; bar.sync 0;
        ld.shared.u32 %r10, [%r9]; shl.b32 %r11, %r1, 21; add.u32 %r11, %r11, %r10;
        add.u32 %r12, %r11, 32; add.u32 %r13, %r10, 32;
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r12],
            {{{", ".join(f"%r{20 + k}" for k in range(8))}}};
        tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;
        tcgen05.fence::after_thread_sync; @!%p1 bra OTHERS;
        shr.u32 %r15, %r8, 4; cvt.u64.u32 %rd4, %r15; or.b64 %rd4, %rd4, {B_DESC};
        mov.b32 %r14, {IDESC}; mov.b64 %rd5, 3; setp.ne.u32 %p4, %r14, %r14;
        {text};
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r9+8];
        OTHERS: {wait}
        tcgen05.fence::after_thread_sync;
        tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{columns}}}, [%r11];
        tcgen05.wait::ld.sync.aligned; {stores}
        tcgen05.fence::before_thread_sync; bar.sync 0;
        @%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 64;"""
    declared = ".shared .align 16 .b8 told[16];\n.shared .align 1024 .b8 b[2048];\n"
    out = np.zeros((128, 32), np.float32)
    program = kernels.kernel(body, ".param .u64 d", declared)
    return out, kernels.launch(program, out, **{"check": True, "block": (128,), **how})


@pytest.mark.parametrize("how", [{}, {"policy": "adversarial", "seed": 1}])
def test_two_products_of_one_instruction(how):
    out, report = launch(MMA.format("%p4"), **how)
    lane, column = np.arange(128)[:, None], np.arange(32)
    assert (out == column + 1000 * (lane // 64) + lane).all()
    assert not report.findings


def test_without_ws_64_rows_take_half_of_the_lanes():
    """Of A, which all lanes have, and of D, which is undefined in the other lanes."""
    idesc = 1 << 4 | 32 >> 3 << 17 | 64 >> 4 << 24
    plain = "tcgen05.mma.cta_group::1.kind::f16 [%r10], [%r13], %rd4, %r14, 0"
    out, report = launch(f"mov.b32 %r14, {idesc}; {plain}")
    lanes = [lane for lane in range(128) if lane % 32 < 16]
    assert (out[lanes] == np.arange(32) + np.array(lanes)[:, None]).all()
    assert {finding.check for finding in report.findings} == {"uninitialised"}


def test_without_the_wait_d_races():
    _, report = launch(wait="")
    assert any(finding.check == "race" for finding in report.errors)


@pytest.mark.parametrize(("text", "message"), [
    (MMA.format("0, %rd5"), "zero-column mask 0x3"),
    (MMA.format("0").replace("::1.kind", "::2.kind"), "cta_group::2"),
    (MMA.format("0").replace("kind::f16", "kind::mxf4"), "mxf4"),
    (MMA.format("0").replace(".ws", ".ws.sp"), "sp"),
    (MMA.format("0").replace("b1", "a"), "collector::a"),
])  # fmt: skip
def test_forms_that_are_refused_by_name(text, message):
    with pytest.raises(UnsupportedPtx, match=message) as caught:
        launch(text)
    assert caught.value.line
