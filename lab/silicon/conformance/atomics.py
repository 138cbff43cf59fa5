"""atom and red: every operation, type, space, vector, order and scope; and address arithmetic.

Each thread has words of its own, so that the order of threads shows nowhere; contention is what
`ptx/atomic_*.ptx` are about.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import (
    INPUTS,
    THREADS,
    braced,
    case,
    output,
    policy,
    random_buffer,
    registers,
)
from lab.silicon.conformance.patterns import expand
from lab.silicon.conformance.ptx_program import Buffer
from lab.silicon.conformance.values import operands

_INTEGER = (
    *expand("{add|inc|dec|min|max}.u32"),
    *expand("{add|min|max}.s32"),
    *expand("{add|min|max}.u64"),
    *expand("{min|max}.s64"),
    *expand("{and|or|xor}.{b32|b64}"),
)
_EXCHANGES = (*expand("{exch|cas}.{b32|b64}"), "cas.b16")
_FLOAT = ("add.f32", "add.f64", *expand("add.noftz.{f16|bf16|f16x2|bf16x2}"))
_VECTORS = (
    *expand("add{.v2|.v4}.f32"),
    *expand("{add|min|max}.noftz{.v2|.v4|.v8}.{f16|bf16}"),
    *expand("{add|min|max}.noftz{.v2|.v4}.{f16x2|bf16x2}"),
)
_SPACES = {".global": "%w63", "": "%w63", ".shared": "%r70", ".shared::cta": "%r70"}
_SLOTS = {**_SPACES, ".shared::cluster": "%r71"}
_WIDTH = {"f16": 16, "bf16": 16, "b16": 16, "f16x2": 32, "bf16x2": 32}


def _shape(form: str) -> tuple[str, int, int]:
    """(type, bits, elements)."""
    parts = form.split(".")
    bits = _WIDTH.get(parts[-1]) or int(parts[-1][1:])
    count = next((int(p[1]) for p in parts if p in ("v2", "v4", "v8")), 1)
    return parts[-1], bits, count


def _lines(name: str, space: str, order: str, form: str, k: int) -> list[str]:
    """Yield an instruction on the thread's 16 bytes: store its result, then the memory contents."""
    _, bits, count = _shape(form)
    letter = {16: "h", 32: "r", 64: "w"}[bits]
    address = _SLOTS[space]
    opcode, how = f"{name}{order}{space}.{form}", form.split(".")[0]
    size = bits // 8
    lines = [
        f"add.u64 %w62, %s, {k * INPUTS * 16}; add.u64 %w62, %w62, %w61;",
        f"add.u64 %w63, %d, {k * INPUTS * 16}; add.u64 %w63, %w63, %w61;",
    ]
    if "shared" in space:
        lines.append("ld.global.v4.b32 {%r60, %r61, %r62, %r63}, [%w63];")
        lines.append("st.shared.v4.b32 [%r70], {%r60, %r61, %r62, %r63};")
    for e in range(count):
        lines.append(f"ld.global.b{bits} %{letter}{e}, [%w62+{e * size}];")
    values = braced(registers(bits, count))
    if how == "cas":  # half of the threads compare with what is there
        lines.append(f"ld.global.b{bits} %{letter}10, [%w63];")
        lines.append(
            f"and.b32 %r59, %thread, 1; setp.eq.u32 %p0, %r59, 0; @%p0 mov.b{bits} "
            f"%{letter}10, %{letter}1;"
        )
        lines.insert(-2, f"ld.global.b{bits} %{letter}1, [%w62+8];")
        values = f"%{letter}10, {values}"
    target = f"{braced(registers(bits, count, 20))}, " if name == "atom" else ""
    lines.append(f"{opcode} {target}[{address}], {values}{policy(opcode)};")
    if "shared" in space:
        lines.append("ld.shared.v4.b32 {%r60, %r61, %r62, %r63}, [%r70];")
        lines.append("st.global.v4.b32 [%w63], {%r60, %r61, %r62, %r63};")
    if name == "atom":
        lines.append(f"add.u64 %w64, %o, {k * INPUTS * 16}; add.u64 %w64, %w64, %w61;")
        for e in range(count):
            lines.append(f"st.global.b{bits} [%w64+{e * size}], %{letter}{20 + e};")
    return lines


