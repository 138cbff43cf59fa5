"""Lanes of one warp: bar.warp.sync orders their memory, and only of the lanes that it names.

What waits for lanes and says nothing of memory (PTX ISA, "vote.sync", "shfl.sync", "match.sync",
"redux.sync", "elect.sync"; CUDA C++ Programming Guide, "Warp Vote Functions" and those behind it)
does not take its place."""

from __future__ import annotations

from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

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

SCENARIOS = {
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
