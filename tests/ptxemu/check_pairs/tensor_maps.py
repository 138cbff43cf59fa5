"""Tensor maps in global memory that the kernel writes itself: a release and an acquire of the
tensormap proxy between the write and the instruction that uses the map."""

from __future__ import annotations

from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Lacks, Scenario

_PLACE = "add.u64 %d3, %output, 8192;"
_READ = """mad.wide.u32 %d1, %lane, 4, %from;
    ld.b32 %r1, [%d1];"""
_WRITE = f"""{_PLACE}
    {_READ}
    mad.wide.u32 %d2, %lane, 4, %d3;
    st.global.b32 [%d2], %r1; //:fill"""
_RELEASE = "fence.proxy.tensormap::generic.release.gpu;"
_ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%d3], 128;"
_OTHER = "fence.proxy.tensormap::generic.acquire.gpu [%output], 128;"
_LOAD = f"""{parts.expect()}
    {parts.TMA_LOAD.replace("%from", "%d3")} //:load
    wait full, 0;"""
_MISSING_RELEASE, _MISSING_ACQUIRE = "generic.release", "generic.acquire"
_EDIT = "@%first tensormap.replace.tile.global_address.{}.b1024.b64 [{}], %input; //:edit"
_SYNC = "bar.warp.sync 0xffffffff;"
_FLAG = "[%output+4096]"
_POLL = (
    f"{{ POLL: ld.acquire.gpu.global.b32 %r1, {_FLAG}; setp.ne.u32 %p1, %r1, 1; @%p1 bra POLL; }}"
)

SCENARIOS = {
    "a tensor map that its warp has stored": Scenario(
        f"""// Ordinary stores, then the warp itself loads through the map.
        warp 0:
            {_WRITE}
            {_RELEASE} //-release
            {_SYNC}
            {_ACQUIRE} //-acquire //~other: {_OTHER}
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "fill", "load"),
        Lacks("acquire other", _MISSING_ACQUIRE, "fill", "load"),
    ),
    "a tensor map that another warp has stored": Scenario(
        f"""// The acquire is behind the barrier, and another warp may make it.
        all: {_PLACE}
        warp 0:
            {_WRITE}
            {_RELEASE} //-release
        all: bar.sync 1, 96; //-barrier
        warp 1: {_ACQUIRE} //-acquire
        all: bar.sync 2, 96; //-second
        warp 2:
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "fill", "load"),
        Lacks("acquire barrier", _MISSING_ACQUIRE, "fill", "load"),
        Lacks("second", _MISSING_ACQUIRE, "fill", "load"),
        barriers={"full": 1},
    ),
    "a tensor map edited in global memory": Scenario(
        f"""// tensormap.replace by one lane; the map was complete before.
        warp 0:
            {_WRITE}
            {_SYNC}
            {_EDIT.format("global", "%d3")}
            {_RELEASE} //-release
            {_SYNC}
            {_ACQUIRE} //-acquire
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "edit", "load"),
        Lacks("acquire", _MISSING_ACQUIRE, "edit", "load"),
    ),
    "a tensor map edited in shared memory": Scenario(
        f"""// tensormap.cp_fenceproxy copies it to global memory, and is a release.
        warp 0:
            {_PLACE}
            {_READ}
            st.shared.b32 [%mine], %r1;
            {_SYNC} //-first
            mov.u32 %r2, tile;
            {_EDIT.format("shared::cta", "%r2")}
            {_SYNC} //-sync
            tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned\
 [%d3], [%r2], 128; //:copy
            {_ACQUIRE} //-acquire
            {_LOAD.replace("[tile]", "[spare]")}
        """,
        Lacks("acquire", _MISSING_ACQUIRE, "copy", "load"),
        Lacks("sync", "bar.warp.sync", "edit", "copy"),
    ),
    "a tensor map of another CTA": Scenario(
        f"""// Released by a flag in global memory, acquired behind it.
        all: {_PLACE}
        cta 0:
            {_WRITE}
            {_RELEASE} //-release
            {_SYNC}
            @%first st.release.gpu.global.b32 {_FLAG}, 1;
        cta 1:
            {_POLL}
            {_ACQUIRE} //-acquire
            {_LOAD}
        """,
        Lacks("release", _MISSING_RELEASE, "fill", "load"),
        Lacks("acquire", _MISSING_ACQUIRE, "fill", "load"),
    ),
}
