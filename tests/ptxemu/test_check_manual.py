"""Notes by the manual's text: reported, but not as errors, if an instruction is missing that
hardware does without; in strict mode only for instructions that right kernels omit on purpose.
"""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from lab.silicon.conformance.ptx_program import aligned_copy
from ptxemu import Options
from ptxemu.check.text import render, single
from ptxemu.findings import Finding
from ptxemu.report import Report
from ptxemu.watch import heard
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Scenario, launch, write
from tests.ptxemu.kernels import POINTER, kernel
from tests.ptxemu.kernels import launch as launch_kernel

_SIGNAL = "mbarrier.arrive.shared.b64 _, [full];"
_STORE = f"{parts.WRITE}\ntcgen05.wait::st.sync.aligned;"

# missing instruction of a note -> a kernel without it; with the lines of variant "manual" there is
# no note
NOTES = {
    "bar.warp.sync before the arrival": Scenario(
        """
        warp 0:
            st.shared.b32 [%mine], %lane;
            //~manual: bar.warp.sync 0xffffffff;
            @%first mbarrier.arrive.shared.b64 _, [full];
        """,
        barriers={"full": 1},
    ),
    "tcgen05.wait::ld between the two": Scenario(
        f"""
        warp 0:
            {_STORE}
            {parts.READ}
            //~manual: tcgen05.wait::ld.sync.aligned;
            add.u32 %r5, %r1, %r2;
            add.u32 %r5, %r3, %r4;
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
    "a cluster barrier before tcgen05.alloc": Scenario(
        f"""
        all:
            //~manual: barrier.cluster.arrive.aligned;
            //~manual: barrier.cluster.wait.aligned;
        warp 0: {parts.alloc(2)}
        all: {parts.MEET}
        warp 0: {parts.dealloc(2).replace("%tmem", "0")}
        """,
        bare=True,
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
    "fence.proxy.async after the wait for the copies": Scenario(
        f"""
        warp 0:
            mad.wide.u32 %d0, %lane, 16, %input;
            mov.u32 %r2, a;
            mad.lo.u32 %r2, %lane, 16, %r2;
            cp.async.cg.shared.global [%r2], [%d0], 16;
            cp.async.mbarrier.arrive.noinc.shared.b64 [full];
        warp 1:
            wait full, 0;
            //~manual: fence.proxy.async.shared::cta;
            tcgen05.fence::after_thread_sync;
            {parts.MULTIPLY}
        """,
    ),
    "fence.mbarrier_init or fence.proxy.async after mbarrier.init, by the thread that executes it,"
    " before the barrier": Scenario(
        f"""// Triton has its fence before the init.
        warp 1:
            fence.proxy.async.shared::cta;
            @%first mbarrier.init.shared.b64 [slot], 1;
            //~manual: @%first fence.mbarrier_init.release.cluster;
        all: bar.sync 1, 64;
        warp 0: {parts.tma_load(barrier="slot")}
        all:
            bar.sync 1, 64;
            wait slot, 0;
        """,
    ),
}


ALWAYS = {  # reported without strict, too
    "tcgen05.wait::ld between the two",
    "bar.warp.sync before the arrival",
    "cp.async.bulk.wait_group.read",
    "fence.mbarrier_init or fence.proxy.async after mbarrier.init, by the thread that executes it,"
    " before the barrier",
}


def findings(missing: str, variant: str = "", *, strict: bool = True) -> list[Finding]:
    scenario = NOTES[missing]
    report = launch(scenario, ptxemu.load(write(scenario, variant).text), strict=strict)
    return [found for found in report.findings if found.missing in NOTES]


_BEFORE, _AFTER = "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"
_MEET = ("barrier.cluster.arrive.aligned;", "barrier.cluster.wait.aligned;")
# Each way to signal others, and to wait for them: (preceding code, the line itself).
SIGNALS = {
    "mbarrier": ("", "mbarrier.arrive.shared.b64 _, [full];"),
    "named barrier": ("", "bar.arrive 3, 128;"),
    "flag": ("", "st.release.gpu.global.b32 [%output], 1;"),
    "counter": ("", "red.release.gpu.global.add.u32 [%output], 1;"),
    "cluster": ("", _MEET[0]),
}
WAITS = {
    "named barrier": ("", "bar.sync 3, 32;"),
    "flag": ("", "ld.acquire.gpu.global.b32 %r5, [%output];"),
    "counter": ("", "atom.acquire.gpu.global.add.u32 %r5, [%output], 1;"),
    "cluster": _MEET,
}


def test_a_bulk_copy_over_what_cp_async_wrote_needs_a_proxy_fence() -> None:
    """The missing instruction of `NOTES` is the same as where an MMA reads it."""
    body = """
        warp 0:
            cp.async.ca.shared.global [%mine], [%in], 4;
            cp.async.mbarrier.arrive.noinc.shared.b64 [other];
        warp 1:
            wait other, 0;
            {fence}
            {load}
            wait full, 0;
    """
    for fence in ("", "fence.proxy.async.shared::cta;"):
        scenario = Scenario(body.format(fence=fence, load=parts.bulk_load()), barriers={"full": 1})
        report = launch(scenario, ptxemu.load(write(scenario).text), strict=True)
        noted = [each.message for each in report.findings if "overwrites" in each.message]
        assert len(noted) == (not fence)


def _noted(body: str, name: str, missing: str) -> bool:
    """Whether a finding says that the line `name` of a one-CTA kernel lacks `missing`."""
    kernel = write(Scenario(body, barriers={"full": 128}))
    report = launch(Scenario(body, barriers={"full": 128}), ptxemu.load(kernel.text), strict=True)
    lines = [found.line for found in report.findings if found.missing == missing]
    return kernel.names[name] in lines


@pytest.mark.parametrize("way", SIGNALS)
def test_a_fence_before_each_way_to_tell_others(way):
    _, signal = SIGNALS[way]
    wait = _MEET[1] if way == "cluster" else ""
    for fence, noted in (("", True), (f"{_BEFORE};", False)):
        body = f"warp 0:\n{_STORE}\n{fence}\nall:\n{signal} //:signal\n{wait}"
        assert _noted(body, "signal", _BEFORE) is noted


@pytest.mark.parametrize("way", WAITS)
def test_a_fence_behind_each_way_to_hear_of_others(way):
    before, wait = WAITS[way]
    whose = "all" if way == "cluster" else "warp 0"
    use = _STORE.replace(";", "; //:use", 1)
    for fence, noted in (("", True), (f"{_AFTER};", False)):
        body = f"all: {_AFTER};\n{whose}:\n{before}\n{wait}\nwarp 0:\n{fence}\n{use}"
        assert _noted(body, "use", _AFTER) is noted


def test_one_fence_is_missing_where_one_would_do():
    signal = "mbarrier.arrive.shared.b64 _, [full];"
    for between, noted in (("", False), (_STORE, True)):
        body = f"warp 0:\n{_STORE}\n{signal} //:first\n{between}\n{signal} //:second"
        assert _noted(body, "first", _BEFORE)
        assert _noted(body, "second", _BEFORE) is noted


@pytest.mark.parametrize("late", [False, True])
def test_lanes_that_arrive_in_parts_tell_of_themselves(late):
    """late: the other lanes store again before this half arrives, and do not signal that."""
    again = "st.shared.b32 [%mine], %zero;" * late
    body = f"""
        warp 0:
            setp.lt.u32 %p2, %lane, 16;
            @%p2 bra LOW;
            st.shared.b32 [%mine], %lane;
            {_SIGNAL}
            {again}
            bra END;
            LOW:
            st.shared.b32 [%mine], %lane;
            {_SIGNAL} //:second
            END:
    """
    assert _noted(body, "second", "bar.warp.sync before the arrival") is late


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
def test_most_notes_are_for_strict_mode(missing):
    assert {found.missing for found in findings(missing, strict=False)} == {missing} & ALWAYS


def test_without_strict_a_note_lists_all_lines_that_lack_the_same():
    load = f"{parts.READ}\nadd.u32 %r5, %r1, %r2;"
    scenario = Scenario(f"warp 0: {_STORE}\n{load}\n{load}")
    program = ptxemu.load(write(scenario).text)
    for strict, blocks in ((False, 1), (True, 2)):
        report = Report([launch(scenario, program, strict=strict)])
        text = render(report)
        assert text.count("note: manual: registers of tcgen05.ld") == blocks
        assert ("PTX line" in text and "(and 1 other): tcgen05.ld" in text) is not strict
        assert "why: the first use is add.u32" in text
        assert not report.errors


def test_a_store_behind_an_allocation_is_found():
    """The process has memory there, so that only the checker can notice."""
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


HALF = "mov.u32 %r2, %r0;"  # both to the same place


def two_ctas_store(place: str, words: int = 64) -> ptxemu.LaunchReport:
    """Each lane of two CTAs stores its number at `place`, a function of lane and %r1, the CTA."""
    out = np.zeros(words, np.uint32)
    body = f"{POINTER}mov.u32 %r1, %ctaid.x;\n{place}\nmad.wide.u32 %rd2, %r2, 4, %rd1;"
    text = kernel(f"{body}\nst.global.u32 [%rd2], %r0;", ".param .u64 d")
    return launch_kernel(text, out, grid=(2,), check=True)


def test_an_index_that_two_ctas_share_is_noted_where_others_get_nothing():
    report = two_ctas_store(HALF)
    (found,) = report.findings
    assert (found.check, found.severity) == ("index", "note")
    assert "128 of the 256 bytes" in found.message
    assert found.accesses[0].known_as == "parameter 0"
    assert report.partly[0].startswith("parameter 0: 128 of 256 bytes, at PTX line")
    whole = two_ctas_store(HALF, words=32)  # no part is missing
    right = two_ctas_store("mad.lo.u32 %r2, %r1, 32, %r0;")
    assert [whole.findings, whole.partly, right.findings, right.partly] == [[], [], [], []]


def test_an_overrun_is_told_by_its_parameter():
    lines: list[str] = []
    with heard(lambda _, what: lines.append(single(what))):
        report = two_ctas_store("mad.lo.u32 %r2, %r1, 33, %r0;")
    (found,) = report.errors
    assert (found.check, found.accesses[0].known_as) == ("out-of-bounds", "parameter 0 + 256 bytes")
    assert "[parameter 0 + 256 bytes; PTX line" in lines[0]


def test_what_is_told_at_once_names_barriers():
    body = f"warp 0:\n{parts.bulk_load()}\nld.shared.b32 %r1, [%mine];"
    scenario = Scenario(body, barriers={"full": 1})
    told: list[Finding] = []
    with heard(lambda _, what: told.append(what)):
        launch(scenario, ptxemu.load(write(scenario).text))
    assert told[0].accesses[0].agent.startswith("mbarrier full (0x")


def test_two_ctas_that_store_what_differs_need_an_index_of_their_own():
    report = two_ctas_store("mov.u32 %r2, %r0; add.u32 %r0, %r0, %r1;")
    (found,) = report.errors
    assert found.why == "two CTAs write the same element"
    assert found.missing.startswith("an index or a bound that gives each CTA its own elements")


@pytest.mark.parametrize(("given", "asked"), [(24, 240), (32, 240), (40, 232), (40, 240)])
def test_a_launch_has_no_more_registers_than_it_took(given: int, asked: int):
    """Each of 384 threads has 168 registers, 64,512 in all, which is not the whole file."""
    text = kernel(
        "mov.u32 %r0, %tid.x; setp.ge.u32 %p0, %r0, 256; @%p0 bra GIVE;\n"
        f"setmaxnreg.inc.sync.aligned.u32 {asked}; bra.uni DONE;\n"
        f"GIVE: setmaxnreg.dec.sync.aligned.u32 {given};\nDONE:"
    ).replace("test()", "test() .maxnreg 168")
    found = launch_kernel(text, block=(384,)).findings
    wanted = (2 * asked + given) * 128
    assert bool(found) == (wanted > 64_512)
    assert all(f"asks for {wanted} registers in all" in finding.message for finding in found)


@pytest.mark.parametrize("strict", [False, True])
def test_a_fifth_warp_may_ask_for_registers_alone(strict: bool):
    """CUTLASS's GEMM for GeForce does this."""
    text = kernel("setmaxnreg.dec.sync.aligned.u32 40;").replace("test()", "test() .maxnreg 168")
    found = launch_kernel(text, block=(160,), strict=strict, check=True).findings
    notes = ["setmaxnreg in a warpgroup of 1 warps, not 4"] if strict else []
    assert [finding.message for finding in found] == notes


@pytest.mark.parametrize(
    ("directives", "kept"),
    [
        ("", False),
        (".maxntid 384", False),
        (".reqntid 384", False),
        (".minnctapersm 1", False),
        (".maxntid 384 .minnctapersm 1", True),
        (".reqntid 384 .minnctapersm 1", True),
        (".maxnreg 168", True),
    ],
)
def test_a_register_count_that_ptxas_drops_is_noted(directives: str, kept: bool):
    """ptxas 12.9 and 13.0 leave USETMAXREG in the machine code of those that are kept. What is
    dropped cannot ask for more registers than there are."""
    body = "setmaxnreg.inc.sync.aligned.u32 240;"
    text = kernel(body).replace("test()", f"test() {directives}")
    found = launch_kernel(text, block=(384,), check=True).findings
    assert [each.severity for each in found] == (["error"] if kept else ["note"])
    assert ("ptxas drops every setmaxnreg" in found[0].message) is not kept
