"""Questions that the manual leaves open and a GPU can answer: a few programs and a sentence
each.

The answers say what ptxemu may allow, or must refuse. They are no results to be compared: where
the order of two things is open, one run may find an order that another does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from lab.silicon.conformance import wgmma, wgmma_sparse
from lab.silicon.conformance.case import Case
from lab.silicon.conformance.kernel import INDEX, THREADS, case, output, random_buffer
from lab.silicon.conformance.misc import POLICIES
from lab.silicon.conformance.ptx_program import Map, Program

Run = Callable[[Program], dict[str, np.ndarray]]
_SPIN = 200_000  # cycles, longer than any chain of products here


# -- a CTA that exits while its store reads --------------------------------------------------------


def exit_during_store(how: str, waits: bool, nbytes: int = 196608, ctas: int = 1056) -> Case:
    """Each CTA fills its shared memory with its number, starts to store it, and exits.

    how: "bulk", one copy; "pieces", 32 of them; "tensor", four boxes.
    """
    rows, boxes = nbytes // 1024, 4
    pieces = {"bulk": 1, "pieces": 32, "tensor": boxes}[how]
    size = nbytes // pieces
    copies = [
        f"cp.async.bulk.global.shared::cta.bulk_group [%w4+{k * size}], [%r6+{k * size}], {size};"
        for k in range(pieces)
    ]
    if how == "tensor":
        copies = [
            f"mad.lo.u32 %r7, %cta, {rows}, {k * rows // boxes}; add.u32 %r8, %r6, {k * size};"
            " cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%map, {%r9, %r7}], [%r8];"
            for k in range(boxes)
        ]
    words = nbytes // 4
    body = [
        "mov.u32 %r6, mem; add.u32 %r1, %cta, 1; mov.b32 %r9, 0;",
        f"mul.wide.u32 %w4, %cta, {nbytes}; add.u64 %w4, %w4, %d;",
        "shl.b32 %r2, %thread, 2; add.u32 %r3, %r6, %r2;",
        f"FILL: setp.ge.u32 %p1, %r2, {nbytes}; @%p1 bra FILLED;",
        "st.shared.b32 [%r3], %r1; add.u32 %r3, %r3, 4096; add.u32 %r2, %r2, 4096; bra FILL;",
        "FILLED: fence.proxy.async.shared::cta; bar.sync 0;",
        "setp.ne.u32 %p2, %thread, 0; @%p2 bra END;",
        *copies,
        "cp.async.bulk.commit_group;",
        "cp.async.bulk.wait_group.read 0;" if waits else "",
        "END:",
    ]
    made = output("d", "u4", ctas * words)
    params: list = [made]
    if how == "tensor":
        params.append(Map("map", "d", "u32", (256, ctas * rows), (256, rows // boxes)))
    return case(
        f"exit during a store, {how}, {waits}",
        "cp.async.bulk",
        body,
        params,
        module=".extern .shared .align 128 .b8 mem[];\n",
        grid=(ctas,),
        block=(1024,),
        smem=nbytes,
    )


def _exits(run: Run, small: bool) -> Iterator[str]:
    shape = (4096, 4) if small else (196608, 1056)
    for how in ("bulk", "pieces", "tensor"):
        for waits in (True, False):
            wrong = 0
            for _ in range(1 if small else 3):
                found = run(exit_during_store(how, waits, *shape).program)["d"]
                right = np.arange(1, shape[1] + 1, dtype=np.uint32)[:, None]
                wrong += int((found.reshape(shape[1], -1) != right).sum())
            text = "waits for the read" if waits else "exits at once"
            yield f"exit during a store ({how}), {text}: {wrong} wrong words"


# -- whose products a wait covers ------------------------------------------------------------------


def lone_wait() -> Case:
    """Warps 1 to 3 begin their products late; warp 0 waits for its own, then clears B."""
    n, steps = 64, 8
    names = ", ".join(f"%d{k}" for k in range(n // 2))
    body = [
        "mov.u32 %r1, slots; mad.lo.u32 %r1, %thread, 16, %r1; mov.b32 %r2, 0x3c003c00;",
        "st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2}; fence.proxy.async.shared::cta; bar.sync 0;",
        "mov.u32 %r8, slots; shr.u32 %r8, %r8, 4; cvt.u64.u32 %w10, %r8;",
        f"add.u64 %w12, %w10, {wgmma.descriptor(n, 'none', False):#x};",
        *(f"mov.b32 %d{k}, 0;" for k in range(n // 2)),
        f"shr.u32 %r3, %thread, 5; mov.u64 %w1, %clock64; add.u64 %w2, %w1, {_SPIN};",
        "setp.eq.u32 %p0, %r3, 0; @%p0 bra BEGIN;",
        "LATE: mov.u64 %w3, %clock64; setp.lt.u64 %p1, %w3, %w2; @%p1 bra LATE;",
        "BEGIN: mov.u64 %w4, %clock64; wgmma.fence.sync.aligned;",
        *(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{names}}},"
            " {%r2, %r2, %r2, %r2}, %w12, 1, 1, 1, 0;"
            for _ in range(steps)
        ),
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;",
        "mov.u64 %w5, %clock64; @!%p0 bra DONE;",
        "mov.u32 %r4, slots; mad.lo.u32 %r4, %lane, 64, %r4;",
        "mov.b32 %r5, 0;",
        *(f"st.shared.v4.b32 [%r4+{16 * k}], {{%r5, %r5, %r5, %r5}};" for k in range(4)),
        "fence.proxy.async.shared::cta;",
        f"DONE: {INDEX} mul.wide.u32 %w60, %r60, 32; add.u64 %w60, %w60, %d;",
        "sub.u64 %w4, %w4, %w1; sub.u64 %w5, %w5, %w1; st.global.b64 [%w60], %w4;",
        "st.global.b64 [%w60+8], %w5; st.global.b32 [%w60+16], %d0;",
    ]
    made = case(
        "a wait of one warp",
        "wgmma",
        body,
        [output("d", "u8", 4 * THREADS)],
        grid=(1,),
        declared=f".shared .align 1024 .b8 slots[2048]; .reg .b32 %d<{n // 2}>;",
    )
    text = made.program.text.replace(".target sm_100a", ".target sm_90a")
    return dataclasses.replace(made, program=dataclasses.replace(made.program, text=text))


def _waits(run: Run, small: bool) -> Iterator[str]:
    rows = run(lone_wait().program)["d"].reshape(4, 32, 4)[:, 0]
    for warp, (begin, end, word, _) in enumerate(rows.tolist()):
        value = np.array([word & 0xFFFFFFFF], np.uint32).view(np.float32)[0]
        yield (
            f"wait of one warp: warp {warp} issues at {begin}, its wait ends at {end}, D {value:g}"
            " (128: B as it was; 0: cleared)"
        )


# -- who sees what --------------------------------------------------------------------------------


def one_lane_waits(rounds: int, synchronises: bool) -> Case:
    """A bulk copy a round; lane 0 of each warp waits, and all lanes read."""
    body = [
        INDEX,
        "setp.eq.u32 %p0, %thread, 0; mov.u32 %r20, bar; mov.u32 %r21, slots;",
        "@%p0 mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster; bar.sync 0;",
        "mov.b32 %r1, 0; mov.b32 %r2, 0; setp.eq.u32 %p2, %lane, 0;",
        "mad.lo.u32 %r5, %thread, 4, %r21; mul.wide.u32 %w5, %thread, 4; add.u64 %w6, %a, %w5;",
        "ROUND: mul.wide.u32 %w1, %r1, 512; add.u64 %w2, %a, %w1; @!%p0 bra FOLLOW;",
        "mbarrier.arrive.expect_tx.shared.b64 %w9, [%r20], 512;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r21], [%w2], 512,"
        " [%r20];",
        "FOLLOW: and.b32 %r3, %r1, 1; @!%p2 bra READ;",
        "WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r20], %r3; @!%p1 bra WAIT;",
        "READ: bar.warp.sync 0xffffffff;" if synchronises else "READ:",
        "ld.shared.b32 %r4, [%r5]; add.u64 %w3, %w6, %w1; ld.global.b32 %r6, [%w3];",
        "setp.ne.u32 %p3, %r4, %r6; @%p3 add.u32 %r2, %r2, 1; bar.sync 0;",
        f"add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, {rounds}; @%p1 bra ROUND;",
        "add.u64 %w7, %d, %w60; st.global.b32 [%w7], %r2;",
    ]
    return case(
        f"one lane waits, {synchronises}",
        "mbarrier",
        body,
        [random_buffer("a", "one lane", "u4", 128 * rounds), output("d", "u4", 64 * THREADS)],
        grid=(64,),
        declared=".shared .align 128 .b8 slots[512]; .shared .align 8 .b64 bar;",
    )


def _lanes(run: Run, small: bool) -> Iterator[str]:
    rounds = 4 if small else 4096
    for synchronises in (True, False):
        wrong = int(run(one_lane_waits(rounds, synchronises).program)["d"].sum())
        text = "and bar.warp.sync" if synchronises else "and nothing behind it"
        yield f"lane 0 waits for a bulk copy, {text}: {wrong} old words in {rounds} rounds"


def stores_in_order(rounds: int, first: str, second: str) -> Case:
    """CTA 0 stores two numbers; CTA 1 polls the second one and looks at the first."""
    body = [
        "setp.eq.u32 %p0, %thread, 0; mov.u32 %r20, bar; mov.u32 %r21, slots; mov.b32 %r1, 0;",
        "@%p0 mbarrier.init.shared.b64 [%r20], 1; fence.mbarrier_init.release.cluster;",
        "mad.lo.u32 %r5, %thread, 4, %r21; st.shared.b32 [%r5], %r1; fence.acq_rel.cluster;",
        "barrier.cluster.arrive; barrier.cluster.wait; xor.b32 %r3, %rank, 1; @!%p0 bra END;",
        "mapa.shared::cluster.u32 %r22, %r21, %r3; mapa.shared::cluster.u32 %r23, %r20, %r3;",
        "setp.eq.u32 %p1, %rank, 1; mov.b32 %r2, 0; mov.b32 %r1, 1; @%p1 bra POLL;",
        f"SEND: {first} {second}",
        "ACK: ld.volatile.shared.b32 %r4, [%r21+256]; setp.ne.u32 %p2, %r4, %r1; @%p2 bra ACK;",
        f"add.u32 %r1, %r1, 1; setp.le.u32 %p2, %r1, {rounds}; @%p2 bra SEND; bra END;",
        "POLL: ld.volatile.shared.b32 %r4, [%r21+128]; setp.ne.u32 %p2, %r4, %r1; @%p2 bra POLL;",
        "ld.volatile.shared.b32 %r6, [%r21]; setp.ne.u32 %p3, %r6, %r1; @%p3 add.u32 %r2, %r2, 1;",
        "st.relaxed.cluster.shared::cluster.b32 [%r22+256], %r1;",
        f"add.u32 %r1, %r1, 1; setp.le.u32 %p2, %r1, {rounds}; @%p2 bra POLL;",
        "st.global.b32 [%d], %r2;",
        "END: barrier.cluster.arrive; barrier.cluster.wait;",
    ]
    return case(
        f"stores in order {first} {second}",
        "mapa",
        body,
        [output("d", "u4", 4)],
        grid=(2,),
        cluster=(2,),
        declared=".shared .align 128 .b8 slots[512]; .shared .align 8 .b64 bar;",
    )


_TX = "shared::cluster.mbarrier::complete_tx::bytes"
_STORES = {
    "st.async": f"st.async.{_TX}.b32 [%r22{{0}}], %r1, [%r23];",
    "st.async of 16 bytes": f"st.async.{_TX}.v4.b32"
    " [%r22{0}], {{%r1, %r1, %r1, %r1}}, [%r23];",
    "red.async": f"red.async.relaxed.cluster.{_TX}.max.u32 [%r22{{0}}], %r1, [%r23];",
    "st": "st.relaxed.cluster.shared::cluster.b32 [%r22{0}], %r1;",
}
_ORDERS = (
    ("st.async", "st.async"),
    ("st.async of 16 bytes", "st.async"),
    ("red.async", "st.async"),
    ("st.async", "st"),
    ("st", "st.async"),
)


def _orders(run: Run, small: bool) -> Iterator[str]:
    rounds = 4 if small else 20_000
    for first, second in _ORDERS:
        texts = _STORES[first].format(""), _STORES[second].format("+128")
        stale = int(run(stores_in_order(rounds, *texts).program)["d"][0])
        yield f"{first}, then {second}: overtaken {stale} times of {rounds}"


def _policies(run: Run, small: bool) -> Iterator[str]:
    """The words that createpolicy makes of these."""
    chosen = [text for text in POLICIES if text.startswith("createpolicy.fractional")]
    body = ["add.u64 %w61, %d, 0;"]
    for k, text in enumerate(chosen):
        body.append(f"{text}; st.global.b64 [%w61+{8 * k}], %w40;")
    made = case(
        "words of policies", "createpolicy", body, [output("d", "u8", len(chosen))], grid=(1,)
    )
    for text, word in zip(chosen, run(made.program)["d"].tolist(), strict=True):
        yield f"{text.removeprefix('createpolicy.')}: {word:#018x}"


# -- zeros that a sparse A does not store ----------------------------------------------------------


def _zeros(run: Run, small: bool) -> Iterator[str]:
    """Multiply a NaN in B with numbers of A, or with zeros that are not stored. In CUTLASS's
    kernels, metadata of zeros alone may be 0b0000."""
    for form in ("f32.f16.f16", "f32.bf16.bf16"):
        variant = wgmma_sparse.Sparse(form, 8)
        made, stored = wgmma_sparse.with_a_nan(variant)
        found = np.isnan(run(made)["out"].view(np.float32)).reshape(wgmma.GRID, -1, 128)
        rows = int(found[:, [0, 2], ::4].sum())
        yield (
            f"{form}: a NaN in B reaches {rows} of {wgmma.GRID * wgmma.M} rows of D, of which"
            f" {stored} store an element for it"
        )
        empty = run(wgmma_sparse.without_metadata(variant))["out"]
        yield f"{form}: zeros with metadata 0b0000 give {int(np.count_nonzero(empty))} numbers"


QUESTIONS: tuple[Callable[[Run, bool], Iterator[str]], ...] = (
    _policies,
    _lanes,
    _orders,
    _exits,
    _zeros,
    _waits,  # last: nobody knows whether warps may come so late
)


def answers(run: Run, *, small: bool = False) -> Iterator[str]:
    """A sentence each. small: problems that an emulator can solve."""
    for question in QUESTIONS:
        try:
            yield from question(run, small)
        except Exception as failure:  # noqa: BLE001  the next question is still of interest
            yield f"{question.__name__.strip('_')}: no answer: {type(failure).__name__}: {failure}"