_PREPARE = f"""mad.lo.u32 %r58, %cta, {THREADS}, %thread; mul.wide.u32 %w61, %r58, 16;
mov.u32 %r70, slots; mad.lo.u32 %r70, %thread, 16, %r70;
mapa.shared::cluster.u32 %r71, %r70, %rank;"""


def _values(name: str, seed: str, forms: list[str]) -> Buffer:
    """16 bytes per thread and form, values of the form's own type."""
    rows = []
    for k, form in enumerate(forms):
        kind, bits, _ = _shape(form)
        kind = kind.replace("b", "u") if kind in ("b16", "b32", "b64") else kind
        count = INPUTS * 16 * 8 // bits
        rows.append(operands((kind, kind), f"{seed} {k} {name}", count)[name == "s"].view(np.uint8))
    return Buffer(name, np.concatenate(rows).view(np.uint32))


def _case(name: str, title: str, chosen: list[tuple[str, str, str]]) -> Case:
    """chosen: (space, order, form)."""
    body, rows = [_PREPARE], []
    for k, (space, order, form) in enumerate(chosen):
        body += _lines(name, space, order, form, k)
        rows.append((f"{name}{order}{space}.{form}",))
    forms = [form for _, _, form in chosen]
    left = _values("d", title, forms)
    left.expected = left.data
    params = [_values("s", title, forms), left]
    if name == "atom":
        params.append(output("o", "u4", len(chosen) * INPUTS * 4))
    return case(
        f"{name} {title}",
        name,
        body,
        params,
        declared=f".shared .align 16 .b8 slots[{THREADS * 16}];",
        rows=tuple(rows),
    )


def cases() -> Iterator[Case]:
    every = [*_INTEGER, *_FLOAT]
    for name in ("atom", "red"):
        forms = [*every, *_EXCHANGES] if name == "atom" else every
        for space in _SLOTS:
            yield _case(name, f"operations{space}", [(space, "", form) for form in forms])
        vectors = [(".global", "", form) for form in _VECTORS]
        yield _case(name, "vectors", vectors)
        orders = expand(".{relaxed|acquire|release|acq_rel}.{cta|cluster|gpu|sys}")
        if name == "red":
            orders = expand(".{relaxed|release}.{cta|cluster|gpu|sys}")
        ordered = [
            (space, order, form)
            for order in (*orders, *expand(".{cta|cluster|gpu|sys}"))
            for space in (".global", "", ".shared")
            for form in ("add.u32", "max.s64", "add.f32")
        ]
        yield _case(name, "orders", ordered)
        hinted = [
            (".global", "", form)
            for form in ("add.L2::cache_hint.u32", "add.noftz.L2::cache_hint.f16x2")
        ]
        yield _case(name, "hints", hinted)
    yield _addresses()


