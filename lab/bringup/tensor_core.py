"""Parts shared by the generated tensor core programs: one or two CTAs of four warps, shared
memory filled from a buffer, and tensor memory allocated and released.

Registers: %thread, %rank (of the CTA in its cluster), %smem, %tmem (the address of the allocation),
%quarter (that of the lanes that a warp reaches), %leader (the thread that issues), %never, %always;
%r0.. (32 bits), %w0.. (64 bits), %p0.., %h0.. are free. Every parameter is a pointer.
"""

from __future__ import annotations

from collections.abc import Iterator

SHARED = ".extern .shared .align 1024 .b8 dynamic[];\n"
THREADS = 128
RESERVED = 64  # bytes behind those that are filled: an mbarrier, and the address of the allocation
BOTH = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
_TOGETHER = 8  # columns that are moved by one instruction

_REGISTERS = (
    ".reg .pred %p<8>, %leader, %never, %always; .reg .b16 %h<4>; .reg .b64 %w<32>;",
    ".reg .b32 %r<300>, %thread, %rank, %smem, %tmem, %quarter, %barrier, %warp;",
    "mov.u32 %thread, %tid.x; mov.u32 %rank, %cluster_ctarank; mov.u32 %smem, dynamic;",
    "shr.u32 %warp, %thread, 5; or.b32 %r0, %thread, %rank; setp.eq.u32 %leader, %r0, 0;",
    "setp.ne.u32 %never, %thread, %thread; setp.eq.u32 %always, %thread, %thread;",
)


def prologue(nbytes: int) -> Iterator[str]:
    """nbytes: of shared memory in front of what is reserved."""
    yield from _REGISTERS
    yield f"add.u32 %barrier, %smem, {nbytes};"
    yield "setp.eq.u32 %p0, %thread, 0; @%p0 mbarrier.init.shared.b64 [%barrier], 1;"
    yield "@%p0 fence.mbarrier_init.release.cluster;"


def begin(ctas: int, nbytes: int, columns: int) -> Iterator[str]:
    """Yield the prologue and allocate tensor memory, for a pair once both CTAs have arrived."""
    yield from prologue(nbytes)
    if ctas > 1:
        yield BOTH
    yield "setp.ne.u32 %p1, %warp, 0; @%p1 bra ALLOCATED;"
    yield f"tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [%barrier+16], {columns};"
    yield f"tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;"
    yield "ALLOCATED:"
    yield from meet(ctas)
    yield "ld.shared.b32 %tmem, [%barrier+16]; shl.b32 %quarter, %warp, 21;"
    yield "add.u32 %quarter, %quarter, %tmem;"


def meet(ctas: int) -> Iterator[str]:
    """All threads of all CTAs, with what they have written."""
    yield "tcgen05.wait::st.sync.aligned; fence.proxy.async.shared::cta;"
    yield "tcgen05.fence::before_thread_sync;"
    yield BOTH if ctas > 1 else "bar.sync 0;"
    yield "tcgen05.fence::after_thread_sync;"


def fill(name: str, nbytes: int) -> Iterator[str]:
    """Shared memory with the CTA's part of a buffer."""
    return _moved(
        "FILL", name, nbytes, "ld.global.v4.b32 %s, [%%w1]", "st.shared.v4.b32 [%%r1], %s"
    )


def clear(nbytes: int) -> Iterator[str]:
    """Shared memory: zeros."""
    yield "mov.b32 %r2, 0; shl.b32 %r0, %thread, 4;"
    yield f"CLEAR: add.u32 %r1, %smem, %r0; setp.lt.u32 %p2, %r0, {nbytes};"
    yield "@%p2 st.shared.v4.b32 [%r1], {%r2, %r2, %r2, %r2};"
    yield f"add.u32 %r0, %r0, {16 * THREADS}; @%p2 bra CLEAR;"


def drain(name: str, nbytes: int) -> Iterator[str]:
    """A buffer with shared memory, each CTA its part."""
    return _moved(
        "DRAIN", name, nbytes, "ld.shared.v4.b32 %s, [%%r1]", "st.global.v4.b32 [%%w1], %s"
    )


