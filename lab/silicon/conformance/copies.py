"""cp.async, cp.async.bulk, st.async, cp.reduce.async.bulk, ldmatrix and stmatrix: random places,
sizes and peers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import (
    CTAS,
    EVICT_FIRST,
    INDEX,
    INPUTS,
    THREADS,
    braced,
    case,
    hinted,
    output,
    policy,
    random_buffer,
    registers,
)
from lab.silicon.conformance.patterns import expand
from lab.silicon.conformance.ptx_program import Buffer
from lab.silicon.conformance.values import below, operands, random_words


def shuffled(seed: str, groups: int, size: int) -> np.ndarray:
    """uint32 [groups * size]: a permutation of 0..size-1 in each group."""
    keys = random_words(seed, groups * size).reshape(groups, size)
    return np.argsort(keys, axis=1, kind="stable").astype(np.uint32).reshape(-1)


def dump(words: int, base: str = "slots", row: int = 0) -> str:
    """Every thread writes its part of `words` of the CTA's shared memory to %d."""
    lines = [
        f"mov.u32 %r50, {base}; mad.lo.u32 %r50, %thread, 4, %r50;",
        f"mad.lo.u32 %r51, %cta, {words}, %thread; mul.wide.u32 %w50, %r51, 4;",
        f"add.u64 %w50, %w50, %d; add.u64 %w50, %w50, {row};",
    ]
    for k in range(0, words, THREADS):
        lines.append(f"ld.shared.b32 %r52, [%r50+{4 * k}]; st.global.b32 [%w50+{4 * k}], %r52;")
    return "\n".join(lines)


def fill(words: int, base: str = "slots", value: str = "") -> str:
    """Shared memory holds something that depends on the place, or `value`."""
    lines = [f"mov.u32 %r50, {base}; mad.lo.u32 %r50, %thread, 4, %r50;"]
    lines.append(f"mov.b32 %r51, {value};" if value else "mad.lo.u32 %r51, %thread, 77, 0x5a5a;")
    lines += [f"st.shared.b32 [%r50+{4 * k}], %r51;" for k in range(0, words, THREADS)]
    return "\n".join(lines)


def brought(words: int, source: str) -> str:
    """Shared memory holds the words from the address in a register on."""
    lines = [
        "mov.u32 %r50, slots; mad.lo.u32 %r50, %thread, 4, %r50;",
        f"mad.wide.u32 %w50, %thread, 4, {source};",
    ]
    for k in range(0, 4 * words, 4 * THREADS):
        lines.append(f"ld.global.b32 %r51, [%w50+{k}]; st.shared.b32 [%r50+{k}], %r51;")
    return "\n".join(lines)


# -- cp.async ---------------------------------------------------------------------------------


def _asynchronous(operator: str, nbytes: int, k: int) -> Case:
    """Every thread copies two pieces to slots of other threads, of which some bytes are read."""
    name = f"cp.async.{operator} {nbytes}"
    hints = list(expand("{|.L2::64B|.L2::128B|.L2::256B|.L2::cache_hint|.L2::cache_hint.L2::128B}"))
    spaces = (".shared.global", ".shared::cta.global")
    waits = (
        "cp.async.commit_group; cp.async.wait_group 0;",
        "cp.async.wait_all;",
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r20];",
        "cp.async.mbarrier.arrive.shared::cta.b64 [%r20]; mbarrier.arrive.shared.b64 %w9, [%r20];",
    )
    words = THREADS * nbytes // 4
    body = [INDEX, "mov.u32 %r20, bar; setp.eq.u32 %p0, %thread, 0;", fill(max(words, THREADS))]
    body.append(f"@%p0 mbarrier.init.shared.b64 [%r20], {THREADS}; bar.sync 0;")
    rounds, parity = len(hints) * 2, 0
    for r in range(rounds):
        opcode = f"cp.async.{operator}{spaces[r % 2]}{hints[r % len(hints)]}"
        size = ("", ", %r5", ", %p2")[(r + k) % 3]
        if size == ", %p2" and policy(opcode):
            size = ""
        wait = waits[r % len(waits)]
        row = f"add.u64 %w2, %x, {4 * 3 * INPUTS * r}; add.u64 %w2, %w2, %w60;"
        body += [
            f"{row} ld.global.b32 %r2, [%w2]; ld.global.b32 %r3, [%w2+{4 * INPUTS}];",
            f"ld.global.b32 %r5, [%w2+{8 * INPUTS}]; and.b32 %r6, %r5, 1; setp.ne.u32 %p2, %r6, 0;",
            f"mul.wide.u32 %w3, %r2, {nbytes}; add.u64 %w3, %w3, %a; mov.u32 %r7, slots;",
            f"mad.lo.u32 %r7, %r3, {nbytes}, %r7;"
            f" {opcode} [%r7], [%w3], {nbytes}{size}{policy(opcode)};",
            wait,
        ]
        if "mbarrier" in wait:
            body.append(
                f"WAIT{r}: mbarrier.try_wait.parity.shared.b64 %p1, [%r20], {parity};"
                f" @!%p1 bra WAIT{r};"
            )
            parity ^= 1
        body += ["bar.sync 0;", dump(words, row=4 * words * CTAS * r), "bar.sync 0;"]
    places = []
    for r in range(rounds):
        places.append(below(f"{name} from {r}", INPUTS, 4 * INPUTS).astype(np.uint32))
        places.append(shuffled(f"{name} to {r}", CTAS, THREADS))
        places.append(below(f"{name} size {r}", INPUTS, nbytes + 1).astype(np.uint32))
    return case(
        name,
        "cp.async mbarrier",
        body,
        [
            random_buffer("a", name, "u4", INPUTS * nbytes),
            Buffer("x", np.concatenate(places)),
            output("d", "u4", rounds * words * CTAS),
        ],
        declared=f".shared .align 16 .b8 slots[{max(4 * words, 4 * THREADS)}];"
        " .shared .align 8 .b64 bar;",
    )


