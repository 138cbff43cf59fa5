"""red.async and cp.reduce.async.bulk into the shared memory of a CTA of the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.silicon.conformance.case import Case
from lab.silicon.conformance.copies import ALONE, MEET, brought, dump, fill, shuffled
from lab.silicon.conformance.kernel import (
    CTAS,
    INDEX,
    INPUTS,
    THREADS,
    case,
    output,
    random_buffer,
    registers,
)
from lab.silicon.conformance.patterns import expand
from lab.silicon.conformance.ptx_program import Buffer
from lab.silicon.conformance.values import below, operands

_ATOMIC = (
    *expand("{inc|dec|min|max|add}.u32"),
    *expand("{min|max|add}.s32"),
    *expand("{and|or|xor}.b32"),
    *expand("add.{u64|s64}"),
)
_COPIED = (
    *expand("{and|or|xor}.b32"),
    *expand("{add|inc|dec|min|max}.u32"),
    *expand("{add|min|max}.s32"),
    "add.u64",
)
_COMPLETES = "shared::cluster.mbarrier::complete_tx::bytes"
_START = f"{INDEX} {ALONE} @%p0 mbarrier.init.shared.b64 [%r20], 1;"
_PUBLISHED = "@%p0 fence.mbarrier_init.release.cluster;"


def _wait(k: int) -> str:
    how = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64"
    return f"WAIT{k}: {how} %p1, [%r20], {k & 1}; @!%p1 bra WAIT{k};"


def _reductions(size: int) -> Case:
    """Every thread combines a word with a slot of the CTA `k` ranks further: several threads with
    one slot, where the order does not matter."""
    name, words = f"red.async in {size}", THREADS * 2
    body, places = [_START, fill(words), _PUBLISHED, MEET], []
    for k, form in enumerate(_ATOMIC):
        bits = int(form[-2:])
        (value,) = registers(bits, 1, 30)
        apart = form.startswith(("inc", "dec"))
        seed = f"{name} {form}"
        places.append(
            shuffled(seed, CTAS, THREADS) if apart else below(seed, INPUTS, THREADS).astype("u4")
        )
        opcode = f"red.async.relaxed.cluster.{_COMPLETES}.{form}"
        body += [
            f"add.u64 %w2, %x, {4 * INPUTS * k}; add.u64 %w2, %w2, %w60; ld.global.b32 %r2, [%w2];",
            f"add.u32 %r3, %rank, {1 + k}; rem.u32 %r3, %r3, {size}; mov.u32 %r4, slots;",
            f"mad.lo.u32 %r4, %r2, {bits // 8}, %r4; mapa.shared::cluster.u32 %r4, %r4, %r3;",
            "mapa.shared::cluster.u32 %r5, %r20, %r3;",
            f"add.u64 %w3, %a, {8 * INPUTS * k}; mad.wide.u32 %w3, %r60, 8, %w3;",
            f"ld.global.b{bits} {value}, [%w3];",
            f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], {bits // 8 * THREADS}; {MEET}",
            f"{opcode} [%r4], {value}, [%r5];",
            _wait(k),
            dump(words, row=4 * words * CTAS * k),
            MEET,
        ]
    return case(
        name,
        "red.async",
        body,
        [
            random_buffer("a", name, "u4", 2 * INPUTS * len(_ATOMIC)),
            Buffer("x", np.concatenate(places)),
            output("d", "u4", words * CTAS * len(_ATOMIC)),
        ],
        declared=f".shared .align 16 .b8 slots[{4 * words}]; .shared .align 8 .b64 bar;",
        cluster=(size,),
    )


def _bulk(form: str) -> Case:
    """Each of two CTAs combines all of its words with those of the other."""
    name, kind = f"bulk reduce of a peer {form}", form.split(".")[-1]
    element, bits, words = kind.replace("b", "u"), int(kind[1:]), 512
    data = operands((element, element), name, CTAS * words * 32 // bits)
    opcode = f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{form}"
    body = [
        _START,
        f"mul.wide.u32 %w5, %cta, {4 * words}; add.u64 %w6, %w5, %a; add.u64 %w7, %w5, %b;",
        brought(words, "%w6"),
        brought(words, "%w7").replace("slots", "held"),
        f"fence.proxy.async.shared::cta; {_PUBLISHED}",
        f"@%p0 mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], {4 * words}; {MEET}",
        "@!%p0 bra FOLLOW;",
        "xor.b32 %r3, %rank, 1; mov.u32 %r4, held; mov.u32 %r6, slots;",
        "mapa.shared::cluster.u32 %r4, %r4, %r3; mapa.shared::cluster.u32 %r5, %r20, %r3;",
        f"{opcode} [%r4], [%r6], {4 * words}, [%r5];",
        "FOLLOW:",
        _wait(0),
        dump(words, "held"),
        MEET,
    ]
    return case(
        name,
        "cp.reduce",
        body,
        [
            Buffer("a", data[0].view("u4")),
            Buffer("b", data[1].view("u4")),
            output("d", "u4", CTAS * words),
        ],
        inputs=CTAS * words * 32 // bits,
        declared=f".shared .align 128 .b8 slots[{4 * words}], held[{4 * words}];"
        " .shared .align 8 .b64 bar;",
        cluster=(2,),
    )


def cases() -> Iterator[Case]:
    yield _reductions(2)
    yield _reductions(4)
    yield from map(_bulk, _COPIED)
