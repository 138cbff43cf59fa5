"""Undefined data of tensor core operations: operands, scale factors, what tcgen05.cp brings."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import FOLDER, Program, check, emulate, read
from ptxemu.watch import watched
from tests.ptxemu.test_taint import GLOBAL, found


def checked(program: Program, text: str) -> tuple[list[ptxemu.Finding], dict[str, np.ndarray]]:
    """What is said about undefined data in the program with another text, and its outputs."""
    with watched(check=True) as reports:
        outputs = emulate(program, ptxemu.load(text), ptxemu.Options())
    return found(reports.launches[0]), outputs


_FILL_A = "    ld.global.v4.b32 {%r10, %r11, %r12, %r13}, [%rd3+0];\n"  # the first of row %tid
_FIRST_STORE = "    st.global.v4.b32 [%rd1+0]"
_LAST_STORE = "    tcgen05.fence::before_thread_sync;\n    bar.sync 0;\n    @%p1 exit;"
MMAS = {
    "right": ([], []),
    "a part of B": ([("    st.shared.v4.b32 [%r5+8576]", "    //")], [GLOBAL]),
    "rows of A": ([(_FILL_A, f"    @!%p2 bra FILLED;\n{_FILL_A}")], [GLOBAL]),
    "rows of A that are dropped": (
        [
            (_FILL_A, f"    @!%p2 bra FILLED;\n{_FILL_A}"),
            (_FIRST_STORE, f"    @!%p2 bra STORED;\n{_FIRST_STORE}"),
            (_LAST_STORE, f"STORED:\n{_LAST_STORE}"),
        ],
        [],
    ),
    "added to nothing": ([("setp.ne.u32 %p3", "setp.eq.u32 %p3")], [GLOBAL]),
    "enabled by what": (
        [
            (
                "    setp.ne.u32 %p3, %r0, %r0;",
                "ld.shared.b32 %r4, [%r9+32]; setp.ne.u32 %p3, %r4, -1;",
            )
        ],
        ["an address, descriptor or flag of an MMA"],
    ),
}


@pytest.mark.parametrize("name", MMAS)
def test_products_of_undefined_data(name: str) -> None:
    program = read(FOLDER / "tcgen05_mma.ptx")
    changes, expected = MMAS[name]
    text = program.text
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    findings, _ = checked(program, text)
    assert [f.message.split(" gets ")[0] for f in findings] == expected


_TENSOR, _SHARED_MEMORY = "tensor memory of cta({},0,0)", "shared memory of cta({},0,0)"
# (program, what is left out or put in its place) -> where the undefined data comes from in each of
# its CTAs: memory, its columns or bytes
SCALED: dict[tuple[str, str, str], tuple[str, range]] = {
    ("block_scaled_mma", "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r14]", "//"): (
        _TENSOR, range(32, 36),
    ),
    ("block_scaled_mma", "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r15]", "//"): (
        _TENSOR, range(36, 37),
    ),
    ("block_scaled_mma", "st.shared.v4.b32 [%r4+10240]", "//"): (
        _SHARED_MEMORY, range(1024 + 10240, 1024 + 12288),
    ),
    ("block_scaled_pair", "tcgen05.cp.cta_group::2.32x128b.warpx4", "//"): (_TENSOR, range(32, 34)),
    ("block_scaled_pair", "tcgen05.cp.cta_group::2.64x128b.warpx2::01_23", "//"): (
        _TENSOR, range(36, 37),
    ),
    ("narrow_a_mma", "tcgen05.cp.cta_group::1.128x256b.b8x16.b4x16_p64", "//"): (
        _TENSOR, range(32, 40),
    ),
    ("narrow_a_mma", "st.shared.v4.b32 [%r3+48]", "//"): (
        _SHARED_MEMORY, range(1024, 1024 + 8192),
    ),
}  # fmt: skip
_WHOLE = {program: (program, "ret;", "ret;") for program, *_ in SCALED}


@pytest.mark.parametrize(("name", "line", "instead"), [*_WHOLE.values(), *SCALED])
def test_undefined_scale_factors_and_copies(name: str, line: str, instead: str) -> None:
    program = read(FOLDER / f"{name}.ptx")
    assert line in program.text
    text = program.text.replace(line, instead + line if instead == "//" else instead)
    findings, _ = checked(program, text)
    assert bool(findings) == (instead == "//")
    for finding in findings:
        source, (space, extent) = finding.accesses[0], SCALED[name, line, instead]
        assert source.space in (space.format(0), space.format(1))
        assert source.first in extent
        assert source.last in extent


@pytest.mark.parametrize(("stored", "shows"), [(2, True), (3, False), (4, False)])
def test_padding_of_operands_may_be_undefined(stored: int, shows: bool) -> None:
    """A in shared memory, so many words of every 16 bytes: two of e2m1, then three of e3m2."""
    program = read(FOLDER / "narrow_a_mma.ptx")
    text = program.text.replace("[%r6], [%r14], %rd11", "[%r6], %rd10, %rd11")
    text = "\n".join(line for line in text.split("\n") if "tcgen05.cp" not in line)
    for offset in range(0, 64, 16):
        whole = f"st.shared.v4.b32 [%r3+{offset}], {{%r10, %r11, %r12, %r13}};"
        assert whole in text
        words = [f"st.shared.b32 [%r3+{offset + 4 * k}], %r{10 + k};" for k in range(stored)]
        text = text.replace(whole, " ".join(words))
    findings, outputs = checked(program, text)
    assert bool(findings) == shows
    if not shows:
        check(program, outputs)


@pytest.mark.parametrize(("thread", "shows"), [(63, False), (64, True), (65, True), (66, False)])
def test_undefined_rows_of_a_that_an_mma_moves(thread: int, shows: bool) -> None:
    """Row 65 is undefined, and row 64 behind the first MMA; each thread stores a row of D."""
    program = read(FOLDER / "shifted_a_mma.ptx")
    first, store = "    setp.eq.u32 %p0, %r0, 0;\n", "    st.shared.v4.b32 [%r3+16]"
    assert first in program.text
    assert store in program.text
    which = f"    setp.ne.u32 %p5, %r0, 32;\n    setp.eq.u32 %p6, %r0, {thread};\n"
    text = program.text.replace(first, first + which).replace(store, f"    @%p5{store}")
    text = text.replace("    st.global", "    @%p6 st.global")
    assert bool(checked(program, text)[0]) == shows
