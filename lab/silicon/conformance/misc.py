"""Instructions without a result: fences, hints, control; and parameters and constants.

Such an instruction is executed between a load and a store whose data must arrive unharmed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import (
    CTAS,
    INDEX,
    INPUTS,
    THREADS,
    braced,
    case,
    output,
    random_buffer,
    registers,
)
from lab.silicon.conformance.patterns import expand
from lab.silicon.conformance.ptx_program import Buffer, Map, Value
from lab.silicon.conformance.values import random_bytes

_ORDERS = (
    *expand("fence{|.sc|.acq_rel|.acquire|.release}.{cta|cluster|gpu|sys}"),
    *expand("membar.{cta|gl|sys}"),
    "fence.acquire.sync_restrict::shared::cluster.cluster",
    "fence.release.sync_restrict::shared::cta.cluster",
    "fence.mbarrier_init.release.cluster",
    "fence.proxy.alias",
    *expand("fence.proxy.async{|.global|.shared::cta|.shared::cluster}"),
    *expand("fence.proxy.tensormap::generic.release.{cta|cluster|gpu|sys}"),
    "griddepcontrol.wait",
    "griddepcontrol.launch_dependents",
    "bar.warp.sync 0xffffffff",
    "nanosleep.u32 20",
    "nanosleep.u32 %r1",
    "pmevent 1",
    "bra.uni NEXT; NEXT:",
    "setmaxnreg.dec.sync.aligned.u32 64",
    "setmaxnreg.inc.sync.aligned.u32 96",
)
_HINTS = (
    *expand("prefetch.{global|local}.{L1|L2} [ADDRESS]"),
    *expand("prefetch.{L1|L2} [%w61]"),
    *expand("prefetch.global.L2::{evict_last|evict_normal} [%w61]"),
    "prefetchu.L1 [%w61]",
    "prefetch.tensormap [%map]",
    "prefetch.param.tensormap [map]",
    "applypriority.global.L2::evict_normal [%w63], 128",
    "applypriority.L2::evict_normal [%w63], 128",
    "discard.global.L2 [%w63], 128",
    "discard.L2 [%w63], 128",
    *expand("fence.proxy.tensormap::generic.acquire.{cta|cluster|gpu|sys} [%map], 128"),
)


def _around(name: str, subject: str, instructions: tuple[str, ...]) -> Case:
    """Data goes through shared memory; every instruction stands between two accesses of it."""
    body = [
        INDEX,
        "mov.u32 %r10, words; mad.lo.u32 %r10, %thread, 4, %r10; mov.u64 %w62, mine;",
        "mul.wide.u32 %w63, %cta, 128; add.u64 %w63, %spare, %w63;",
        "add.u64 %w61, %a, %w60; ld.global.b32 %r2, [%w61]; st.shared.b32 [%r10], %r2;",
        "and.b32 %r1, %r2, 31; st.local.b32 [%w62], %r2;",
    ]
    for text in instructions:
        where = "%w62" if ".local" in text else "%w61"
        body.append(f"{text.replace('ADDRESS', where)};".replace(":;", ":"))
        body.append(
            "ld.shared.b32 %r3, [%r10]; mad.lo.u32 %r3, %r3, 5, 3; st.shared.b32 [%r10], %r3;"
        )
    body.append("add.u64 %w61, %d, %w60; ld.local.b32 %r4, [%w62]; xor.b32 %r3, %r3, %r4;")
    body.append("setp.eq.u32 %p0, %r1, 7; st.global.b32 [%w61], %r3; @%p0 exit;")
    body.append("@!%p0 ret.uni;")
    spare = Buffer("spare", np.zeros(32 * CTAS, np.uint32))
    return case(
        name,
        subject,
        body,
        [
            random_buffer("a", name, "u4", INPUTS),
            spare,
            Map("map", "a", "u32", (64, 16), (32, 4)),
            output("d", "u4", INPUTS),
        ],
        declared=f".shared .align 4 .b32 words[{THREADS}]; .local .align 4 .b32 mine[1];",
    )


POLICIES = (
    *expand("createpolicy.fractional.L2::{evict_last|evict_normal|evict_first}.b64 %w40"),
    *expand("createpolicy.fractional.L2::{evict_last|evict_unchanged}.b64 %w40, 0.5"),
    *expand("createpolicy.fractional.L2::evict_last.L2::{evict_first|evict_unchanged}.b64 %w40"),
    *expand(
        "createpolicy.range{|.global}.L2::{evict_last|evict_normal|evict_first|evict_unchanged}"
        "{|.L2::evict_first|.L2::evict_unchanged}.b64 %w40, [%w61], 4096, 65536"
    ),
    "createpolicy.cvt.L2.b64 %w40, %w41",
    "mov.b64 %w40, %w41; pmevent.mask 3",
)


def _policies() -> Case:
    """Words that are opaque: what is read and written with them is what it is without."""
    body = [INDEX, "add.u64 %w61, %a, %w60; add.u64 %w62, %d, %w60;"]
    body += ["mov.b64 %w41, 0x12f0000000000000;"]
    for k, text in enumerate(POLICIES):
        body += [
            f"{text}; ld.global.L2::cache_hint.b32 %r2, [%w61], %w40;",
            f"st.global.L2::cache_hint.b32 [%w62+{4 * INPUTS * k}], %r2, %w40;",
        ]
    return case(
        "cache policies",
        "createpolicy pmevent",
        body,
        [
            random_buffer("a", "policies", "u4", INPUTS),
            output("d", "u4", INPUTS * len(POLICIES)),
        ],
    )


def _constants() -> Case:
    """Parameters by value and constants, at fixed and at computed places, in every width."""
    table = random_bytes("constants", 256)
    forms = [
        (space, vector, t)
        for space in ("param", "param::entry", "const")
        for t in "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64".split()
        for vector in (1, 2, 4)
        if vector * int(t[1:]) <= 128
    ]
    body, row = [INDEX, "mul.wide.u32 %w60, %r60, 16; mov.u64 %w50, table;"], 0
    body.append("add.u64 %w61, %a, %w60; ld.global.b32 %r1, [%w61]; and.b32 %r1, %r1, 240;")
    body.append("cvt.u64.u32 %w51, %r1; add.u64 %w50, %w50, %w51; mov.b64 %w52, v;")
    body.append("add.u64 %w52, %w52, %w51;")
    for space, count, t in forms:
        bits = max(int(t[1:]), 16)
        names = registers(bits, count, 30)
        vector = f".v{count}" if count > 1 else ""
        places = ("%w50",) if space == "const" else ("%w52", f"v+{16 * (row % 15)}")
        for place in places:
            body.append(f"add.u64 %w62, %d, {16 * INPUTS * row}; add.u64 %w62, %w62, %w60;")
            body.append(f"ld.{space}{vector}.{t} {braced(names)}, [{place}];")
            body += [f"st.global.b{bits} [%w62+{bits // 8 * k}], {r};" for k, r in enumerate(names)]
            row += 1
    listed = ", ".join(map(str, table))
    return case(
        "constants and parameters",
        "ld.param ld.param::entry ld.const",
        body,
        [
            random_buffer("a", "constants", "u4", 4 * INPUTS),
            Value("v", random_bytes("parameters", 256)),
            output("d", "u4", 4 * INPUTS * row),
        ],
        module=f".const .align 16 .b8 table[256] = {{{listed}}};\n",
    )


def cases() -> Iterator[Case]:
    subject = "fence membar griddepcontrol bar.warp nanosleep pmevent bra exit ret setmaxnreg"
    yield _around("orders", subject, _ORDERS)
    yield _around("hints", "prefetch prefetchu applypriority discard fence", _HINTS)
    yield _constants()
    yield _policies()