# -- bulk copies ------------------------------------------------------------------------------

_PIECES, _LARGEST = 16, 64  # pieces of a CTA, 16-byte units of a piece
_WORDS = 4096  # of a CTA's shared memory


def _pieces(name: str, limit: int) -> np.ndarray:
    """uint32 [CTAS * _PIECES, 3]: source unit below `limit`, destination unit (apart), units."""
    count = CTAS * _PIECES
    size = 1 + below(f"{name} size", count, _LARGEST)
    source = below(f"{name} source", count, limit - _LARGEST)
    slack = below(f"{name} slack", count, 1 << 20) % (_LARGEST + 1 - size)
    target = shuffled(f"{name} slots", CTAS, _PIECES) * _LARGEST + slack
    return np.stack([source, target, size], axis=1).astype(np.uint32).reshape(-1)


def _piece(k: int) -> str:
    """Source, target and bytes of piece k into %r2, %r3, %r4, in bytes."""
    return "\n".join(
        [
            f"mad.lo.u32 %r1, %cta, {_PIECES}, {k}; mul.wide.u32 %w1, %r1, 12;",
            "add.u64 %w1, %w1, %x; ld.global.b32 %r2, [%w1]; ld.global.b32 %r3, [%w1+4];",
            "ld.global.b32 %r4, [%w1+8]; shl.b32 %r2, %r2, 4; shl.b32 %r3, %r3, 4;",
            "shl.b32 %r4, %r4, 4; mov.u32 %r5, slots; add.u32 %r6, %r5, %r3;",
            "add.u32 %r7, %r5, %r2; cvt.u64.u32 %w2, %r2; add.u64 %w2, %w2, %a;",
            f"cvt.u64.u32 %w3, %r3; mul.wide.u32 %w4, %cta, {4 * _WORDS}; add.u64 %w3, %w3, %w4;",
            "add.u64 %w3, %w3, %d;",
        ]
    )


ALONE = "setp.eq.u32 %p0, %thread, 0; mov.u32 %r20, bar;"
_INIT = "@%p0 mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
_FOLLOW = "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r20], 0; @!%p1 bra WAIT;"
MEET = "barrier.cluster.arrive; barrier.cluster.wait;"
_SHARED = f".shared .align 128 .b8 slots[{4 * _WORDS}]; .shared .align 8 .b64 bar;"
_COPIES = "cp.async.bulk mbarrier fence fence.proxy"


def _bulk(name: str, body: list[str], inputs: list[Buffer], *, cluster: int = 1) -> Case:
    return case(
        name,
        _COPIES,
        body,
        [*inputs, output("d", "u4", CTAS * _WORDS)],
        inputs=CTAS * _PIECES * _LARGEST,
        declared=_SHARED,
        cluster=(cluster,),
    )


