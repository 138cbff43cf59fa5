"""ldmatrix of bytes and of packed elements: which byte of shared memory each lane gets, written out
lane by lane; and what is refused.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from ptxemu.errors import HardwareRefusal, UnsupportedPtx
from tests.ptxemu import kernels, test_taint

_BITS = {"b8": 8, "b8x16.b6x16_p32": 6, "b8x16.b4x16_p64": 4}


def load(opcode: str, registers: int, image: np.ndarray, pitch: int = 16) -> np.ndarray:
    """uint8 [register, lane, byte]. image: the bytes of shared memory, of which lane t names those
    from t * pitch."""
    out = np.zeros((registers, 32), np.uint32)
    names = ", ".join(f"%r{8 + k}" for k in range(registers))
    words = image.view(np.uint32)
    text = kernels.kernel(
        f"""ld.param.u64 %rd0, [a]; ld.param.u64 %rd1, [b]; mov.u32 %r0, %tid.x;
        mul.wide.u32 %rd2, %r0, 4; add.u64 %rd0, %rd0, %rd2; add.u64 %rd1, %rd1, %rd2;
        mov.u32 %r1, dynamic; shl.b32 %r2, %r0, 2; add.u32 %r2, %r2, %r1;
        {
            "".join(
                f"ld.global.b32 %r3, [%rd0+{k}]; st.shared.b32 [%r2+{k}], %r3;"
                for k in range(0, image.nbytes, 128)
            )
        }
        bar.warp.sync -1; mad.lo.u32 %r4, %r0, {pitch}, %r1;
        {opcode} {{{names}}}, [%r4];
        {"".join(f"st.global.b32 [%rd1+{128 * k}], %r{8 + k};" for k in range(registers))}""",
        ".param .u64 a, .param .u64 b",
        kernels.DYNAMIC,
    )
    kernels.launch(text, words, out, smem_bytes=image.nbytes)
    return out.view(np.uint8).reshape(registers, 32, 4)


def element(row: np.ndarray, index: int, bits: int) -> int:
    """Of a row of 16 bytes, lowest bits first."""
    whole = int.from_bytes(row.tobytes(), "little")
    return whole >> bits * index & ((1 << bits) - 1)


@pytest.mark.parametrize("type_", ["b8x16.b6x16_p32", "b8x16.b4x16_p64"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_packed_elements_become_bytes(count: int, type_: str) -> None:
    image = np.random.default_rng(count).integers(0, 256, (32, 16)).astype(np.uint8)
    found = load(f"ldmatrix.sync.aligned.m8n16.x{count}.shared.{type_}", count, image.ravel())
    for register, lane, k in product(range(count), range(32), range(4)):
        row = image[8 * register + lane // 4]
        assert found[register, lane, k] == element(row, 4 * (lane % 4) + k, _BITS[type_])


@pytest.mark.parametrize("type_", _BITS)
@pytest.mark.parametrize("count", [1, 2])
def test_columns_of_sixteen_rows(count: int, type_: str) -> None:
    image = np.random.default_rng(count).integers(0, 256, (32, 16)).astype(np.uint8)
    opcode = f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{type_}"
    found = load(opcode, 2 * count, image.ravel())
    for register, lane, k in product(range(2 * count), range(32), range(4)):
        row = image[16 * (register // 2) + 4 * (lane % 4) + k]
        expected = element(row, lane // 4 + 8 * (register % 2), _BITS[type_])
        assert found[register, lane, k] == expected


@pytest.mark.parametrize(("opcode", "registers"), [
    ("ldmatrix.sync.aligned.m16n16.x1.shared.b8", 2),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", 1),
    ("ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8", 4),
    ("ldmatrix.sync.aligned.m8n16.x1.shared.b8", 1),
    ("ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64", 1),
    ("ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.b4x16_p64", 1),
    ("ldmatrix.sync.aligned.m8n8.x1.shared.b8x16.b4x16_p64", 1),
])  # fmt: skip
def test_forms_that_there_are_not_are_refused_by_name(opcode: str, registers: int) -> None:
    with pytest.raises(UnsupportedPtx, match="ldmatrix") as caught:
        load(opcode, registers, np.zeros(512, np.uint8))
    assert caught.value.line
    assert opcode in caught.value.text


@pytest.mark.parametrize(("opcode", "rows"), [
    ("m8n16.x1.shared.b8x16.b4x16_p64", range(7, 8)),
    ("m8n16.x1.shared.b8x16.b6x16_p32", range(7, 8)),
    ("m16n16.x1.trans.shared.b8", range(12, 16)),
])  # fmt: skip
def test_undefined_rows_reach_their_lanes_only(opcode: str, rows: range) -> None:
    """All rows but `rows` are written. A lane of row 7, or of the last four rows: 28 + 3 = 31."""
    body = f"""shl.b32 %r4, %r0, 4; add.u32 %r4, %r4, %r1;
        setp.lt.u32 %p0, %r0, {rows[0]}; setp.gt.or.u32 %p0, %r0, {rows[-1]}, %p0;
        @%p0 st.shared.v4.b32 [%r4], {{%r0, %r0, %r0, %r0}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.{opcode} {{%r10{", %r11" if "m16" in opcode else ""}}}, [%r4];
        and.b32 %r5, %r0, 3; setp.COMPARED.u32 %p1, %r0, 31;
        @%p1 st.global.b32 [%rd1], %r10;"""
    for stored, expected in (("eq", True), ("lt", True)):
        report, _ = test_taint.launch(test_taint.lines(body.replace("COMPARED", stored)))
        assert bool(test_taint.found(report)) is expected
    others = body.replace("setp.COMPARED.u32 %p1, %r0, 31", "setp.lt.u32 %p1, %r0, 28")
    if "m16" in opcode:
        others = body.replace("setp.COMPARED.u32 %p1, %r0, 31", "setp.ne.u32 %p1, %r5, 3")
    assert not test_taint.found(test_taint.launch(test_taint.lines(others))[0])


def test_a_row_has_to_be_aligned() -> None:
    with pytest.raises(HardwareRefusal, match="aligned"):
        load("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", 2, np.zeros(512, np.uint8), pitch=8)
