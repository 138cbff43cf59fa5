"""Pieces of PTX that many pairs share. In a piece of several lines, the important one is the last,
or has a name: `load`, `read`, `mma`, `alloc`, `address`.
"""

from __future__ import annotations

# A tile is 128 bytes: one row of the tensor, which the lanes of a warp reach at %mine.
TMA_LOAD = (
    "@%first cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    " [tile], [%from, {%zero, %zero}], [full];"
)
TMA_STORE = (
    "@%first cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    " [%to, {%zero, %zero}], [tile];"
)
BULK_LOAD = (
    "@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [tile], [%input], 128, [full];"
)
BULK_STORE = "@%first cp.async.bulk.global.shared::cta.bulk_group [%output], [tile], 128;"
BULK_REDUCTION = BULK_STORE.replace("cp.", "cp.reduce.").replace("_group", "_group.add.u32")
DRAIN = """cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;"""
# The tile is filled, and the async proxy may read it once a lane of this warp signals.
FILL_FOR_ASYNC = """st.shared.b32 [%mine], %lane;
    fence.proxy.async.shared::cta;
    bar.warp.sync 0xffffffff;"""


def expect(nbytes: int = 128, barrier: str = "full") -> str:
    return f"@%first mbarrier.arrive.expect_tx.shared.b64 _, [{barrier}], {nbytes};"


def tma_load(into: str = "tile", barrier: str = "full") -> str:
    """A TMA load, with the expectation of its bytes."""
    load = TMA_LOAD.replace("[tile]", f"[{into}]").replace("full", barrier)
    return f"{expect(barrier=barrier)}\n{load} //:load"


def bulk_load(source: str = "%input", nbytes: int = 128, into: str = "tile") -> str:
    """A bulk load, with the expectation of its bytes."""
    load = BULK_LOAD.replace("%input", source).replace("128", f"{nbytes}").replace("tile", into)
    return f"{expect(nbytes)}\n{load} //:load"


def multicast(load: str) -> str:
    """The load into both CTAs of a cluster."""
    masked = load.replace("bytes ", "bytes.multicast::cluster ").replace("[full];", "[full], %h0;")
    return f"mov.b16 %h0, 3;\n{masked} //:load"


MEET = """barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;"""


def arrive_at_peer(barrier: str = "full", semantics: str = "release.cluster") -> str:
    return f"""mapa.shared::cluster.u32 %r2, {barrier}, %peer;
    mbarrier.arrive.{semantics}.shared::cluster.b64 _, [%r2];"""


def copy_to_peer(into: str, source: str = "tile") -> str:
    """A copy to the peer, which signals the peer's `full`."""
    return f"""mapa.shared::cluster.u32 %r1, {into}, %peer;
    mapa.shared::cluster.u32 %r2, full, %peer;
    @%first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes\
 [%r1], [{source}], 128, [%r2];"""


def alloc(ctas: int = 1) -> str:
    """Allocate 32 columns of tensor memory."""
    return f"""tcgen05.alloc.cta_group::{ctas}.sync.aligned.shared::cta.b32 [slot], 32; //:alloc
    tcgen05.relinquish_alloc_permit.cta_group::{ctas}.sync.aligned;"""


def dealloc(ctas: int = 1) -> str:
    return f"tcgen05.dealloc.cta_group::{ctas}.sync.aligned.b32 %tmem, 32;"


ADDRESS = """ld.shared.b32 %tmem, [slot]; //:address
    shl.b32 %lanes, %warp, 21;
    add.u32 %lanes, %lanes, %tmem;"""
# Tensor memory: 4 columns in the lanes of a warp, and an MMA that accumulates in them.
WRITE = "tcgen05.st.sync.aligned.32x32b.x4.b32 [%lanes], {%lane, %lane, %lane, %lane};"
READ = "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2, %r3, %r4}, [%lanes];"
READ_WHOLE = f"{READ} //:read\ntcgen05.wait::ld.sync.aligned;"
MMA = "@%first tcgen05.mma.cta_group::1.kind::f16 [%tmem], %a, %b, %idesc, 0;"
COMMIT_TO_PAIR = (
    "@%first tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
    ".multicast::cluster.b64 [done], %h0;"
)


def commit(barrier: str = "done") -> str:
    return (
        "@%first tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"
        f" [{barrier}];"
    )


MULTIPLY = f"{MMA} //:mma\n{commit()}"
