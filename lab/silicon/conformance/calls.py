"""Functions of a module: arguments and results in .param and .reg, structures, calls in calls and
loops, some of them of a part of the lanes."""

from __future__ import annotations

from collections.abc import Iterator

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import CTAS, INDEX, INPUTS, case, output, random_buffer

# a third and a half of the lanes go other ways in them
_FUNCTIONS = """.func (.param .b32 out) mix (.param .b32 x, .param .b32 y)
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
st.param.b32 [out], %r4;
ret;
}
.func (.reg .b32 total) sum (.reg .b32 n, .reg .b32 y)
{
.reg .pred %p<2>; .reg .b32 %r<8>;
mov.u32 total, 0; mov.u32 %r1, 0;
NEXT:
setp.ge.u32 %p1, %r1, n;
@%p1 ret;
{
.param .b32 a; .param .b32 b; .param .b32 c;
st.param.b32 [a], %r1; st.param.b32 [b], y;
call (c), mix, (a, b);
ld.param.b32 %r2, [c];
}
add.u32 total, total, %r2;
add.u32 %r1, %r1, 1;
bra NEXT;
}
.func (.param .align 16 .b8 out[16]) turn (.param .align 16 .b8 in[16])
{
.reg .b64 %a<4>;
ld.param.v2.b64 {%a0, %a1}, [in]; xor.b64 %a2, %a0, %a1;
st.param.b64 [out+8], %a0; st.param.b64 [out], %a2;
ret;
}
"""


def _calls() -> Case:
    body = [
        f"{INDEX} add.u64 %w61, %a, %w60; add.u64 %w62, %d, %w60;",
        f"ld.global.b32 %r1, [%w61]; ld.global.b32 %r2, [%w61+{4 * INPUTS}];",
        "{ .param .b32 u; .param .b32 v; .param .b32 w; st.param.b32 [u], %r1;",
        "st.param.b32 [v], %r2; call.uni (w), mix, (u, v); ld.param.b32 %r3, [w]; }",
        "st.global.b32 [%w62], %r3; and.b32 %r4, %r1, 7; mov.b32 %r5, %r2;",
        "setp.ne.u32 %p0, %r4, 3; @%p0 call (%r5), sum, (%r4, %r2);",
        f"selp.b32 %r5, %r5, %r2, %p0; st.global.b32 [%w62+{4 * INPUTS}], %r5;",
        "cvt.u64.u32 %w1, %r3; mov.b64 %w2, {%r2, %r1};",
        "{ .param .align 16 .b8 s[16]; .param .align 16 .b8 t[16]; st.param.b64 [s], %w1;",
        "st.param.b64 [s+8], %w2; call.uni (t), turn, (s); ld.param.v2.b64 {%w3, %w4}, [t]; }",
        "add.u64 %w3, %w3, %w4; mov.b64 {%r6, %r7}, %w3;",
        f"st.global.b32 [%w62+{8 * INPUTS}], %r6; st.global.b32 [%w62+{12 * INPUTS}], %r7;",
    ]
    return case(
        "functions",
        "call st.param ld.param",
        body,
        [random_buffer("a", "functions", "u4", 2 * INPUTS), output("d", "u4", 4 * INPUTS)],
        module=_FUNCTIONS,
        grid=(CTAS,),
    )


def cases() -> Iterator[Case]:
    yield _calls()