def _moved(label: str, name: str, nbytes: int, load: str, store: str) -> Iterator[str]:
    """%w1 is where a thread is in the CTA's part of a buffer, %r1 in shared memory."""
    words = "{%r2, %r3, %r4, %r5}"
    yield f"ld.param.u64 %w0, [{name}]; mul.wide.u32 %w1, %rank, {nbytes};"
    yield "add.u64 %w0, %w0, %w1; shl.b32 %r0, %thread, 4;"
    yield f"{label}: cvt.u64.u32 %w1, %r0; add.u64 %w1, %w0, %w1; add.u32 %r1, %smem, %r0;"
    yield f"setp.lt.u32 %p2, %r0, {nbytes};"
    yield f"@%p2 {load % words};"
    yield f"@%p2 {store % words};"
    yield f"add.u32 %r0, %r0, {16 * THREADS}; @%p2 bra {label};"


def zeros(columns: int) -> Iterator[str]:
    """The first columns of all lanes."""
    names = _names(10)
    yield from (f"mov.b32 {name}, 0;" for name in names)
    for column in range(0, columns, _TOGETHER):
        yield f"add.u32 %r0, %quarter, {column};"
        yield f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r0], {{{', '.join(names)}}};"


def lanes_from(name: str, column: int, words: int) -> Iterator[str]:
    """Columns from `column` on with a buffer: of each CTA and lane so many words."""
    yield from _row(name, words)
    for first in range(0, words, _TOGETHER):
        yield f"ld.global.v4.b32 {{{', '.join(_names(10)[:4])}}}, [%w2+{4 * first}];"
        yield f"ld.global.v4.b32 {{{', '.join(_names(10)[4:])}}}, [%w2+{4 * first + 16}];"
        yield f"add.u32 %r0, %quarter, {column + first};"
        yield f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r0], {{{', '.join(_names(10))}}};"


def lanes_to(name: str, column: int, words: int) -> Iterator[str]:
    """A buffer with the columns, in the same order."""
    yield from _row(name, words)
    for first in range(0, words, _TOGETHER):
        yield f"add.u32 %r0, %quarter, {column + first};"
        yield f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{', '.join(_names(10))}}}, [%r0];"
        yield "tcgen05.wait::ld.sync.aligned;"
        yield f"st.global.v4.b32 [%w2+{4 * first}], {{{', '.join(_names(10)[:4])}}};"
        yield f"st.global.v4.b32 [%w2+{4 * first + 16}], {{{', '.join(_names(10)[4:])}}};"


def _row(name: str, words: int) -> Iterator[str]:
    """%w2: where the words of a thread are."""
    yield f"ld.param.u64 %w0, [{name}]; mad.lo.u32 %r0, %rank, {THREADS}, %thread;"
    yield f"mad.wide.u32 %w2, %r0, {4 * words}, %w0;"


def _names(first: int) -> list[str]:
    return [f"%r{first + k}" for k in range(_TOGETHER)]


def commit(ctas: int) -> Iterator[str]:
    """Commit to the mbarrier of every CTA."""
    name = f"tcgen05.commit.cta_group::{ctas}.mbarrier::arrive::one.shared::cluster"
    yield "mov.b16 %h0, 3;"
    more = ".multicast::cluster.b64 [%barrier], %h0;" if ctas > 1 else ".b64 [%barrier];"
    yield name + more


def arrived(how: str = "parity.shared") -> Iterator[str]:
    """The first phase of the mbarrier."""
    yield f"AGAIN: mbarrier.try_wait.{how}.b64 %p3, [%barrier], 0; @!%p3 bra AGAIN;"


def wait() -> Iterator[str]:
    """Wait until the committed work of the tensor core is done."""
    yield from arrived()
    yield "tcgen05.fence::after_thread_sync;"


def end(ctas: int, columns: int) -> Iterator[str]:
    """Nobody reads tensor memory any more."""
    yield from meet(ctas)
    yield "@%p1 bra FREED;"
    yield f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 %tmem, {columns};"
    yield "FREED:"