def _bulk_load(space: str) -> Case:
    name = f"bulk load {space}"
    body = [ALONE, fill(_WORDS), _INIT, "@!%p0 bra FOLLOW;", "fence.proxy.async.shared::cta;"]
    for k in range(_PIECES):
        hint, operand = hinted(k)
        body += [
            _piece(k),
            "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r20], %r4;",
            f"cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes{hint}"
            f" [%r6], [%w2], %r4, [%r20]{operand};",
        ]
    body += ["cp.async.bulk.prefetch.L2.global [%w2], %r4;"]
    body += [f"cp.async.bulk.prefetch.L2.global.L2::cache_hint [%w2], %r4, {EVICT_FIRST};"]
    body += ["mbarrier.arrive.shared.b64 %w9, [%r20];", "FOLLOW:", _FOLLOW, dump(_WORDS)]
    places = Buffer("x", _pieces(name, 4 * _WORDS // 4))
    return _bulk(name, body, [random_buffer("a", name, "u4", 4 * _WORDS), places])


def _bulk_store(read: str) -> Case:
    """Source and target change places: the pieces lie apart in global memory."""
    name = f"bulk store{read}"
    body = [ALONE, fill(_WORDS), f"mul.wide.u32 %w5, %cta, {4 * _WORDS}; add.u64 %w5, %w5, %a;"]
    body += [brought(_WORDS, "%w5"), "fence.proxy.async.shared::cta; bar.sync 0; @!%p0 bra END;"]
    for k in range(_PIECES):
        hint, operand = hinted(k)
        body.append(_piece(k))
        copy = f"cp.async.bulk.global.shared::cta.bulk_group{hint}"
        body.append(f"{copy} [%w3], [%r7], %r4{operand};")
        if k % 4 == 3:
            body.append(f"cp.async.bulk.commit_group; cp.async.bulk.wait_group{read} {k % 3};")
    body += ["cp.async.bulk.commit_group;", f"cp.async.bulk.wait_group{read} 0;", "END:"]
    places = Buffer("x", _pieces(name, _WORDS // 4))
    return _bulk(name, body, [random_buffer("a", name, "u4", CTAS * _WORDS), places])


def _bulk_peer() -> Case:
    """Copy from one half of shared memory to the other half of the peer's."""
    name, half = "bulk to a peer", _WORDS // 2
    body = [
        ALONE,
        fill(_WORDS),
        f"mul.wide.u32 %w5, %cta, {4 * half}; add.u64 %w5, %w5, %a;",
        brought(half, "%w5"),
        "@%p0 mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster;",
        f"fence.proxy.async; {MEET} @!%p0 bra FOLLOW;",
        "xor.b32 %r21, %rank, 1; mapa.shared::cluster.u32 %r22, %r20, %r21;",
    ]
    for k in range(_PIECES // 2):
        body += [
            _piece(k),
            f"add.u32 %r6, %r6, {4 * half}; mapa.shared::cluster.u32 %r6, %r6, %r21;",
            "mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%r22], %r4;",
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            " [%r6], [%r7], %r4, [%r22];",
        ]
    body += ["mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r22];", "FOLLOW:"]
    body += [_FOLLOW, dump(_WORDS), MEET]
    pieces = _pieces(name, half // 4).reshape(CTAS, _PIECES, 3)
    slots = shuffled(f"{name} halves", CTAS, _PIECES // 2).reshape(CTAS, _PIECES // 2)
    pieces[:, : _PIECES // 2, 1] = slots * _LARGEST
    places = Buffer("x", pieces.reshape(-1))
    return _bulk(name, body, [random_buffer("a", name, "u4", CTAS * half), places], cluster=2)


def _bulk_multicast(size: int) -> Case:
    """Every CTA sends pieces to a random set of CTAs; each waits for what is meant for it."""
    name = f"bulk multicast to {size}"
    count = CTAS * _PIECES
    masks = 1 + below(f"{name} masks", count, (1 << size) - 1)
    pieces = _pieces(name, 4 * _WORDS // 4).reshape(CTAS, _PIECES, 3)
    # within a cluster the pieces of all CTAs land in places of their own
    slots = shuffled(f"{name} places", CTAS // size, size * _PIECES).reshape(CTAS, _PIECES)
    pieces[:, :, 2] = 1 + pieces[:, :, 2] % (_LARGEST // size)
    pieces[:, :, 1] = slots * (_LARGEST // size)
    clusters = masks.reshape(CTAS // size, size * _PIECES)
    nbytes = (16 * pieces[:, :, 2]).reshape(CTAS // size, size * _PIECES)
    expected = np.stack([(nbytes * (clusters >> r & 1)).sum(1) for r in range(size)], axis=1)
    body = [
        ALONE,
        fill(_WORDS),
        "@%p0 mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster;",
        f"fence.proxy.async; {MEET} @!%p0 bra FOLLOW;",
        "mul.wide.u32 %w7, %cta, 4; add.u64 %w7, %w7, %e; ld.global.b32 %r9, [%w7];",
        "mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], %r9;",
    ]
    for k in range(_PIECES):
        hint, operand = hinted(k)
        body += [
            _piece(k),
            "mul.wide.u32 %w8, %r1, 2; add.u64 %w8, %w8, %m; ld.global.b16 %h1, [%w8];",
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            f"{hint} [%r6], [%w2], %r4, [%r20], %h1{operand};",
        ]
    body += ["FOLLOW:", _FOLLOW, dump(_WORDS), MEET]
    inputs = [
        random_buffer("a", name, "u4", 4 * _WORDS),
        Buffer("x", pieces.reshape(-1)),
        Buffer("e", expected.astype(np.uint32).reshape(-1)),
        Buffer("m", masks.astype(np.uint16)),
    ]
    return _bulk(name, body, inputs, cluster=size)


_REDUCED = (
    *expand("{add|min|max|inc|dec}.u32"),
    *expand("{add|min|max}.s32"),
    *expand("{add|min|max}.u64"),
    *expand("{min|max}.s64"),
    *expand("{and|or|xor}.{b32|b64}"),
    *expand("add.{f32|f64}"),
    *expand("add.noftz.{f16|bf16}"),
    *expand("{min|max}.{f16|bf16}"),
)


def _bulk_reduce(form: str) -> Case:
    """A kilobyte and more of shared memory combined with global memory."""
    name, kind = f"bulk reduce {form}", form.split(".")[-1]
    element = kind.replace("b", "u") if kind in ("b32", "b64") else kind
    bits = 16 if "16" in kind else int(kind[1:])
    words, hint = 512, "noftz" not in form and bits == 32
    count = CTAS * words * 32 // bits
    data = operands((element, element), name, count)
    held = Buffer("d", data[1].view(np.uint32))
    held.expected = held.data
    hinted_form = f".L2::cache_hint.{form}" if hint else f".{form}"
    body = [
        "setp.eq.u32 %p0, %thread, 0;",
        f"mul.wide.u32 %w5, %cta, {4 * words}; add.u64 %w6, %w5, %a; add.u64 %w7, %w5, %d;",
        brought(words, "%w6"),
        "mov.u32 %r9, slots; fence.proxy.async.shared::cta; bar.sync 0; @!%p0 bra END;",
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group{hinted_form}"
        f" [%w7], [%r9], {4 * words}{policy(hinted_form)};",
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        "END:",
    ]
    return case(
        name,
        "cp.reduce",
        body,
        [Buffer("a", data[0].view(np.uint32)), held],
        inputs=count,
        declared=f".shared .align 128 .b8 slots[{4 * words}];",
    )


# -- st.async, ldmatrix, stmatrix ---------------------------------------------------------------


def _remote_stores(size: int) -> Case:
    """Every thread stores to a random slot of the CTA `k` ranks further, in every form."""
    forms = [
        (f"{order}.shared::cluster.mbarrier::complete_tx::bytes{vector}.{t}", int(t[1:]), count)
        for t in ("b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
        for vector, count in (("", 1), (".v2", 2), (".v4", 4))
        for order in ("", ".weak")
        if int(t[1:]) * count <= 128
    ]
    name, words = f"st.async in {size}", THREADS * 4
    body = [INDEX, ALONE, fill(words)]
    body += [f"@%p0 mbarrier.init.shared.b64 [%r20], {1}; fence.mbarrier_init.release.cluster;"]
    for k, (form, bits, count) in enumerate(forms):
        nbytes = bits // 8 * count
        values = registers(bits, count, 30)
        body += [
            f"add.u64 %w2, %x, {4 * INPUTS * k}; add.u64 %w2, %w2, %w60; ld.global.b32 %r2, [%w2];",
            f"add.u32 %r3, %rank, {1 + k}; rem.u32 %r3, %r3, {size}; mov.u32 %r4, slots;",
            f"mad.lo.u32 %r4, %r2, {nbytes}, %r4; mapa.shared::cluster.u32 %r4, %r4, %r3;",
            "mapa.shared::cluster.u32 %r5, %r20, %r3;",
            f"add.u64 %w3, %a, {16 * INPUTS * k}; mad.wide.u32 %w3, %r60, 16, %w3;",
            *[f"ld.global.b{bits} {v}, [%w3+{bits // 8 * e}];" for e, v in enumerate(values)],
            f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], {nbytes * THREADS}; {MEET}",
            f"st.async{form} [%r4], {braced(values)}, [%r5];",
            f"WAIT{k}: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r20],"
            f" {k & 1}; @!%p1 bra WAIT{k};",
            dump(words, row=4 * words * CTAS * k),
            MEET,
        ]
    return case(
        name,
        "st.async mapa mbarrier",
        body,
        [
            random_buffer("a", name, "u4", 4 * INPUTS * len(forms)),
            Buffer("x", shuffled(name, CTAS * len(forms), THREADS)),
            output("d", "u4", words * CTAS * len(forms)),
        ],
        declared=f".shared .align 16 .b8 slots[{4 * words}]; .shared .align 8 .b64 bar;",
        cluster=(size,),
    )


def _matrices(store: bool) -> Case:
    """Each warp moves matrices whose rows lie in a random order."""
    name, words = "stmatrix" if store else "ldmatrix", THREADS * 4
    forms = [
        f"{name}.sync.aligned.m8n8.{count}{trans}{space}.b16"
        for count in ("x1", "x2", "x4")
        for trans in ("", ".trans")
        for space in (".shared", ".shared::cta", "")
    ]
    body = [INDEX, "mov.u32 %r9, slots; mad.lo.u32 %r10, %thread, 4, %r9; mov.b32 %r40, 0x1234;"]
    for k, form in enumerate(forms):
        count = int(form.split(".x")[1][0])
        moved = f"{{{', '.join(registers(32, count, 30))}}}"
        address = "[%r3]" if ".shared" in form else "[%w8]"
        body += [
            f"add.u64 %w2, %x, {4 * INPUTS * k}; add.u64 %w2, %w2, %w60; ld.global.b32 %r2, [%w2];",
            "mad.lo.u32 %r3, %r2, 16, %r9; cvt.u64.u32 %w8, %r3; cvta.shared.u64 %w8, %w8;",
            f"add.u64 %w3, %a, {16 * INPUTS * k}; add.u64 %w3, %w3, %w60;",
            f"add.u64 %w4, %d, {16 * INPUTS * k}; add.u64 %w4, %w4, %w60; bar.sync 0;",
        ]
        for e, row in enumerate(registers(32, 4, 30)):
            body.append(f"ld.global.b32 {row}, [%w3+{4 * INPUTS * e}];")
            held = "%r40" if store else row
            body.append(f"st.shared.b32 [%r10+{4 * THREADS * e}], {held};")
        both = f"{address}, {moved}" if store else f"{moved}, {address}"
        body.append(f"bar.sync 0; {form} {both}; bar.sync 0;")
        for e in range(4):
            if store:
                body.append(f"ld.shared.b32 %r{30 + e}, [%r10+{4 * THREADS * e}];")
            if store or e < count:
                body.append(f"st.global.b32 [%w4+{4 * INPUTS * e}], %r{30 + e};")
    # row addresses: units of 16 bytes, a permutation of the CTA's 128
    return case(
        name,
        name,
        body,
        [
            random_buffer("a", name, "u4", 4 * INPUTS * len(forms)),
            Buffer("x", shuffled(name, CTAS * len(forms), THREADS)),
            output("d", "u4", 4 * INPUTS * len(forms)),
        ],
        declared=f".shared .align 16 .b8 slots[{4 * words}];",
    )


def cases() -> Iterator[Case]:
    for k, (operator, nbytes) in enumerate((("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16))):
        yield _asynchronous(operator, nbytes, k)
    yield _bulk_load("shared::cluster")
    yield _bulk_load("shared::cta")
    yield _bulk_store("")
    yield _bulk_store(".read")
    yield _bulk_peer()
    yield _bulk_multicast(2)
    yield _bulk_multicast(4)
    for form in _REDUCED:
        yield _bulk_reduce(form)
    yield _remote_stores(2)
    yield _remote_stores(4)
    yield _matrices(False)
    yield _matrices(True)
