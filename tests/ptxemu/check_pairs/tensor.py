"""tcgen05: operands of an MMA, its accumulator, two issuers, pairs of CTAs."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_LOAD = parts.bulk_load(nbytes=4352, into="a")
_ROW = "mov.u32 %r9, a; mad.lo.u32 %r9, %lane, 16, %r9;"  # 16 bytes of A per lane

SCENARIOS = {
    "ordinary stores to an MMA": Scenario(
        f"""// What the warps wrote is read in the async proxy.
        warp 0:
            {_ROW}
            st.shared.b32 [%r9], %zero; //:fill
            fence.proxy.async.shared::cta; //-fence
        all: bar.sync 1, 128; //-barrier
        warp 1: {parts.MULTIPLY}
        """,
        Lacks("fence", "fence.proxy.async", "fill", "mma"),
        Lacks("barrier", "barrier", "fill", "mma"),
    ),
    "a load to an MMA": Scenario(
        f"""// No proxy fence between two operations of the async proxy, only the wait.
        warp 0: {_LOAD}
        warp 1:
            wait full, 0; //-wait
            {parts.MULTIPLY}
        """,
        Lacks("wait", "mbarrier.try_wait", "load", "mma"),
    ),
    "a load into operands": Scenario(
        f"""// The stage is loaded again when the MMA that reads it has completed.
        warp 0:
            {parts.MMA} //:mma
            {parts.commit("free")} //~early: {parts.commit("late")}
        warp 1:
            wait free, 0; //-wait //-early
            {_LOAD}
            wait full, 0;
            //~early: wait late, 0;
        """,
        Lacks("wait early", "tcgen05.commit", "mma", "load"),
    ),
    "ordinary stores over operands": Scenario(
        f"""// The same with ordinary stores.
        warp 0: {parts.MULTIPLY}
        warp 1:
            wait done, 0; //-wait
            {_ROW}
            st.shared.b32 [%r9], %zero; //:fill
        """,
        Lacks("wait", "tcgen05.commit", "mma", "fill"),
    ),
    "an MMA to tcgen05.ld": Scenario(
        f"""// The accumulator is read behind the wait for the commit behind the MMA.
        warp 0:
            //~early: {parts.commit()}
            {parts.MMA} //:mma
            {parts.commit()} //-early
        warp 1:
            wait done, 0; //-wait
            {parts.READ_WHOLE}
        """,
        Lacks("wait early", "tcgen05.commit", "mma", "read"),
    ),
    "tcgen05.commit of whoever issued": Scenario(
        f"""// A commit is for the operations of its own thread, a barrier does not change that.
        warp 0:
            {parts.MMA} //:mma
            {parts.commit()} //-other
        all: bar.sync 1, 128;
        warp 1:
            //~other: {parts.commit()}
            wait done, 0;
            {parts.READ_WHOLE}
        """,
        Lacks("other", "tcgen05.commit", "mma", "read"),
    ),
    "handed on by a commit": Scenario(
        f"""// Warp 1 overwrites what warp 2 has read: it knows by the MMA that waited for warp 2.
        warp 2:
            ld.shared.b32 %r1, [%mine]; //:use
            mbarrier.arrive.shared.b64 _, [free];
        warp 0:
            wait free, 0; //-first
            {parts.MULTIPLY}
        warp 1:
            wait done, 0; //-second
            st.shared.b32 [%mine], %lane; //:fill
        """,
        Lacks("first second", "an mbarrier arrival and a wait", "fill", "use"),
    ),
    "MMAs of one thread": Scenario(
        f"""// They run in order: one commit behind the last is enough, one between is not.
        warp 0:
            {parts.MMA}
            //~between: {parts.commit()}
            {parts.MMA.replace(", 0;", ", 1;")} //:last
            {parts.commit()} //-between
        warp 1:
            wait done, 0;
            {parts.READ_WHOLE}
        """,
        Lacks("between", "tcgen05.commit", "last", "read"),
    ),
    "MMAs of two warps": Scenario(
        f"""// Two threads that issue to one accumulator have to wait for one another.
        warp 0:
            {parts.MMA} //:first
            {parts.commit("handed")}
        warp 1:
            wait handed, 0; //-wait
            {parts.MMA} //:second
            {parts.commit()}
        """,
        Lacks("wait", "tcgen05.commit", "first", "second"),
    ),
    "accumulators in turn": Scenario(
        f"""// The next MMA writes other columns than those that are being read.
        warp 0:
            {parts.MMA}
            {parts.commit("first")}
            add.u32 %r9, %tmem, 8; //~same: mov.u32 %r9, %tmem;
            {parts.MMA.replace("[%tmem]", "[%r9]")} //:mma
            {parts.commit()}
        warp 1:
            wait first, 0;
            {parts.READ_WHOLE}
        """,
        Lacks("same", "tcgen05.commit", "mma", "read"),
    ),
    "tcgen05.ld to an MMA": Scenario(
        f"""// The accumulator is overwritten when all has been read from it.
        warp 0:
            {parts.READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
            mbarrier.arrive.shared.b64 _, [free];
        warp 1:
            wait free, 0; //-wait
            {parts.MULTIPLY}
        """,
        Lacks("complete", "tcgen05.wait::ld", "read", "mma"),
        Lacks("wait", "an mbarrier arrival and a wait", "read", "mma"),
    ),
    "a store of what tcgen05.ld has read": Scenario(
        f"""// ptxas moves a use behind the arrival, but no store: CUTLASS, dense_gemm.py.
        warp 0:
            {parts.READ} //:read
            add.u32 %r5, %r1, 1;
            st.shared.b32 [%mine], %r5; //-used //-other
            //~other: st.shared.b32 [%mine], %zero;
            mbarrier.arrive.shared.b64 _, [free];
            st.shared.b32 [%mine], %r5;
        warp 1:
            wait free, 0;
            {parts.MULTIPLY}
        """,
        Lacks("used other", "tcgen05.wait::ld", "read", "mma"),
    ),
    "a signal between tcgen05.ld and a use": Scenario(
        f"""// Another agent's columns or data may be meant; without a wait the signal is early.
        warp 0:
            {parts.READ} //:read
            mbarrier.arrive.shared.b64 _, [free]; //:signal
            tcgen05.wait::ld.sync.aligned; //-unwaited
            st.shared.b32 [%mine], %r1;
        warp 1: wait free, 0;
        """,
        Lacks("unwaited", "tcgen05.wait::ld", "read", "signal", check="tmem"),
    ),
    "registers of tcgen05.ld that nobody needs": Scenario(
        f"""// FlashAttention-4, head_dim 256: loads of rows beyond the end are left open.
        warp 0:
            {parts.READ} //:read
            setp.eq.u32 %p1, %zero, 0;
            @%p1 bra BEYOND;
            add.u32 %r5, %r1, 1;
            st.shared.b32 [%mine], %r5;
            BEYOND:
            mbarrier.arrive.shared.b64 _, [free];
            //~needed: st.shared.b32 [%mine], %r1;
        warp 1:
            wait free, 0;
            {parts.MULTIPLY}
        """,
        Lacks("needed", "tcgen05.wait::ld", "read", "mma"),
    ),
    "operands in two CTAs": Scenario(
        f"""// CTA 0 issues for both: what CTA 1 wrote needs its fence, what it reads its wait.
        cta 1:
            {_ROW.replace("%lane", "%thread")}
            st.shared.b32 [%r9], %zero; //:fill
            fence.proxy.async; //-fence
        all:
            barrier.cluster.arrive.aligned; //~relaxed: barrier.cluster.arrive.relaxed.aligned;
            barrier.cluster.wait.aligned;
        cta 0 warp 0:
            mov.u32 %idesc, 0x10040010;
            mov.b16 %h0, 3;
            {parts.MMA.replace("::1", "::2")} //:mma
            {parts.COMMIT_TO_PAIR}
        cta 1 warp 1:
            wait.cluster done, 0; //-wait
            {parts.READ_WHOLE}
        """,
        Lacks("fence", "fence.proxy.async", "fill", "mma"),
        Lacks("relaxed", "release", "fill", "mma"),
        Lacks("wait", "tcgen05.commit", "mma", "read"),
    ),
    "mbarrier.init for tcgen05.commit": Scenario(
        f"""// The commit comes after the init; the fence is for the manual alone.
        warp 0:
            @%first mbarrier.init.shared.b64 [slot+8], 1; //:init
            @%first fence.mbarrier_init.release.cluster;
        all: bar.sync 1, 128; //-barrier
        warp 1:
            {parts.MMA}
            {parts.commit("slot+8")} //:commit
            {parts.commit()}
        """,
        Lacks("barrier", "a barrier after mbarrier.init", "init", "commit", "mbarrier"),
    ),
}


_ALLOCATED = f"""warp 0: {parts.alloc()}
    all:
        bar.sync 1, 128;
        {parts.ADDRESS}"""
_ACCESSES = {"st": parts.WRITE, "ld": parts.READ}


def _in_turn(first: str, second: str) -> dict[str, Scenario]:
    """Accesses to the same columns by one warp, and by two warps that reach the same lanes."""
    one, other = _ACCESSES[first], _ACCESSES[second]
    use = "st.shared.b32 [%mine], %r1;" if first == "ld" else ""  # else the load is unused
    complete = Lacks("complete", f"tcgen05.wait::{first}", first, second)
    alone = Scenario(
        f"""
        warp 0:
            {one} //:{first}
            tcgen05.wait::{first}.sync.aligned; //-complete
            {other} //:{second}
            tcgen05.wait::{second}.sync.aligned;
            {use}
        """,
        complete,
    )
    apart = Scenario(
        f"""
        warp 0:
            {one} //:{first}
            tcgen05.wait::{first}.sync.aligned; //-complete
            bar.sync 1, 64; //-barrier
            {use}
        warp 4:
            bar.sync 1, 64; //-barrier
            mov.u32 %lanes, %tmem;
            {other} //:{second}
            tcgen05.wait::{second}.sync.aligned;
        """,
        complete,
        Lacks("barrier", "a barrier", first, second),
    )
    name = f"tcgen05.{first} to tcgen05.{second}"
    return {name: alone, f"{name} of another warp": apart}


SCENARIOS |= {
    "tcgen05.st to an MMA": Scenario(
        f"""// A in tensor memory, as the P of attention.
        warp 0:
            add.u32 %lanes, %lanes, 16;
            {parts.WRITE} //:store
            tcgen05.wait::st.sync.aligned; //-complete
            mbarrier.arrive.shared.b64 _, [full];
        warp 1:
            wait full, 0; //-wait
            add.u32 %r9, %tmem, 16;
            {parts.MULTIPLY.replace("%a", "[%r9]")}
        """,
        Lacks("complete", "tcgen05.wait::st", "store", "mma"),
        Lacks("wait", "an mbarrier arrival and a wait", "store", "mma"),
    ),
    "an MMA to tcgen05.st": Scenario(
        f"""// A in tensor memory is written again when the MMA that reads it has completed.
        warp 0:
            add.u32 %r9, %tmem, 16;
            {parts.MULTIPLY.replace("%a", "[%r9]")}
        warp 1:
            wait done, 0; //-wait
            add.u32 %lanes, %lanes, 16;
            {parts.WRITE} //:store
            tcgen05.wait::st.sync.aligned;
        """,
        Lacks("wait", "tcgen05.commit", "mma", "store"),
    ),
    **_in_turn("st", "ld"),
    **_in_turn("ld", "st"),
    "tcgen05.alloc": Scenario(
        f"""// The address comes by shared memory, and the columns may be used once the others know.
        warp 0: {parts.alloc()}
        all:
            bar.sync 1, 128; //-address //-columns
            {parts.ADDRESS}
        warp 1:
            {parts.WRITE} //:store
            tcgen05.wait::st.sync.aligned;
        all: bar.sync 1, 128;
        warp 0: {parts.dealloc()}
        """,
        Lacks("address", "a barrier", "alloc", "address"),
        Lacks("columns", "the allocation", "alloc", "store"),
        bare=True,
    ),
    "tcgen05.dealloc": Scenario(
        f"""// Columns are given back when nobody uses them any more.
        {_ALLOCATED}
        warp 1:
            {parts.READ} //:read
            tcgen05.wait::ld.sync.aligned; //-complete
        all: bar.sync 1, 128; //-barrier
        warp 1: st.shared.b32 [%mine], %r1;
        warp 0: {parts.dealloc()} //:dealloc //-never
        """,
        Lacks("complete", "tcgen05.wait::ld", "read", "dealloc"),
        Lacks("barrier", "deallocat", "dealloc", "read"),
        Lacks("never", "tcgen05.dealloc", check="tmem"),
        bare=True,
    ),
    "tcgen05.dealloc under a load that is used later": Scenario(
        f"""// A load that is not complete yet matters if its registers are used.
        {_ALLOCATED}
        warp 1:
            {parts.READ} //:read
            setp.eq.u32 %p1, %lane, 32; //~used: setp.ne.u32 %p1, %lane, 32;
        all: bar.sync 1, 128;
        warp 0:
            {parts.dealloc()} //:dealloc
            bar.arrive 2, 64;
        warp 1:
            bar.sync 2, 64;
            @!%p1 bra DONE;
            st.shared.b32 [%mine], %r1;
            DONE:
        """,
        Lacks("used", "tcgen05.wait::ld", "read", "dealloc"),
        bare=True,
    ),
    "an MMA to tcgen05.dealloc": Scenario(
        f"""// The columns are in use until the MMA has completed.
        warp 0:
            {parts.alloc()}
            ld.shared.b32 %tmem, [slot];
            {parts.MULTIPLY}
            wait done, 0; //-wait
            {parts.dealloc()} //:dealloc
        """,
        Lacks("wait", "tcgen05.commit", "mma", "dealloc"),
        bare=True,
    ),
}