def _addresses() -> Case:
    """Check cvta, isspacep, mapa and getctarank through the data found at the address."""
    spaces = ("global", "shared", "shared::cta", "shared::cluster", "local")
    pointers = {"global": "%w0", "shared": "%w1", "local": "%w2", "peer": "%w4"}
    body = [
        f"mad.lo.u32 %r0, %cta, {THREADS}, %thread; mul.wide.u32 %w10, %r0, 4;",
        "add.u64 %w11, %a, %w10; ld.global.b32 %r1, [%w11]; mul.lo.u32 %r2, %thread, 4;",
        "mov.u32 %r3, words; add.u32 %r3, %r3, %r2; st.shared.b32 [%r3], %r1;",
        "mov.u64 %w12, mine; not.b32 %r4, %r1; st.local.b32 [%w12], %r4; xor.b32 %r5, %rank, 1;",
        "mov.u64 %w13, table; and.b32 %r6, %r1, 7; mul.wide.u32 %w14, %r6, 4;",
        "add.u64 %w13, %w13, %w14; cvt.u64.u32 %w15, %r3;",
        "cvta.global.u64 %w0, %w11; cvta.shared.u64 %w1, %w15; cvta.local.u64 %w2, %w12;",
        "cvta.const.u64 %w3, %w13; mapa.u64 %w4, %w1, %r5;",
        "mapa.shared::cluster.u32 %r7, %r3, %r5; cvt.u64.u32 %w16, %r7;",
        "cvta.shared::cta.u64 %w17, %w15; cvta.shared::cluster.u64 %w18, %w16;",
        "barrier.cluster.arrive; barrier.cluster.wait;",
        "ld.b32 %r10, [%w0]; ld.b32 %r11, [%w1]; ld.b32 %r12, [%w2]; ld.b32 %r13, [%w3];",
        "ld.b32 %r14, [%w4]; ld.b32 %r15, [%w17]; ld.b32 %r16, [%w18];",
        "ld.shared::cluster.b32 %r17, [%r7];",
        "cvta.to.global.u64 %w20, %w0; ld.global.b32 %r18, [%w20];",
        "cvta.to.shared.u64 %w21, %w1; cvt.u32.u64 %r19, %w21; ld.shared.b32 %r19, [%r19];",
        "cvta.to.local.u64 %w22, %w2; ld.local.b32 %r20, [%w22];",
        "cvta.to.const.u64 %w23, %w3; ld.const.b32 %r21, [%w23];",
        "cvta.to.shared::cluster.u64 %w24, %w4; cvt.u32.u64 %r22, %w24;",
        "ld.shared::cluster.b32 %r22, [%r22];",
        "cvta.to.shared::cta.u64 %w25, %w17; cvt.u32.u64 %r24, %w25; ld.shared.b32 %r24, [%r24];",
        "getctarank.u64 %r25, %w4; getctarank.shared::cluster.u32 %r26, %r7;",
        "getctarank.u64 %r27, %w1; mov.b64 %w26, a; cvta.param.u64 %w27, %w26;",
        "ld.b32 %r28, [%w27]; cvt.u32.u64 %r29, %a; sub.u32 %r28, %r28, %r29;",
        "cvta.to.param.u64 %w28, %w27; ld.param.b32 %r23, [%w28]; sub.u32 %r23, %r23, %r29;",
        "cvta.param::entry.u64 %w35, %w26; cvta.to.param::entry.u64 %w36, %w35;",
        "ld.param::entry.b32 %r31, [%w36]; sub.u32 %r31, %r31, %r29; add.u32 %r23, %r23, %r31;",
        "mov.u32 %r30, 0;",
    ]
    for k, pointer in enumerate(pointers.values()):
        for j, space in enumerate(spaces):
            bit = 1 << (k * len(spaces) + j)
            body.append(f"isspacep.{space} %p0, {pointer}; @%p0 or.b32 %r30, %r30, {bit:#x};")
    body.append("mul.wide.u32 %w30, %r0, 4; add.u64 %w30, %d, %w30;")
    body += [
        f"st.global.b32 [%w30+{4 * INPUTS * k}], %r{row};"
        for k, row in enumerate((*range(10, 29), 30))
    ]
    body.append("barrier.cluster.arrive; barrier.cluster.wait;")
    table = ", ".join(str(17 * k) for k in range(8))
    return case(
        "addresses",
        "cvta isspacep mapa getctarank ld",
        body,
        [random_buffer("a", "addresses", "u4", INPUTS), output("d", "u4", 20 * INPUTS)],
        declared=f".shared .align 16 .b32 words[{THREADS}]; .local .align 4 .b32 mine[4];",
        module=f".const .align 4 .b32 table[8] = {{{table}}};\n",
        cluster=(2,),
    )
