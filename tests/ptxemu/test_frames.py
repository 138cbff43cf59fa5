"""Calls with a frame: recursion, calls by address, arguments in pieces, and their limits."""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest

import ptxemu
from ptxemu.errors import HardwareRefusal, PtxSyntaxError, UnsupportedPtx
from ptxemu.machine.heap import HEAP
from ptxemu.watch import watched
from tests.ptxemu.kernels import POINTER, kernel, launch

X = np.arange(32, dtype=np.uint32)
STORE = "st.global.b32 [%rd2], %r9;"
HOW = [{}, {"check": True}, {"policy": "adversarial"}]


def call(name: str, result: str, *arguments: str) -> str:
    """A call sequence as nvcc writes it; name: with what stands behind the arguments."""
    function, _, behind = name.partition(" ")
    stores = "".join(
        f".param .b32 param{k}; st.param.b32 [param{k}+0], {value};\n"
        for k, value in enumerate(arguments)
    )
    listed = ", ".join(f"param{k}" for k in range(len(arguments)))
    return f"""{{ {stores}.param .b32 retval0;
    call (retval0), {function}, ({listed}){behind};
    ld.param.b32 {result}, [retval0+0]; }}
    """


def function(name: str, body: str, params: int = 1, pre: str = "") -> str:
    """A function of 32-bit numbers %r1, %r2, ..., whose result is %r9."""
    formals = ", ".join(f".param .b32 {name}_param_{k}" for k in range(params))
    loads = "".join(f"ld.param.b32 %r{k + 1}, [{name}_param_{k}];\n" for k in range(params))
    head = f".func (.param .b32 func_retval0) {name} ({formals})"
    return f"""{head}
    {{ .reg .pred %p<4>; .reg .b32 %r<16>; .reg .b64 %rd<4>; {pre}
    {loads}{body}
    st.param.b32 [func_retval0+0], %r9; ret; }}
    """


def run(body: str, before: str, behind: str = "", **how: object) -> np.ndarray:
    out = np.full(32, 77, np.uint32)
    text = kernel(POINTER + body + STORE, ".param .u64 d", before) + behind
    report = launch(text, out, **how)
    assert [f.message for f in report.findings if f.severity == "error"] == []
    return out


# -- recursion -------------------------------------------------------------------------------

FACTORIAL = function(
    "fact",
    "mov.u32 %r9, 1; setp.lt.u32 %p1, %r1, 2; @%p1 bra DONE;\nsub.u32 %r2, %r1, 1;\n"
    + call("fact", "%r3", "%r2")
    + "mul.lo.u32 %r9, %r1, %r3;\nDONE:",
)
# fib keeps the result of the first call over the second one
FIB = function(
    "fib",
    "mov.u32 %r9, %r1; setp.lt.u32 %p1, %r1, 2; @%p1 bra DONE;\nsub.u32 %r2, %r1, 1;\n"
    + call("fib", "%r3", "%r2")
    + "sub.u32 %r4, %r1, 2;\n"
    + call("fib", "%r5", "%r4")
    + "add.u32 %r9, %r3, %r5;\nDONE:",
)
FIBS = [0, 1, 1, 2, 3, 5, 8, 13, 21]


@pytest.mark.parametrize("how", HOW)
def test_each_thread_has_a_depth_of_its_own(how: dict[str, object]) -> None:
    body = "rem.u32 %r1, %r0, 11;" + call("fact", "%r9", "%r1")
    body += "shfl.sync.idx.b32 %r8, %r9, 5, 31, 0xffffffff; add.u32 %r9, %r9, %r8;"
    expected = [factorial(x % 11) + factorial(5) for x in range(32)]
    assert run(body, FACTORIAL, **how).tolist() == expected


@pytest.mark.parametrize("how", HOW)
def test_registers_of_a_call_are_its_own(how: dict[str, object]) -> None:
    body = "rem.u32 %r1, %r0, 9;" + call("fib", "%r9", "%r1")
    assert run(body, FIB, **how).tolist() == [FIBS[x % 9] for x in range(32)]


def test_registers_without_primitives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptxemu.codegen.program.library", lambda: None)
    test_registers_of_a_call_are_its_own({})


