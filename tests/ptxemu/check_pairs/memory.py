"""Flags in memory, atomics, and global memory between CTAs and proxies."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario, handed_over

_FLAG = "[%output+4096]"
_GLOBAL = f"global.b32 {_FLAG}"
_NEXT = "global.b32 [%output+8192]"
_SHARED = "shared.b32 [slot]"


def _set(semantics: str = "release.gpu", flag: str = _GLOBAL) -> str:
    return f"@%first st.{semantics}.{flag}, 1;"


def _poll(semantics: str = "acquire.gpu", flag: str = _GLOBAL, value: int = 1) -> str:
    """Load until the value appears."""
    load = f"ld.{semantics}.{flag}".replace(" ", " %r1, ")
    return f"{{ POLL: {load}; setp.ne.u32 %p1, %r1, {value}; @%p1 bra POLL; }}"


def _lock(semantics: str) -> str:
    """Try to take a lock: %p1 is whether that failed."""
    take = f"atom.{semantics}.gpu.global.cas.b32 %r1, {_FLAG}, 0, 1;"
    return f"{take} setp.ne.u32 %p1, %r1, 0;"


def _count(semantics: str = "release") -> str:
    return f"@%first red.{semantics}.gpu.global.add.u32 {_FLAG}, 1;"


SCENARIOS = {
    "what its reader overwrites, as somebody else does": Scenario(
        """// Two writes of the same are no race; the read before one of them and the other are.
        all: mov.u32 %r2, 7;
        warp 0:
            ld.global.b32 %r1, [%out]; //:use
            st.global.b32 [%out], %r2;
        all: bar.sync 1, 64; //-barrier
        warp 1: st.global.b32 [%out], %r2; //:refill
        """,
        Lacks("barrier", "barrier", "use", "refill"),
    ),
    "what two atomics add to": Scenario(
        """// They are no race with one another; each is one with what they add to.
        warp 0: @%first st.shared.b32 [slot], 7; //:fill
        all: bar.sync 1, 64; //-barrier
        warp 0: @%first red.shared.add.u32 [slot], 1;
        warp 1: @%first red.shared.add.u32 [slot], 1; //:add
        """,
        Lacks("barrier", "barrier", "fill", "add"),
    ),
    "what two CTAs add to": Scenario(
        f"""// The same in global memory.
        cta 0:
            @%first st.global.b32 [%output], 7; //:fill
            {_set()}
            @%first red.global.add.u32 [%output], 1;
        cta 1:
            {_poll()} //-poll
            @%first red.global.add.u32 [%output], 1; //:add
        """,
        Lacks("poll", "release by the other", "fill", "add"),
    ),
    "global memory within a CTA": handed_over(
        Lacks("barrier", "barrier", "fill", "use"),
        signal="bar.sync 1, 64; //-barrier",
        wait="bar.sync 1, 64; //-barrier",
        fill="st.global.b32 [%out], %lane; //:fill",
        use="ld.global.b32 %r1, [%out]; //:use",
    ),
    "a flag": Scenario(
        f"""// CTA 0 releases a flag, CTA 1 polls it with an acquire.
        cta 0:
            st.global.b32 [%out], %lane; //:fill
            bar.warp.sync 0xffffffff;
            {_set()} //~release: {_set("relaxed.gpu")} //~narrow: {_set("release.cta")}
        cta 1:
            {_poll()} //-poll //~acquire: {_poll("relaxed.gpu")} //~near: {_poll("acquire.cta")}
            ld.global.b32 %r2, [%out]; //:use
        """,
        Lacks("release narrow", "a release", "fill", "use"),
        Lacks("acquire near poll", "an acquire", "fill", "use"),
    ),
    "a flag for the whole CTA": Scenario(
        f"""// One warp stores, another releases; one polls, another reads.
        cta 0 warp 0: st.global.b32 [%out], %lane; //:fill
        cta 0: bar.sync 1, 64; //-before
        cta 0 warp 1: {_set()}
        cta 1 warp 0: {_poll()}
        cta 1: bar.sync 1, 64; //-behind
        cta 1 warp 1: ld.global.b32 %r2, [%out]; //:use
        """,
        Lacks("before", "a release", "fill", "use"),
        Lacks("behind", "an acquire", "fill", "use"),
    ),
    "a flag passed on": Scenario(
        f"""// CTA 1 waits for CTA 0 and tells CTA 2.
        cta 0:
            st.global.b32 [%out], %lane; //:fill
            bar.warp.sync 0xffffffff;
            {_set()}
        cta 1:
            {_poll()} //~first: {_poll("relaxed.gpu")}
            {_set(flag=_NEXT)}
        cta 2:
            {_poll(flag=_NEXT)} //~second: {_poll("relaxed.gpu", _NEXT)}
            ld.global.b32 %r2, [%out]; //:use
        """,
        Lacks("first second", "an acquire", "fill", "use"),
    ),
    "a flag with fences": Scenario(
        f"""// Relaxed accesses, and a fence on either side.
        cta 0:
            st.global.b32 [%out], %lane; //:fill
            fence.acq_rel.gpu; //-before
            bar.warp.sync 0xffffffff;
            {_set("relaxed.gpu")}
        cta 1:
            {_poll("relaxed.gpu")}
            fence.acq_rel.gpu; //-behind
            ld.global.b32 %r2, [%out]; //:use
        """,
        Lacks("before", "a release", "fill", "use"),
        Lacks("behind", "an acquire", "fill", "use"),
    ),
    "a flag between barriers": Scenario(
        f"""// PyTorch, Reduce.cuh: all threads have the fences, one thread has the flag.
        cta 0:
            mad.wide.u32 %d1, %warp, 128, %out;
            st.global.b32 [%d1], %lane; //:fill
            fence.acq_rel.gpu; //-before
            bar.sync 1, 64; //-between
        cta 0 warp 0: {_set("relaxed.gpu")}
        cta 1 warp 0: {_poll("relaxed.gpu")}
        cta 1:
            bar.sync 1, 64;
            fence.acq_rel.gpu; //-behind
        cta 1 warp 1: ld.global.b32 %r2, [%out+128]; //:use
        """,
        Lacks("before", "a release of the flag", "fill", "use"),
        Lacks("between", "a barrier of the other CTA", "fill", "use"),
        Lacks("behind", "an acquire of the flag", "fill", "use"),
    ),
    "a lock": Scenario(
        f"""// Two CTAs add to a word under a lock.
        all:
            setp.ne.u32 %p2, %lane, 0;
            @%p2 bra DONE;
            LOCK: {_lock("acquire")} //~take: LOCK: {_lock("relaxed")}
            @%p1 bra LOCK;
            ld.global.b32 %r2, [%output]; //:use
            add.u32 %r2, %r2, 1;
            st.global.b32 [%output], %r2; //:fill
            st.release.{_GLOBAL}, 0; //~give: st.relaxed.gpu.{_GLOBAL}, 0;
            DONE:
        """,
        Lacks("take", "an acquire of the flag", "fill", "use"),
        Lacks("give", "a release of the flag", "fill", "use"),
        grid=2,
    ),
    "a lock with fences": Scenario(
        f"""// The same with relaxed atomics, and the fences of __threadfence().
        all:
            setp.ne.u32 %p2, %lane, 0;
            @%p2 bra DONE;
            LOCK: {_lock("relaxed")}
            @%p1 bra LOCK;
            fence.acq_rel.gpu; //-take
            ld.global.b32 %r2, [%output]; //:use
            add.u32 %r2, %r2, 1;
            st.global.b32 [%output], %r2; //:fill
            fence.acq_rel.gpu; //-give
            atom.relaxed.gpu.global.exch.b32 %r2, {_FLAG}, 0;
            DONE:
        """,
        Lacks("take", "an acquire of the flag", "fill", "use"),
        Lacks("give", "a release of the flag", "fill", "use"),
        grid=2,
    ),
    "a volatile flag": Scenario(
        f"""// As relaxed accesses.
        cta 0:
            st.global.b32 [%out], %lane; //:fill
            fence.acq_rel.gpu; //-before
            bar.warp.sync 0xffffffff;
            @%first st.volatile.{_GLOBAL}, 1;
        cta 1:
            {_poll("volatile")}
            fence.acq_rel.gpu; //-behind
            ld.global.b32 %r2, [%out]; //:use
        """,
        Lacks("before", "a release of the flag", "fill", "use"),
        Lacks("behind", "an acquire of the flag", "fill", "use"),
    ),
    "a flag of the wrong scope": Scenario(
        f"""// Both sides name the CTA.
        cta 0:
            st.global.b32 [%out], %lane; //:fill
            bar.warp.sync 0xffffffff;
            {_set()} //~narrow: {_set("release.cta")}
        cta 1:
            {_poll()} //~narrow: {_poll("acquire.cta")}
            ld.global.b32 %r2, [%out]; //:use
        """,
        Lacks("narrow", "a release of the flag and an acquire of it", "fill", "use"),
    ),
    "a counter": Scenario(
        f"""// Whoever comes last, by an atomic, reads what the others wrote.
        all:
            mad.wide.u32 %d1, %rank, 128, %out;
            st.global.b32 [%d1], %lane; //:fill
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, 0;
            //~relaxed: @%first atom.relaxed.gpu.global.add.u32 %r1, {_FLAG}, 1;
            @%first atom.acq_rel.gpu.global.add.u32 %r1, {_FLAG}, 1; //-relaxed
            shfl.sync.idx.b32 %r1, %r1, 0, 31, 0xffffffff;
            setp.ne.u32 %p1, %r1, 1;
            @%p1 bra DONE;
            ld.global.b32 %r2, [%out]; //:use
            ld.global.b32 %r2, [%out+128]; //:other
            DONE:
        """,
        Lacks("relaxed", "a release", "fill", "use"),
        grid=2,
    ),
    "red and a poll": Scenario(
        f"""// Several arrive by red.release at one count.
        warp 0:
            st.global.b32 [%out], %lane; //:fill
            bar.warp.sync 0xffffffff;
            {_count()} //~relaxed: {_count("relaxed")}
        warp 1:
            st.global.b32 [%out+128], %lane;
            bar.warp.sync 0xffffffff;
            {_count()}
        warp 2:
            {_poll(value=2)}
            ld.global.b32 %r2, [%out]; //:use
            ld.global.b32 %r2, [%out+128];
        """,
        Lacks("relaxed", "release", "fill", "use"),
    ),
    "a flag in shared memory": Scenario(
        f"""// The same within a CTA.
        warp 0: @%first st.shared.b32 [slot], %zero;
        all: bar.sync 0;
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            bar.warp.sync 0xffffffff;
            {_set("release.cta", _SHARED)} //~release: {_set("relaxed.cta", _SHARED)}
        warp 1:
            {_poll("acquire.cta", _SHARED)} //~acquire: {_poll("relaxed.cta", _SHARED)}
            ld.shared.b32 %r2, [%mine]; //:use
        """,
        Lacks("release", "release", "fill", "use"),
        Lacks("acquire", "acquire", "fill", "use"),
    ),
    "atomics in shared memory": Scenario(
        """// Atomics do not race with one another, with an ordinary access they do.
        warp 0: st.shared.b32 [%mine], %zero;
        all: bar.sync 0;
        warp 1:
            atom.shared.add.u32 %r1, [%mine], 1;
            ld.shared.b32 %r1, [%mine];
        all: bar.sync 0;
        warp 0: atom.shared.add.u32 %r1, [%mine], 1; //:add
        warp 1:
            //~plain: st.shared.b32 [%mine], %zero; //:plain
            atom.shared.add.u32 %r1, [%mine], 1; //-plain
        """,
        Lacks("plain", "barrier", "add", "plain"),
    ),
    "atomics in global memory": Scenario(
        """// The same between CTAs.
        cta 0: red.global.add.u32 [%out], 1; //:add
        cta 1: red.global.add.u32 [%out], 1; //~plain: st.global.b32 [%out], %zero; //:plain
        """,
        Lacks("plain", "a release", "add", "plain"),
    ),
    "bulk store to an ordinary load": Scenario(
        f"""// wait_group without .read: then the writes are done.
        all:
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0; //~read: cp.async.bulk.wait_group.read 0;
            bar.warp.sync 0xffffffff;
            ld.global.b32 %r1, [%out]; //:use
        """,
        Lacks("read", "not .read", "store", "use"),
    ),
    "bulk store to another CTA": Scenario(
        f"""// The flag is released when the store is complete.
        cta 0:
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE} //:store
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0; //~read: cp.async.bulk.wait_group.read 0;
            {_set()}
        cta 1:
            {_poll()}
            ld.global.b32 %r2, [%out]; //:use
        """,
        Lacks("read", "not .read", "store", "use"),
    ),
    "ordinary stores to a bulk load": Scenario(
        f"""// The async proxy reads global memory that was written by the generic one.
        all:
            st.global.b32 [%out], %lane; //:fill
            fence.proxy.async.global; //-fence //~shared: fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            {parts.bulk_load("%output")}
            wait full, 0;
        """,
        Lacks("fence shared", "fence.proxy.async", "fill", "load"),
    ),
    "ordinary stores to a bulk load of another CTA": Scenario(
        f"""// The same between CTAs, the fence behind the acquire.
        cta 0:
            st.global.b32 [%out], %lane; //:fill
            bar.warp.sync 0xffffffff;
            {_set()}
        cta 1:
            {_poll()}
            fence.proxy.async.global; //-fence
            bar.warp.sync 0xffffffff;
            {parts.bulk_load("%output")}
            wait full, 0;
        """,
        Lacks("fence", "fence.proxy.async", "fill", "load"),
    ),
    "bulk store over a bulk store": Scenario(
        f"""// The second goes to the same place when the first is complete.
        all:
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE} //:first
            cp.async.bulk.commit_group;
            cp.async.bulk.wait_group 0; //~read: cp.async.bulk.wait_group.read 0;
            {parts.BULK_STORE} //:second
            {parts.DRAIN}
        """,
        Lacks("read", "not .read", "first", "second"),
    ),
    "bulk reductions": Scenario(
        f"""// Reductions do not race with one another, with a store they do.
        all: {parts.FILL_FOR_ASYNC}
        cta 0: {parts.BULK_REDUCTION} //:add
        cta 1: {parts.BULK_REDUCTION} //~plain: {parts.BULK_STORE} //:store
        all: {parts.DRAIN}
        """,
        Lacks("plain", "a release", "add", "store"),
    ),
    "griddepcontrol.wait": Scenario(
        """// What the launch before wrote, and what it read, is touched behind the wait.
        warp 0:
            griddepcontrol.launch_dependents;
            griddepcontrol.wait; //-wait //-late
            ld.global.b32 %r1, [%out]; //:use
            //~late: griddepcontrol.wait;
            st.global.b32 [%out], %lane; //:fill
        """,
        Lacks("wait late", "griddepcontrol.wait", later="use"),
        again=True,
        warps=2,
    ),
    "griddepcontrol.wait of another warp": Scenario(
        """// One warp waits; a barrier tells the others.
        warp 0: griddepcontrol.wait;
        all: bar.sync 1, 64; //-barrier
        warp 1: st.global.b32 [%out], %lane; //:fill
        """,
        Lacks("barrier", "griddepcontrol.wait", later="fill"),
        again=True,
    ),
    "neighbouring bytes": Scenario(
        """// Warps may write neighbouring bytes without a barrier, but not the same.
        all:
            add.u32 %mine, %mine, %warp; //~same: add.u32 %mine, %mine, 0;
            st.shared.b8 [%mine], %lane; //:fill
        """,
        Lacks("same", "barrier", "fill", "fill"),
        warps=2,
    ),
}


# Lanes of one warp: bar.warp.sync orders memory between the lanes that it names, and no others.
#
# Instructions that wait for lanes without a memory guarantee do not replace it (PTX ISA,
# "vote.sync", "shfl.sync", "match.sync", "redux.sync", "elect.sync"; CUDA C++ Programming Guide,
# "Warp Vote Functions" and the sections after it).

_ALL = "0xffffffff"
_MEET = f"bar.warp.sync {_ALL};"
_NO_FENCE = {
    "vote": f"vote.sync.any.pred %p1, %first, {_ALL};",
    "ballot": f"vote.sync.ballot.b32 %r3, %first, {_ALL};",
    "shuffle": f"shfl.sync.idx.b32 %r3, %lane, 0, 31, {_ALL};",
    "match": f"match.any.sync.b32 %r3, %lane, {_ALL};",
    "reduce": f"redux.sync.add.u32 %r3, %lane, {_ALL};",
    "elect": f"elect.sync %r3|%p1, {_ALL};",
}
_INSTEAD = " ".join(f"//~{name}: {text}" for name, text in _NO_FENCE.items())
_OTHERS = " ".join(_NO_FENCE)

SCENARIOS |= {
    "the mask of a shuffle": Scenario(
        f"""// Who executes it is in its mask.
        warp 0:
            {_NO_FENCE["shuffle"]} //~half: shfl.sync.idx.b32 %r3, %lane, 0, 31, 0xffff; //:one
            {_NO_FENCE["ballot"]} //~less: vote.sync.ballot.b32 %r3, %first, 0xfffffffe; //:two
            setp.lt.u32 %p2, %lane, 16;
            @%p2 redux.sync.add.u32 %r3, %lane, 0xffff;
        """,
        Lacks("half", "a mask of all lanes", later="one", check="lanes"),
        Lacks("less", "a mask of all lanes", later="two", check="lanes"),
    ),
    "a word of one lane": Scenario(
        f"""// One lane stores, all load.
        warp 0:
            @%first st.shared.b32 [slot], 7; //:fill
            {_MEET} //-sync {_INSTEAD}
            ld.shared.b32 %r2, [slot]; //:use
        """,
        Lacks(f"sync {_OTHERS}", "bar.warp.sync", "fill", "use"),
    ),
    "a word of one lane, behind a branch": Scenario(
        f"""// The same, and the warp diverges.
        warp 0:
            setp.ne.u32 %p2, %lane, 5;
            @%p2 bra PAST;
            st.shared.b32 [slot], 7; //:fill
            PAST:
            {_MEET} //-sync {_INSTEAD}
            setp.ne.u32 %p2, %lane, 9;
            @%p2 bra END;
            ld.shared.b32 %r2, [slot]; //:use
            END:
        """,
        Lacks(f"sync {_OTHERS}", "bar.warp.sync", "fill", "use"),
    ),
    "a word of global memory of one lane": Scenario(
        f"""// Global memory.
        warp 0:
            @%first st.global.b32 [%output], 7; //:fill
            {_MEET} //-sync //~vote: {_NO_FENCE["vote"]}
            ld.global.b32 %r2, [%output]; //:use
        """,
        Lacks("sync vote", "bar.warp.sync", "fill", "use"),
    ),
    "words of the next lanes": Scenario(
        f"""// Each lane reads what its neighbour wrote, then the neighbour writes again.
        warp 0:
            st.shared.b32 [%mine], %lane; //:fill
            {_MEET} //-before {_INSTEAD}
            ld.shared.b32 %r2, [%next]; //:use
            {_MEET} //-behind
            st.shared.b32 [%mine], %r2; //:refill
        """,
        Lacks(f"before {_OTHERS}", "bar.warp.sync", "fill", "use"),
        Lacks("behind", "bar.warp.sync", "use", "refill"),
    ),
    "one lane reads before all write": Scenario(
        f"""// Write after read.
        warp 0:
            st.shared.b32 [slot], %zero;
            @%first ld.shared.b32 %r2, [slot]; //:use
            {_MEET} //-sync
            st.shared.b32 [slot], 7; //:refill
        """,
        Lacks("sync", "bar.warp.sync", "use", "refill"),
    ),
    "some of the lanes meet": Scenario(
        f"""// Lanes 0 to 15 meet; the others are not ordered behind them.
        warp 0:
            setp.gt.u32 %p2, %lane, 15;
            @%p2 bra PAST;
            @%first st.shared.b32 [slot], 7; //:fill
            bar.warp.sync 0xffff;
            ld.shared.b32 %r2, [slot];
            PAST:
            {_MEET} //-sync
            @%p2 ld.shared.b32 %r2, [slot]; //:use
        """,
        Lacks("sync", "bar.warp.sync", "fill", "use"),
    ),
    "lanes meet that others do not know of": Scenario(
        """// Pairs of lanes meet, each with a mask of its own, as 0 and 1, 2 and 3; lane 1 was told
        // of what lane 0 did, and tells lane 2 when they meet.
        warp 0:
            @%first st.shared.b32 [slot], 7; //:fill
            and.b32 %r3, %lane, 30;
            shl.b32 %r3, 3, %r3;
            bar.warp.sync %r3;
            setp.eq.u32 %p1, %lane, 1;
            setp.eq.u32 %p2, %lane, 2;
            or.pred %p1, %p1, %p2;
            @%p1 bar.warp.sync 6; //-second
            @%p2 ld.shared.b32 %r2, [slot]; //:use
        """,
        Lacks("second", "bar.warp.sync", "fill", "use"),
    ),
    "what all lanes do at once": Scenario(
        """// A load of all lanes is behind it in each of them, and a store of some behind it too.
        warp 0:
            st.shared.b32 [slot], 7;
            @%first ld.shared.b32 %r2, [slot];
            ld.shared.b32 %r2, [slot];
            @%first st.shared.b32 [slot], 8; //:fill
            bar.warp.sync 0xffffffff; //-sync
            ld.shared.b32 %r2, [slot]; //:use
        """,
        Lacks("sync", "bar.warp.sync", "fill", "use"),
    ),
}


SCENARIOS |= {
    "bytes that nobody expects": Scenario(
        f"""// All bytes that come are expected at last.
        warp 0:
            {parts.BULK_LOAD}
            {parts.expect()} //-expect
        all: wait full, 0; //-expect
        """,
        Lacks("expect", "outstanding", check="mbarrier"),
        warps=2,
    ),
    "exit before a load has come": Scenario(
        f"""// Shared memory is there until all that was asked for has come.
        warp 0:
            fence.proxy.async.shared::cta;
            {parts.bulk_load()}
            wait full, 0; //-wait
        """,
        Lacks("wait", "a wait for it", later="load", check="exited"),
        bare=True,
    ),
    "exit before a multicast has come": Scenario(
        f"""// A CTA stays for what its peer loads into it, even if it reads nothing of that.
        all:
            {parts.expect()}
            {parts.MEET}
        cta 0:
            {parts.multicast(parts.BULK_LOAD)}
            wait full, 0;
        cta 1: wait.cluster full, 0; //-wait
        """,
        Lacks("wait", "a wait for it", later="load", check="exited"),
        bare=True,
    ),
    "one CTA group in a kernel": Scenario(
        f"""// What never runs counts, as ptxas refuses the text.
        warp 0:
            {parts.alloc()}
            {parts.dealloc().replace("%tmem", "0")}
            setp.lt.u32 %p2, %lane, 0;
            //~mixed: @%p2 tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; //:other
        """,
        Lacks("mixed", ".cta_group", later="other", check="cta_group"),
        bare=True,
    ),
    "mbarrier.init in flight": Scenario(
        """// A barrier is initialised again between phases, not in the middle of one.
        all:
            @%first mbarrier.arrive.shared.b64 _, [full];
            @%first mbarrier.arrive.shared.b64 _, [full]; //-whole
            @%first mbarrier.init.shared.b64 [full], 1; //:init
        """,
        Lacks("whole", "initialised again", later="init", check="mbarrier"),
        barriers={"full": 2},
    ),
}
