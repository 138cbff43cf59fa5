"""__assertfail, malloc and free, as kernels of CUDA C++ and Triton call them."""

from __future__ import annotations

import numpy as np
import pytest

from ptxemu.errors import AssertionFailed, HardwareRefusal, OutOfBounds
from ptxemu.machine import heap
from ptxemu.machine.memory import GlobalMemory
from tests.ptxemu.kernels import POINTER, kernel, launch


def string(name: str, text: str) -> str:
    codes = ", ".join(str(code) for code in (*text.encode(), 0))
    return f".global .align 1 .b8 {name}[{len(text) + 1}] = {{{codes}}};\n"


ASSERT = """.extern .func __assertfail
(.param .b64 p0, .param .b64 p1, .param .b32 p2, .param .b64 p3, .param .b64 p4) .noreturn;
""" + "".join((string("said", "x < 20"), string("path", "some/kernel.cu"), string("inside", "f")))
FAIL = """setp.lt.u32 %p1, %r0, 20; @%p1 bra RIGHT;
mov.b64 %rd5, said; cvta.global.u64 %rd5, %rd5; mov.b64 %rd6, path; mov.b64 %rd7, inside;
{ .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
st.param.b64 [p0], %rd5; st.param.b64 [p1], %rd6; st.param.b32 [p2], 73; st.param.b64 [p3], %rd7;
st.param.b64 [p4], 1; call.uni __assertfail, (p0, p1, p2, p3, p4); }
RIGHT: add.u32 %r9, %r0, 1; st.global.b32 [%rd2], %r9;"""


def test_a_failed_assertion_says_what_where_and_who() -> None:
    out = np.zeros(64, np.uint32)
    with pytest.raises(AssertionFailed) as caught:
        launch(kernel(POINTER + FAIL, ".param .u64 d", ASSERT), out)
    assert caught.value.message == (
        "some/kernel.cu:73: f: block (0, 0, 0), thread (20, 0, 0) and 11 more of its warp:"
        " assertion `x < 20` failed"
    )
    assert "__assertfail" in caught.value.text


def test_an_assertion_that_holds_costs_nothing() -> None:
    out = np.zeros(16, np.uint32)
    launch(kernel(POINTER + FAIL, ".param .u64 d", ASSERT), out, block=(16,))
    assert (out == np.arange(1, 17)).all()


HEAP = """.extern .func (.param .b64 func_retval0) malloc (.param .b64 p0);
.extern .func free (.param .b64 p0);
"""
MALLOC = """{{ .param .b64 p0; .param .b64 retval0; st.param.b64 [p0], {0};
call.uni (retval0), malloc, (p0); ld.param.b64 {1}, [retval0]; }}
"""
FREE = "{{ .param .b64 p0; st.param.b64 [p0], {0}; call.uni free, (p0); }}\n"
# a block of 4 (i + 1) bytes in thread i, its last word written and read
BLOCK = "add.u32 %r3, %r0, 1; mul.wide.u32 %rd5, %r3, 4;\n" + MALLOC.format("%rd5", "%rd6")
BLOCK += "add.u64 %rd7, %rd6, %rd5; st.b32 [%rd7+-4], %r0; ld.b32 %r9, [%rd7+-4];\n"


@pytest.fixture(autouse=True)
def fresh_heap(monkeypatch: pytest.MonkeyPatch) -> heap.Heap:
    fresh = heap.Heap(1 << 16)
    for module in ("ptxemu.ops.system_calls", "ptxemu.machine.machine"):
        monkeypatch.setattr(f"{module}.HEAP", fresh)
    return fresh


def run(body: str, out: np.ndarray, **how: object) -> None:
    launch(kernel(POINTER + body, ".param .u64 d", HEAP), out, **how)


@pytest.mark.parametrize("check", [False, True])
def test_threads_allocate_and_free(fresh_heap: heap.Heap, check: bool) -> None:
    out = np.zeros(32, np.uint32)
    run(BLOCK + FREE.format("%rd6") + "st.global.b32 [%rd2], %r9;", out, check=check)
    assert (out == np.arange(32)).all()
    assert fresh_heap.blocks == {}


def test_a_block_outlives_its_launch(fresh_heap: heap.Heap) -> None:
    out = np.zeros(32, np.uint64)
    wide = "mul.wide.u32 %rd8, %r0, 8; add.u64 %rd8, %rd1, %rd8;"
    run(BLOCK + wide + "st.global.b64 [%rd8], %rd6;", out)
    assert sorted(fresh_heap.blocks) == sorted(out.tolist())
    blocks, last = out.copy(), np.zeros(32, np.uint64)
    back = "ld.global.b64 %rd6, [%rd8]; mul.wide.u32 %rd9, %r0, 4; add.u64 %rd9, %rd6, %rd9;"
    back += "ld.b32 %r9, [%rd9]; cvt.u64.u32 %rd7, %r9; st.global.b64 [%rd8], %rd7;"
    last[:] = blocks
    run(wide + back + FREE.format("%rd6"), last)
    assert (last == np.arange(32)).all()
    assert fresh_heap.blocks == {}


@pytest.mark.parametrize(
    "access", ["st.b32 [%rd7], %r0;", FREE.format("%rd6") + "ld.b32 %r9, [%rd6];"]
)
def test_access_beyond_a_block_or_behind_its_end_is_refused(access: str) -> None:
    with pytest.raises(OutOfBounds):
        run(BLOCK + access, np.zeros(32, np.uint32), block=(1,))


@pytest.mark.parametrize("address", ["%rd7", "%rd1"])
def test_only_what_malloc_returned_is_freed(address: str) -> None:
    with pytest.raises(HardwareRefusal, match="malloc has returned"):
        run(BLOCK + FREE.format(address), np.zeros(32, np.uint32), block=(1,))
    body = BLOCK + 2 * FREE.format("%rd6") + FREE.format("0")
    with pytest.raises(HardwareRefusal, match="freed before"):
        run(body, np.zeros(32, np.uint32), block=(1,))


def test_a_full_heap_gives_null_and_space_is_used_again() -> None:
    own, memory = heap.Heap(1024), GlobalMemory([(1 << 20, 16)])
    first = [own.allocate(200, memory) for _ in range(5)]
    assert len(set(first[:4])) == 4
    assert first[4] == own.allocate(0, memory) == own.allocate(1 << 40, memory) == 0
    own.release(first[1], memory)
    assert own.allocate(300, memory) == 0
    assert own.allocate(180, memory) == first[1]
    assert memory.holds(first[1], first[1] + 180)
    assert not memory.holds(first[1], first[1] + 181)


def test_printf_returns_the_number_of_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    body = """.local .align 8 .b8 spot[8]; st.local.b32 [spot], %r0; mov.b64 %rd5, spot;
    cvta.local.u64 %rd5, %rd5; mov.b64 %rd6, template;
    { .param .b64 p0; .param .b64 p1; .param .b32 r; st.param.b64 [p0], %rd6;
    st.param.b64 [p1], %rd5; call (r), vprintf, (p0, p1); ld.param.b32 %r9, [r]; }
    st.global.b32 [%rd2], %r9;"""
    out = np.zeros(2, np.uint32)
    before = ".extern .func (.param .b32 r) vprintf (.param .b64 p0, .param .b64 p1);\n"
    before += string("template", "%d%%,")
    launch(kernel(POINTER + body, ".param .u64 d", before), out, block=(2,))
    assert capsys.readouterr().out == "0%,1%,"
    assert out.tolist() == [1, 1]