def test_some_lanes_call_and_others_go_on() -> None:
    body = "mov.u32 %r9, 1000; setp.lt.u32 %p1, %r0, 9; @!%p1 bra AROUND;\n"
    body += call("fib", "%r9", "%r0") + "AROUND:"
    assert run(body, FIB).tolist() == FIBS + [1000] * 23


def test_a_guarded_call_in_registers() -> None:
    recursive = """.func (.reg .b32 total) count (.reg .b32 n)
    { .reg .pred %p<2>; .reg .b32 %r<4>;
    mov.u32 total, n; setp.eq.u32 %p1, n, 0; @%p1 ret;
    sub.u32 %r1, n, 1; call (%r2), count, (%r1); add.u32 total, %r2, n; ret; }
    """
    body = "mov.u32 %r9, 5; setp.lt.u32 %p1, %r0, 8; @%p1 call (%r9), count, (%r0);"
    assert run(body, recursive).tolist() == [x * (x + 1) // 2 for x in range(8)] + [5] * 24


def test_functions_that_call_each_other() -> None:
    """even(n) = n == 0 or odd(n - 1); the kernel inlines another function that calls it."""
    one = function(
        "even", "mov.u32 %r9, 1; setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;\nsub.u32 %r2, %r1, 1;\n"
        + call("odd", "%r9", "%r2") + "DONE:")  # fmt: skip
    other = function(
        "odd", "mov.u32 %r9, 0; setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;\nsub.u32 %r2, %r1, 1;\n"
        + call("even", "%r9", "%r2") + "DONE:")  # fmt: skip
    declared = one[: one.index("{")] + ";\n" + other[: other.index("{")] + ";\n"
    outer = function("outer", call("even", "%r3", "%r1") + "mad.lo.u32 %r9, %r3, 10, %r1;")
    found = run(call("outer", "%r9", "%r0"), declared + outer, one + other)
    assert (found == X + 10 * (X % 2 == 0)).all()


def test_local_memory_of_each_call() -> None:
    """A local variable and its generic address, over the inner call."""
    body = "st.local.b32 [spot+4], %r1; mov.b64 %rd1, spot; cvta.local.u64 %rd2, %rd1;\n"
    body += "mov.u32 %r9, 0; setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;\nsub.u32 %r2, %r1, 1;\n"
    body += call("deep", "%r3", "%r2") + "ld.b32 %r4, [%rd2+4]; add.u32 %r9, %r3, %r4;\nDONE:"
    deep = function("deep", body, pre=".local .align 8 .b8 spot[8];")
    body = "rem.u32 %r1, %r0, 7;" + call("deep", "%r9", "%r1")
    found = run(body, deep, check=True)
    assert found.tolist() == [(x % 7) * (x % 7 + 1) // 2 for x in range(32)]


def test_a_deep_recursion_has_room_and_an_endless_one_an_end() -> None:
    depth = function(
        "depth", "mov.u32 %r9, 0; setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;\nsub.u32 %r2, %r1, 1;\n"
        + call("depth", "%r3", "%r2") + "add.u32 %r9, %r3, 1;\nDONE:",
    )  # fmt: skip
    assert (run(call("depth", "%r9", "900"), depth) == 900).all()
    with pytest.raises(HardwareRefusal, match=r"1001 open calls in lane 0 .* of depth"):
        run(call("depth", "%r9", "-1"), depth)


def test_a_recursive_function_calls_the_system() -> None:
    """A block of the heap in each call, freed behind the inner call."""
    body = """mov.u32 %r9, 0; setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;
    { .param .b64 param0; .param .b64 retval0; st.param.b64 [param0], 8;
    call.uni (retval0), malloc, (param0); ld.param.b64 %rd1, [retval0]; }
    st.b32 [%rd1+4], %r1; sub.u32 %r2, %r1, 1;
    """ + call("boxes", "%r3", "%r2")
    body += """ld.b32 %r4, [%rd1+4]; add.u32 %r9, %r3, %r4;
    { .param .b64 param0; st.param.b64 [param0], %rd1; call.uni free, (param0); }
    DONE:"""
    before = ".extern .func (.param .b64 r) malloc (.param .b64 p);\n"
    before += ".extern .func free (.param .b64 p);\n" + function("boxes", body)
    found = run("and.b32 %r1, %r0, 3;" + call("boxes", "%r9", "%r1"), before)
    assert found.tolist() == [(0, 1, 3, 6)[x % 4] for x in range(32)]
    assert not HEAP.blocks


# -- arguments in pieces ---------------------------------------------------------------------

PIECES = """.func (.param .align 8 .b8 out[24]) change (.param .align 8 .b8 in[24], .param .b32 by)
{ .reg .b16 %h<4>; .reg .b32 %r<4>; .reg .b64 %rd<4>;
ld.param.b8 %h1, [in]; ld.param.b16 %h2, [in+2]; ld.param.b32 %r1, [in+4];
ld.param.b64 %rd1, [in+8]; ld.param.b8 %h3, [by]; cvt.u32.u16 %r2, %h3;
add.u16 %h1, %h1, %h3; add.u16 %h2, %h2, %h3; add.u32 %r1, %r1, %r2;
cvt.u64.u32 %rd2, %r2; add.u64 %rd1, %rd1, %rd2;
st.param.b8 [out], %h1; st.param.b16 [out+2], %h2; st.param.b32 [out+4], %r1;
st.param.b64 [out+8], %rd1; ret; }
"""


@pytest.mark.parametrize("how", HOW)
def test_a_structure_of_bytes_and_words(how: dict[str, object]) -> None:
    """Byte 1 and the last eight are padding, which nobody writes. The result is passed on."""
    body = """{ .param .align 8 .b8 s[24]; .param .b32 n; .param .align 8 .b8 t[24];
    .param .align 8 .b8 u[24]; .reg .b16 %q<2>;
    cvt.u16.u32 %q0, %r0; st.param.b8 [s], %q0; st.param.b16 [s+2], 300;
    st.param.b32 [s+4], 70000; st.param.b64 [s+8], 0x1fffffffff; st.param.b32 [n], 0x305;
    call (t), change, (s, n); call (u), change, (t, n);
    ld.param.b8 %r3, [u]; ld.param.u16 %q1, [u+2]; cvt.u32.u16 %r4, %q1;
    ld.param.b32 %r5, [u+4]; ld.param.b64 %rd5, [u+8]; }
    shr.u64 %rd6, %rd5, 16; cvt.u32.u64 %r6, %rd6; add.u32 %r9, %r3, %r4; add.u32 %r9, %r9, %r5;
    add.u32 %r9, %r9, %r6;"""
    expected = X + 10 + 310 + 70010 + (0x1FFFFFFFFF + 10 >> 16)
    assert (run(body, PIECES, **how) == expected).all()


def test_the_address_of_a_parameter() -> None:
    change = function("pick", "and.b32 %r2, %r1, 1; mov.b64 %rd1, pick_param_1;\n"
                      "mad.wide.u32 %rd2, %r2, 2, %rd1; ld.param.u16 %r9, [%rd2];", 2)  # fmt: skip
    found = run(call("pick", "%r9", "%r0", "0x90007"), change)
    assert (found == np.where(X % 2, 9, 7)).all()


def test_an_access_beyond_a_parameter_is_refused() -> None:
    text = kernel("", "", PIECES.replace("ld.param.b8 %h3, [by]", "ld.param.b64 %rd3, [by]"))
    body = "{ .param .align 8 .b8 s[24]; .param .b32 n; call (s), change, (s, n); }"
    with pytest.raises(PtxSyntaxError, match="8 bytes at offset 0 of by, which has 4"):
        ptxemu.load(text.replace("\nret;\n}\n", body + "\nret;\n}\n"))


# -- calls by address ------------------------------------------------------------------------

THREE = (
    function("plus", "add.u32 %r9, %r1, %r2;", 2)
    + function("times", "mul.lo.u32 %r9, %r1, %r2;", 2)
    + function("fold", "mov.u32 %r9, %r2; setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;\n"
               "sub.u32 %r3, %r1, 1;\n" + call("fold", "%r4", "%r3", "%r2")
               + "mad.lo.u32 %r9, %r4, 2, 1;\nDONE:", 2)
)  # fmt: skip
TABLE = ".global .align 8 .u64 table[3] = {plus, generic(times), fold};\n"
PROTOTYPE = "proto: .callprototype (.param .b32 _) _ (.param .b32 _,\n .param .b32 _);\n"
TARGETS = "targets: .calltargets plus,\n times, fold;\n"


def three(which: np.ndarray, x: np.ndarray, y: int) -> np.ndarray:
    folded = np.array([(1 << int(n)) * (y + 1) - 1 for n in x % 32], np.uint64)
    return np.choose(which, [x + y, x * y, folded.astype(np.uint32)]).astype(np.uint32)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["proto", "targets"])
def test_a_table_of_functions(kind: str, how: dict[str, object]) -> None:
    body = "rem.u32 %r1, %r0, 3; mov.b64 %rd5, table; mad.wide.u32 %rd6, %r1, 8, %rd5;\n"
    body += "ld.global.u64 %rd7, [%rd6]; and.b32 %r2, %r0, 7;\n"
    body += {"proto": PROTOTYPE, "targets": TARGETS}[kind]
    body += call(f"%rd7 , {kind}", "%r9", "%r2", "5")
    body += "bar.warp.sync 0xffffffff; add.u32 %r9, %r9, 1;"
    assert (run(body, THREE + TABLE, **how) == three(X % 3, X % 8, 5) + 1).all()


def test_an_address_from_a_move() -> None:
    body = "mov.b64 %rd7, plus; setp.lt.u32 %p1, %r0, 4; @%p1 mov.b64 %rd7, fold;\n" + PROTOTYPE
    body += call("%rd7 , proto", "%r9", "%r0", "3")
    assert (run(body, THREE) == three(np.where(X < 4, 2, 0), X, 3)).all()


def test_an_alias_and_a_function_that_calls_by_address() -> None:
    before = (
        THREE
        + ".alias sum, plus;\n"
        + function(
            "apply", PROTOTYPE + "mov.b64 %rd1, sum;\n" + call("%rd1 , proto", "%r9", "%r1", "9")
        )
    )
    body = call("apply", "%r9", "%r0") + call("sum", "%r9", "%r9", "1")
    assert (run(body, before) == X + 10).all()


@pytest.mark.parametrize(("address", "what"), [
    ("0", "calls address 0x0"),
    ("other", "calls address 0x3"),  # a function with other arguments
])  # fmt: skip
def test_an_address_of_no_such_function_is_refused(address: str, what: str) -> None:
    other = function("other", "mov.u32 %r9, 0;")
    body = f"mov.b64 %rd7, {address};\n" + PROTOTYPE + call("%rd7 , proto", "%r9", "1", "2")
    with pytest.raises(HardwareRefusal, match=what) as caught:
        run(body, THREE + TABLE + other)
    assert caught.value.line


def test_an_undefined_address_is_a_finding() -> None:
    body = ".shared .align 8 .b64 word; ld.shared.b64 %rd7, [word];\n" + PROTOTYPE
    body += call("%rd7 , proto", "%r9", "1", "2") + STORE
    text = kernel(POINTER + body, ".param .u64 d", THREE + TABLE)
    module, out = ptxemu.load(text), np.zeros(32, np.uint32)
    with watched() as report, pytest.raises(HardwareRefusal, match="calls address"):
        launch(module, out, check=True)
    assert "the address of a function" in report.launches[0].findings[0].message


def test_a_call_by_address_needs_a_signature() -> None:
    with pytest.raises(UnsupportedPtx, match="without a prototype") as caught:
        ptxemu.load(kernel("call %rd1;", "", THREE + TABLE))
    assert caught.value.line


def test_pointers_to_variables_in_variables() -> None:
    before = ".global .align 4 .u32 words[4] = {5, 6, 7, 8};\n"
    before += ".global .align 8 .u64 where[3] = {words+4, generic(words)+8, behind};\n"
    before += ".global .align 4 .u32 behind = 11;\n"
    body = "rem.u32 %r1, %r0, 3; mov.b64 %rd5, where; mad.wide.u32 %rd6, %r1, 8, %rd5;\n"
    body += "ld.global.u64 %rd7, [%rd6]; ld.global.u32 %r9, [%rd7];"
    assert run(body, before).tolist() == [(6, 7, 11)[x % 3] for x in range(32)]
