"""Tensor memory between warps: tcgen05.st, tcgen05.ld, allocation."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_ALLOCATED = f"""warp 0: {parts.alloc()}
    all:
        bar.sync 1, 128;
        {parts.ADDRESS}"""
_ACCESSES = {"st": parts.WRITE, "ld": parts.READ}


def _in_turn(first: str, second: str) -> dict[str, Scenario]:
    """Accesses to the same columns by one warp, and by two, which reach the same lanes."""
    one, other = _ACCESSES[first], _ACCESSES[second]
    use = "st.shared.b32 [%mine], %r1;" if first == "ld" else ""  # or nobody needs the load
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


SCENARIOS = {
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
