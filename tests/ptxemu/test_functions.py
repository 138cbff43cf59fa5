"""Calls of device functions: arguments and results in both spaces, nested and divergent calls,
branches and loops inside, and refusals.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest

import ptxemu
from ptxemu.errors import OutOfBounds, UnsupportedPtx
from ptxemu.ops.system_calls import formatted
from ptxemu.syntax.lexer import MOST_NESTED
from tests.ptxemu.kernels import POINTER, kernel, launch

# x * 3 + y if x is odd, else y - x; by branches, so that a return is not the last instruction
MIX = """.func (.param .b32 out) mix (.param .b32 x, .param .b32 y)
{
.reg .pred %p<2>; .reg .b32 %r<8>;
ld.param.b32 %r1, [x]; ld.param.b32 %r2, [y];
and.b32 %r3, %r1, 1; setp.eq.u32 %p1, %r3, 0;
@%p1 bra EVEN;
mad.lo.u32 %r4, %r1, 3, %r2;
st.param.b32 [out], %r4;
ret;
EVEN:
sub.u32 %r4, %r2, %r1;
st.param.b32 [out+0], %r4;
ret;
}
"""
# the sum of mix(k, y) for k below n, with a register as its result
SUM = """.func (.reg .b32 total) sum (.reg .b32 n, .reg .b32 y)
{
.reg .pred %p<2>; .reg .b32 %r<8>;
mov.u32 total, 0; mov.u32 %r1, 0;
NEXT:
setp.ge.u32 %p1, %r1, n;
@%p1 ret;
{
.param .b32 a; .param .b32 b; .param .b32 c;
st.param.b32 [a], %r1; st.param.b32 [b], y;
call.uni (c), mix, (a, b);
ld.param.b32 %r2, [c];
}
add.u32 total, total, %r2;
add.u32 %r1, %r1, 1;
bra NEXT;
}
"""
CALL = """{{
.param .b32 a; .param .b32 b; .param .b32 c;
st.param.b32 [a], {0}; st.param.b32 [b], {1};
{2} (c), mix, (a, b);
ld.param.b32 {3}, [c];
}}
"""
STORE = "st.global.b32 [%rd2], %r9;"
X = np.arange(32, dtype=np.uint32)


def mixed(x: np.ndarray, y: np.ndarray | int) -> np.ndarray:
    return np.where(x % 2 == 1, x * 3 + y, y - x).astype(np.uint32)


def results(body: str, before: str, **how: object) -> np.ndarray:
    out = np.full(32, 77, np.uint32)
    launch(kernel(POINTER + body + STORE, ".param .u64 d", before), out, **how)
    return out


@pytest.mark.parametrize("policy", ["round-robin", "adversarial"])
@pytest.mark.parametrize("declared", ["", MIX[: MIX.index("{")] + ";\n"])
def test_a_function_of_the_lane(declared: str, policy: str) -> None:
    body = CALL.format("%r0", "100", "call.uni", "%r9")
    assert (results(body, declared + MIX, policy=policy) == mixed(X, 100)).all()


def test_two_calls_share_nothing() -> None:
    body = CALL.format("%r0", "100", "call", "%r8") + CALL.format("%r8", "%r0", "call", "%r9")
    assert (results(body, MIX) == mixed(mixed(X, 100), X)).all()


def test_the_function_may_stand_behind_the_kernel() -> None:
    out = np.zeros(32, np.uint32)
    body = POINTER + CALL.format("%r0", "5", "call.uni", "%r9") + STORE
    launch(kernel(body, ".param .u64 d", MIX[: MIX.index("{")] + ";\n") + MIX, out)
    assert (out == mixed(X, 5)).all()


def test_a_call_of_some_lanes() -> None:
    """Other lanes keep their values; the result of a call that did not happen is undefined."""
    body = "mov.u32 %r9, 1; setp.lt.u32 %p0, %r0, 9; @!%p0 bra AROUND;"
    body += CALL.format("%r0", "100", "call", "%r9") + "AROUND:\n"
    assert (results(body, MIX) == np.where(X < 9, mixed(X, 100), 1)).all()


def test_a_guarded_call_in_registers_and_calls_in_calls() -> None:
    body = "mov.u32 %r9, 1; setp.lt.u32 %p0, %r0, 9; @%p0 call (%r9), sum, (%r0, 1000);"
    sums = [sum(int(mixed(np.uint32(k), 1000)) for k in range(n)) for n in range(9)]
    assert (results(body, MIX + SUM)[:9] == sums).all()
    assert (results(body, MIX + SUM)[9:] == 1).all()


def test_vectors_and_wide_arguments() -> None:
    """A structure of 16 bytes, read in other pieces of the same size, and 64 bits."""
    function = """.func (.param .align 8 .b8 out[16]) swap (.param .align 8 .b8 in[16])
    {
    .reg .b64 %a<4>;
    ld.param.v2.b64 {%a0, %a1}, [in]; st.param.b64 [out+8], %a0; st.param.b64 [out], %a1;
    ret;
    }
    """
    body = """{
    .param .align 8 .b8 s[16]; .param .align 8 .b8 t[16];
    cvt.u64.u32 %rd5, %r0; add.u64 %rd6, %rd5, 0x500000000;
    st.param.b64 [s], %rd5; st.param.b64 [s+8], %rd6;
    call.uni (t), swap, (s);
    ld.param.v2.b64 {%rd7, %rd8}, [t];
    }
    shl.b64 %rd8, %rd8, 8; add.u64 %rd8, %rd8, %rd7; shr.u64 %rd7, %rd7, 32;
    cvt.u32.u64 %r8, %rd8; cvt.u32.u64 %r9, %rd7; add.u32 %r9, %r9, %r8;"""
    assert (results(body, function) == X * 257 + 5).all()


def test_local_memory_of_a_function_is_its_own() -> None:
    function = """.func (.param .b32 out) kept (.param .b32 x)
    {
    .local .align 4 .b8 spot[4]; .reg .b32 %r<4>;
    ld.param.b32 %r1, [x]; st.local.b32 [spot], %r1; add.u32 %r1, %r1, 1;
    ld.local.b32 %r2, [spot]; mad.lo.u32 %r2, %r1, 1000, %r2; st.param.b32 [out], %r2;
    ret;
    }
    """
    body = CALL.format("%r0", "0", "call", "%r9").replace("mix, (a, b)", "kept, (a)")
    assert (results(body, function) == (X + 1) * 1000 + X).all()


def test_an_error_within_names_the_line_of_the_function() -> None:
    text = MIX.replace("mad.lo.u32 %r4, %r1, 3, %r2", "bogus.u32 %r4, %r1")
    module = kernel(POINTER + CALL.format("%r0", "1", "call", "%r9"), ".param .u64 d", text)
    with pytest.raises(UnsupportedPtx, match="bogus") as caught:
        launch(module, np.zeros(32, np.uint32))
    assert "bogus" in module.splitlines()[caught.value.line - 1]


def test_a_wrong_number_of_arguments_is_refused() -> None:
    module = kernel(CALL.format("1", "2", "call", "%r9"), "", MIX.replace(", .param .b32 y", ""))
    with pytest.raises(UnsupportedPtx, match="with 3") as caught:
        ptxemu.load(module)
    assert caught.value.line


def chained(levels: int, calls: int) -> str:
    """Functions that each call the previous one `calls` times; the kernel calls the last one."""
    bodies = ["", *(f"call f{level};\n" * calls for level in range(levels - 1))]
    functions = [f".func f{level}() {{ {body} ret; }}\n" for level, body in enumerate(bodies)]
    return kernel(f"call f{levels - 1};\n", "", "".join(functions))


def test_calls_in_calls_have_limits() -> None:
    ptxemu.load(chained(MOST_NESTED, 1))
    with pytest.raises(UnsupportedPtx, match="more than 100 nested calls"):
        ptxemu.load(chained(MOST_NESTED + 1, 1))
    with pytest.raises(UnsupportedPtx, match="more than 10000 calls in a kernel"):
        ptxemu.load(chained(40, 2))


def test_a_body_that_is_no_ptx_matters_only_where_it_is_called() -> None:
    broken = MIX.replace("ret;", "@@@", 1)
    launch(kernel("mov.u32 %r0, 0;", "", broken))
    with pytest.raises(UnsupportedPtx, match="call"):
        launch(kernel(CALL.format("1", "2", "call", "%r9"), "", broken))


VARIABLES = """.extern .func (.param .b32 func_retval0) vprintf (.param .b64 p0, .param .b64 p1);
.global .align 1 .b8 template[14] = {116, 37, 100, 32, 105, 115, 32, 37, 46, 49, 102, 33, 10, 0};
"""
PROGRAM = kernel(
    """.local .align 8 .b8 depot[16];
    .reg .b64 %SP, %SPL;
    mov.b64 %SPL, depot;
    cvta.local.u64 %SP, %SPL;
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 15;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra DONE;
    st.local.b32 [%SPL], %r1;
    st.local.b64 [%SPL+8], 0d3FF8000000000000;
    { // callseq 0
    .param .b64 param0;
    .param .b64 param1;
    .param .b32 retval0;
    st.param.b64 [param1], %SP;
    mov.b64 %rd1, template;
    cvta.global.u64 %rd2, %rd1;
    st.param.b64 [param0], %rd2;
    call.uni (retval0), vprintf, (param0, param1);
    } // callseq 0
DONE:""",
    before=VARIABLES,
)


def test_every_active_thread_prints(capsys):
    launch(PROGRAM)
    assert capsys.readouterr().out == "t0 is 1.5!\nt16 is 1.5!\n"


def test_other_functions_are_refused():
    with pytest.raises(UnsupportedPtx, match="call of strange: the module does not define it"):
        launch(PROGRAM.replace("vprintf", "strange"))


def test_conversions():
    values = struct.pack("=iIQdii", -3, 7, 1 << 40, 0.25, ord("z"), 255)
    text = formatted("%d|%3u|%llu|%g|%c|%#x|%%", lambda at, size: values[at : at + size], str)
    assert text == "-3|  7|1099511627776|0.25|z|0xff|%"


def test_a_wild_string_is_out_of_bounds():
    text = PROGRAM.replace("116, 37, 100", "116, 37, 115").replace("[%SPL], %r1", "[%SPL+4], %r1")
    with pytest.raises(OutOfBounds, match="read of 1 bytes"):
        launch(text)
