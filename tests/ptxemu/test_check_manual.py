"""Notes by the manual's text: said in strict mode where an instruction is missing that hardware
does without, never as an error, and not said otherwise."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu import Options
from ptxemu.machine.memory import Allocations
from ptxemu.report import Finding
from tests.ptxemu.check_pairs.scenario import Scenario, write
from workbench.conformance.ptx_program import aligned_copy

_SIGNAL = "mbarrier.arrive.shared.b64 _, [full];"

# what a note calls missing -> a kernel without it; with the lines of variant "manual" it is silent
NOTES = {
    "tcgen05.wait::ld": Scenario(
        "wait::ld",
        f"""
        warp 0:
            tcgen05.st.sync.aligned.32x32b.x4.b32 [%lanes], {{%lane, %lane, %lane, %lane}};
            tcgen05.wait::st.sync.aligned;
            tcgen05.ld.sync.aligned.32x32b.x4.b32 {{%r1, %r2, %r3, %r4}}, [%lanes];
            add.u32 %r5, %r1, %r2;
            add.u32 %r5, %r3, %r4;
            //~manual: tcgen05.wait::ld.sync.aligned;
            tcgen05.fence::before_thread_sync;
            {_SIGNAL}
        """,
        {},
        barriers={"full": 32},
        columns=32,
    ),
    "tcgen05.fence::before_thread_sync": Scenario(
        "before",
        f"""
        warp 0:
            tcgen05.st.sync.aligned.32x32b.x4.b32 [%lanes], {{%lane, %lane, %lane, %lane}};
            tcgen05.wait::st.sync.aligned;
            //~manual: tcgen05.fence::before_thread_sync;
            {_SIGNAL}
        """,
        {},
        barriers={"full": 32},
        columns=32,
    ),
    "tcgen05.fence::after_thread_sync": Scenario(
        "after",
        f"""
        warp 1:
            {_SIGNAL}
        warp 0:
            wait full, 0;
            //~manual: tcgen05.fence::after_thread_sync;
            tcgen05.st.sync.aligned.32x32b.x4.b32 [%lanes], {{%lane, %lane, %lane, %lane}};
            tcgen05.wait::st.sync.aligned;
            tcgen05.fence::before_thread_sync;
        """,
        {},
        barriers={"full": 32},
        columns=32,
    ),
    ".release.cluster": Scenario(
        "scope of an arrival",
        """
        cta 0:
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            mbarrier.arrive.shared::cluster.b64 _, [%r2]; //-manual
            //~manual: mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 1:
            wait.cluster full, 0;
        """,
        {},
        warps=1,
        cluster=2,
        barriers={"full": 32},
    ),
    ".acquire.cluster": Scenario(
        "scope of a wait",
        """
        cta 0:
            mov.u32 %r2, full;
            mapa.shared::cluster.u32 %r2, %r2, %peer;
            mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 1:
            wait full, 0; //-manual
            //~manual: wait.cluster full, 0;
        """,
        {},
        warps=1,
        cluster=2,
        barriers={"full": 32},
    ),
    "cp.async.bulk.wait_group.read": Scenario(
        "exit",
        """
        warp 0:
            st.shared.b32 [%mine], %lane;
            fence.proxy.async.shared::cta;
            bar.warp.sync 0xffffffff;
            mov.u32 %r1, tile;
            @%first cp.async.bulk.global.shared::cta.bulk_group [%output], [%r1], 128;
            cp.async.bulk.commit_group;
            //~manual: cp.async.bulk.wait_group.read 0;
        """,
        {},
    ),
}


def findings(scenario: Scenario, variant: str, strict: bool) -> list[Finding]:
    source, target = (aligned_copy(np.zeros(1024, np.uint32)) for _ in range(2))
    report = ptxemu.load(write(scenario, variant).text).launch(
        grid=(scenario.cluster,),
        block=(32 * scenario.warps,),
        cluster=(scenario.cluster, 1, 1),
        params=[
            *(buffer.ctypes.data.to_bytes(8, "little") for buffer in (source, target)),
            bytes(128),
            bytes(128),
        ],
        memory=[source, target],
        options=Options(check=True, strict=strict),
    )
    return [found for found in report.findings if found.missing in NOTES]


@pytest.mark.parametrize("missing", NOTES)
def test_what_the_manual_asks_for_is_noted(missing):
    noted = findings(NOTES[missing], "", strict=True)
    assert missing in {found.missing for found in noted}
    assert {found.severity for found in noted} == {"note"}
    assert all(found.rule and found.line for found in noted)


@pytest.mark.parametrize("missing", NOTES)
def test_what_is_there_is_not_noted(missing):
    noted = findings(NOTES[missing], "manual", strict=True)
    assert missing not in {found.missing for found in noted}


@pytest.mark.parametrize("missing", NOTES)
def test_notes_are_for_strict_mode(missing):
    assert findings(NOTES[missing], "", strict=False) == []


def test_an_access_beside_every_allocation_is_told():
    said = []
    known = Allocations([(1000, 1100, True), (2000, 2064, True)], said.append)
    for low, high in ((1000, 1100), (2060, 2064), (1096, 1104), (2064, 2068), (500, 504)):
        known.check(low, high, write=False)
    assert [message.split(",")[0] for message in said] == [
        "read of 8 bytes at 0x448", "read of 4 bytes at 0x810", "read of 4 bytes at 0x1f4",
    ]  # fmt: skip
    assert "the one below has 64 and ends 0 before" in said[1]


def test_a_store_behind_an_allocation_is_found():
    """The process has memory there, so that only the checker can tell."""
    body = "all: \n add.u64 %output, %output, {}; \n st.global.b32 [%output], %lane;"
    buffer = aligned_copy(np.zeros(64, np.uint32))
    start = buffer.ctypes.data
    for offset, found in ((124, []), (128, ["out-of-bounds"])):
        report = ptxemu.load(write(Scenario("store", body.format(offset), {})).text).launch(
            grid=(1,),
            block=(1,),
            params=[start.to_bytes(8, "little")] * 2 + [bytes(128)] * 2,
            allocated=[(start, start + 128, True)],
            options=Options(check=True),
        )
        assert [finding.check for finding in report.errors] == found
