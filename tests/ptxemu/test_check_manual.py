"""Notes by the manual's text: said in strict mode where an instruction is missing that hardware
does without, never as an error, and not said otherwise."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu import Options
from ptxemu.machine.memory import Allocations
from ptxemu.report import Finding
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.run import launch
from tests.ptxemu.check_pairs.scenario import Scenario, write
from workbench.conformance.ptx_program import aligned_copy

_SIGNAL = "mbarrier.arrive.shared.b64 _, [full];"
_STORE = f"{parts.WRITE}\ntcgen05.wait::st.sync.aligned;"

# what a note calls missing -> a kernel without it; with the lines of variant "manual" it is silent
NOTES = {
    "tcgen05.wait::ld": Scenario(
        f"""
        warp 0:
            {_STORE}
            {parts.READ}
            add.u32 %r5, %r1, %r2;
            add.u32 %r5, %r3, %r4;
            //~manual: tcgen05.wait::ld.sync.aligned;
            tcgen05.fence::before_thread_sync;
            {_SIGNAL}
        """,
        barriers={"full": 32},
    ),
    "tcgen05.fence::before_thread_sync": Scenario(
        f"""
        warp 0:
            {_STORE}
            //~manual: tcgen05.fence::before_thread_sync;
            {_SIGNAL}
        """,
        barriers={"full": 32},
    ),
    "tcgen05.fence::after_thread_sync": Scenario(
        f"""
        warp 1: {_SIGNAL}
        warp 0:
            wait full, 0;
            //~manual: tcgen05.fence::after_thread_sync;
            {_STORE}
            tcgen05.fence::before_thread_sync;
        """,
    ),
    ".release.cluster": Scenario(
        """
        cta 0:
            mapa.shared::cluster.u32 %r2, full, %peer;
            mbarrier.arrive.shared::cluster.b64 _, [%r2]; //-manual
            //~manual: mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        cta 1: wait.cluster full, 0;
        """,
    ),
    ".acquire.cluster": Scenario(
        f"""
        cta 0: {parts.arrive_at_peer()}
        cta 1: wait full, 0; //~manual: wait.cluster full, 0;
        """,
    ),
    "cp.async.bulk.wait_group.read": Scenario(
        f"""
        warp 0:
            {parts.FILL_FOR_ASYNC}
            {parts.BULK_STORE}
            cp.async.bulk.commit_group;
            //~manual: cp.async.bulk.wait_group.read 0;
        """,
    ),
}


def findings(missing: str, variant: str = "", *, strict: bool = True) -> list[Finding]:
    scenario = NOTES[missing]
    report = launch(scenario, ptxemu.load(write(scenario, variant).text), strict=strict)
    return [found for found in report.findings if found.missing in NOTES]


@pytest.mark.parametrize("missing", NOTES)
def test_what_the_manual_asks_for_is_noted(missing):
    noted = findings(missing)
    assert missing in {found.missing for found in noted}
    assert {found.severity for found in noted} == {"note"}
    assert all(found.rule and found.line for found in noted)


@pytest.mark.parametrize("missing", NOTES)
def test_what_is_there_is_not_noted(missing):
    noted = findings(missing, "manual")
    assert missing not in {found.missing for found in noted}


@pytest.mark.parametrize("missing", NOTES)
def test_notes_are_for_strict_mode(missing):
    assert findings(missing, strict=False) == []


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
        report = ptxemu.load(write(Scenario(body.format(offset))).text).launch(
            grid=(1,),
            block=(1,),
            params=[start.to_bytes(8, "little")] * 2 + [bytes(128)] * 2,
            allocated=[(start, start + 128, True)],
            options=Options(check=True),
        )
        assert [finding.check for finding in report.errors] == found
