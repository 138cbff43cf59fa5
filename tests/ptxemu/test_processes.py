"""`Options(processes=)`: a launch and its reports are those of one process."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest

import ptxemu
from ptxemu.processes import Ranges, talk
from tests.ptxemu.kernels import POINTER, kernel, launch

GRID = 9
# The address of the thread's word of its CTA in `d`: %rd3, the CTA: %r1.
PLACE = (
    POINTER + "mov.u32 %r1, %ctaid.x;\nmad.lo.u32 %r2, %r1, 32, %r0;\n"
    "mad.wide.u32 %rd3, %r2, 4, %rd1;\n"
)
TRIPLE = PLACE + "ld.global.u32 %r3, [%rd3];\nmul.lo.u32 %r3, %r3, 3;\nst.global.u32 [%rd3], %r3;\n"
# every thread at its own word, and CTA 5 out of bounds after its store
STRAY = TRIPLE + (
    "setp.ne.u32 %p1, %r1, 5;\n@%p1 bra DONE;\nadd.u64 %rd4, %rd1, 1073741824;\n"
    "st.global.u32 [%rd4], %r1;\nDONE:\n"
)
COUNT = POINTER + "atom.global.add.u32 %r3, [%rd1], 1;\n"
# each CTA waits for the one before it
CHAIN = POINTER + (
    "mov.u32 %r1, %ctaid.x;\nsetp.ne.u32 %p1, %r0, 0;\n@%p1 bra DONE;\n"
    "mul.wide.u32 %rd3, %r1, 4;\nadd.u64 %rd3, %rd1, %rd3;\n"
    "WAIT: ld.acquire.gpu.global.u32 %r3, [%rd3];\nsetp.eq.u32 %p2, %r3, 0;\n@%p2 bra WAIT;\n"
    "add.u32 %r3, %r3, 1;\nst.release.gpu.global.u32 [%rd3+4], %r3;\nDONE:\n"
)
# lanes of CTA n store where CTA n + 1 reads
RACE = PLACE + "ld.global.u32 %r3, [%rd3];\nst.global.u32 [%rd3+128], %r3;\n"
ALONE = {
    "atomics": (COUNT, "its CTAs touch what others write"),
    "flags": (CHAIN, "its CTAs wait for others"),
    "neighbours": (RACE, "its CTAs touch what others write"),
}


def told(body: str, processes: int, **how: object) -> tuple[object, ...]:
    """Return (memory, report of the launch or its error), without parts that may differ.

    The launch has no limit, which one on a busy machine would reach.
    """
    memory = np.arange(1, 32 * (GRID + 1) + 1, dtype=np.uint32)
    memory[GRID + 1 :] *= body != CHAIN
    if body == CHAIN:
        memory[1:] = 0
    try:
        report = launch(
            kernel(body, ".param .u64 d"), memory, grid=(GRID,), processes=processes, limit=None,
            **how,
        )  # fmt: skip
    except ptxemu.PtxEmuError as error:
        return memory, f"{type(error).__name__} {error}".replace(_address(memory), "d"), None
    kept = {name: getattr(report, name) for name in ("by_warp", "bytes", "counts", "unused")}
    base = memory.ctypes.data
    findings = [_relative(each, base) for each in report.findings]
    return memory, (kept, findings, report.partly), report


def _relative(finding: ptxemu.Finding, base: int) -> ptxemu.Finding:
    """Return the finding with addresses relative to the memory."""
    accesses = [replace(a, first=a.first - base, last=a.last - base) for a in finding.accesses]
    message = re.sub(r"0x\w+", lambda found: f"{int(found[0], 16) - base:#x}", finding.message)
    return replace(finding, accesses=tuple(accesses), message=message)


def _address(memory: np.ndarray) -> str:
    return f"{memory.ctypes.data + (1 << 30):#x}"


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("processes", [2, 4, 20])
def test_parts_are_put_together(processes, check):
    one, several = (told(TRIPLE, count, check=check) for count in (1, processes))
    assert np.array_equal(one[0], several[0])
    assert one[1] == several[1]
    assert several[2].processes == min(processes, GRID), several[2].alone
    assert (one[2].processes, several[2].alone) == (1, "")


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("check", [False, True])
def test_ctas_that_talk_run_in_one_process(name, check):
    body, why = ALONE[name]
    one, several = (told(body, count, check=check) for count in (1, 3))
    assert np.array_equal(one[0], several[0])
    assert one[1] == several[1]
    assert several[2].processes == 1
    assert several[2].alone in (why, "the checker has something to tell")


def test_a_race_of_two_processes_is_found():
    one, several = (told(RACE, count, check=True)[1] for count in (1, 2))
    assert one[1]
    assert one == several


@pytest.mark.parametrize("check", [False, True])
def test_an_error_is_that_of_one_process(check):
    one, several = (told(STRAY, count, check=check) for count in (1, 3))
    assert np.array_equal(one[0], several[0])
    assert one[1] == several[1]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"policy": "random"}, "policy='random' mixes the warps of all CTAs by chance"),
        ({"trace": True}, "somebody looks at it while it runs"),
        ({"grid": (1,)}, "it has one cluster"),
    ],
)
def test_where_processes_cannot_help(how, why):
    memory = np.zeros(32 * GRID, np.uint32)
    how = {"grid": (GRID,)} | how
    report = launch(kernel(TRIPLE, ".param .u64 d"), memory, processes=2, **how)
    assert (report.processes, report.alone) == (1, why)


def test_no_process_is_left(monkeypatch):
    """Processes that the launch forks count; other tests may have children in this process."""
    fork, forked = os.fork, []

    def noted() -> int:
        forked.append(fork())
        return forked[-1]

    monkeypatch.setattr(os, "fork", noted)
    told(STRAY, 3)
    assert len(forked) >= 2
    for process in forked:
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def test_options():
    with pytest.raises(ValueError, match="processes=0; must be >= 1"):
        ptxemu.Options(processes=0)


def test_ranges_are_joined():
    found = Ranges()
    found.add_each(np.array([64, 0, 8, 4]), 4)
    found.add(12, 20)
    assert found.joined().tolist() == [[0, 20], [64, 68]]
    found.add(10, 64)
    assert found.joined().tolist() == [[0, 68]]


def test_boxes_are_their_rows():
    offsets = np.array([0, 100, 8])
    found, wanted = Ranges(), Ranges()
    for first in (0, 40, 0, 300):
        found.add_box(first, offsets, 8)
        wanted.add_each(offsets + first, 8)
    assert found.joined().tolist() == wanted.joined().tolist()


def test_blocks_are_generated_before_processes_begin():
    """The second launch generates what the processes of the first one have executed."""
    module = ptxemu.load(kernel(TRIPLE, ".param .u64 d"))
    memory = np.arange(32 * GRID, dtype=np.uint32)
    for _ in range(2):
        assert not module.program(None).versions
        launch(module, memory, grid=(GRID,), processes=2)
    assert module.program(None).versions
    np.testing.assert_array_equal(memory, 9 * np.arange(32 * GRID))


@pytest.mark.parametrize(
    ("writes", "grain", "expected"), [((8, 12), 1, False), ((7, 12), 1, True), ((9, 12), 4, False)]
)
def test_bytes_meet(writes, grain, expected):
    nothing, one = np.empty((0, 2), np.int64), np.array([[0, 2], [4, 8], [12, 16]])
    other = np.array([writes])
    assert talk([(one, nothing), (nothing, other)], grain) is expected
    assert talk([(nothing, one), (nothing, other)], grain) is expected
    assert not talk([(one, nothing), (other, nothing)], grain)
