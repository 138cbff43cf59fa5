"""Fast checks of the checker agree with numpy: the same races, and the same stamps after each
access.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ptxemu
from ptxemu.check import frame, zeros
from ptxemu.check.agents import Ticket, WarpClock
from ptxemu.check.checker import Checker
from ptxemu.check.clocks import ALL_LANES, ATOMIC, Components, Mark, stamp
from ptxemu.check.footprints import Cells, Pattern, Scattered, Span
from ptxemu.check.global_memory import GlobalShadow, Piece
from ptxemu.check.races import Races
from ptxemu.check.shadow import Shadow
from ptxemu.check.tensor_loads import flying
from ptxemu.check.unused import clues
from ptxemu.codegen import tainted
from ptxemu.native.library import library
from ptxemu.report import LaunchReport
from tests.ptxemu.check_pairs import parts
from tests.ptxemu.check_pairs.scenario import Scenario, launch, write
from tests.ptxemu.kernels import DYNAMIC, kernel
from tests.ptxemu.kernels import launch as launch_kernel

needs_machine_code = pytest.mark.skipif(library() is None, reason="llvmlite is not installed")
CELLS, GRAIN = 96, 4
KINDS = ("", "cp.async", "tensor core", "bulk read")


class Warps:
    """Warps of one cluster, with random actions."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.components = Components()
        self.clocks = [
            WarpClock(self.components, SimpleNamespace(label=str(k), cta=None, at=k))
            for k in range(3)
        ]
        self.told: list[np.ndarray] = []
        self.tickets: list[Ticket] = []

    def order(self) -> None:
        """A random action other than an access."""
        clock, other = self.random.sample(self.clocks, 2)
        match self.random.randrange(8):
            case 0 | 1 | 2:
                clock.learn(other.release(), whole=self.random.random() < 0.5)
            case 3:
                clock.learn(other.release(relaxed=True), relaxed=self.random.random() < 0.5)
            case 4:
                clock.together()
            case 5:
                clock.together_some(self.random.getrandbits(32) | 1)
            case 6:
                clock.fence_proxy(("shared",))
            case _:
                for kind in tuple(clock.streams):
                    clock.complete(kind)

    def agent(self) -> WarpClock | Ticket:
        clock = self.random.choice(self.clocks)
        if self.random.random() < 0.6:
            return clock
        self.tickets.append(Ticket(clock, ALL_LANES, 7, self.random.choice(KINDS)))
        return self.random.choice(self.tickets[-4:])

    def mark(self, by: WarpClock | Ticket, starts: int) -> Mark:
        site, lane = self.random.randrange(1, 40), ALL_LANES
        if isinstance(by, Ticket):
            where = by.position if by.component else (by.own, by.agent.now)
        else:
            where = by.own, by.now
            if starts and self.random.random() < 0.8:
                return Mark(stamp(*where, 0, site), np.sort(self.lanes(starts)))
            lane = self.random.choice((ATOMIC, self.components.lane_sets.code(0xFF), 5))
        return Mark(stamp(*where, lane, site), lane)

    def lanes(self, count: int) -> np.ndarray:
        return np.array(self.random.sample(range(32), count))


def cells_of(rng: random.Random) -> tuple[Any, int]:
    """Return a maker of cells, and the number of lanes with separate cells."""
    match rng.randrange(3):
        case 0:
            first, count = rng.randrange(CELLS - 8), rng.randrange(1, 9)
            return lambda: Span(first, count), 0
        case 1:
            pattern, base = (
                Pattern(np.unique([rng.randrange(40) for _ in range(9)])),
                rng.choice((0, 8)),
            )
            return lambda: Cells(pattern, base), 0
    count, size = rng.randrange(1, 9), rng.choice((4, 8))
    starts = np.array([rng.randrange(CELLS // 2 - 2) * 8 for _ in range(count)])
    return lambda: Scattered(starts, size, GRAIN), count


def access(shadow: Shadow, cells: Cells, by: Any, mark: Mark, write: bool) -> list[Any]:
    """Return the races; none if the fast check excludes them."""
    found: list[Any] = []
    if not shadow.surely(cells, by, mark, write):
        what = shadow.write if write else shadow.read
        what(cells.index(), by, mark, lambda old, cell: found.append((old, cell)))
    return found


@needs_machine_code
@pytest.mark.parametrize("seed", range(6))
def test_routines_say_what_numpy_says(seed: int) -> None:
    warps = Warps(seed)
    rng = warps.random
    ours, plain = (Shadow(CELLS, "shared") for _ in range(2))
    plain._routines = None
    sure = races = 0
    for _ in range(400):
        warps.order()
        make, starts = cells_of(rng)
        by, write = warps.agent(), rng.random() < 0.4
        mark = warps.mark(by, starts)
        written = plain.last[make().index()].all()
        expected = access(plain, make(), by, mark, write)
        assert access(ours, make(), by, mark, write) == expected
        sure += not expected and ours.all_written and bool(written)
        races += bool(expected)
        assert (ours.last == plain.last).all()
        for old, other in zip(ours.reads(slice(None)), plain.reads(slice(None)), strict=True):
            assert (old == other).all()
        assert ours.writers(make()) == plain.writers(make())
        assert ours.unread(make()) == plain.unread(make())
    assert sure > 30
    assert races > 30


@needs_machine_code
def test_a_routine_does_nothing_where_it_is_not_sure() -> None:
    warps = Warps(0)
    first, second = warps.clocks[:2]
    shadow, cells = Shadow(CELLS, "shared"), Span(3, 2)
    read, write = (Mark(stamp(by.own, by.now, 5, 1), 5) for by in (first, second))
    assert not shadow.surely(cells, first, read, False, defined=True), "nobody has written there"
    assert shadow.surely(cells, first, read, False)
    assert not shadow.all_written
    assert not shadow.surely(cells, second, write, True)
    assert not shadow.surely(Span(CELLS - 1, 2), second, write, True), "no such cell"
    shadow.with_barriers()[40] = True
    assert not shadow.surely(Span(40, 1), second, write, True), "an mbarrier"
    assert not shadow.last.any()
    second.learn(first.release())
    assert shadow.surely(cells, second, write, True)
    assert shadow.last.nonzero()[0].tolist() == [3, 4]
    assert not list(shadow.reads(slice(None)))
    assert shadow.surely(cells, second, write, False, defined=True)
    assert shadow.all_written


@needs_machine_code
@pytest.mark.parametrize("seed", range(4))
def test_the_same_of_global_memory(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    warps = Warps(seed)
    rng = warps.random
    ours, plain = (GlobalShadow(GRAIN) for _ in range(2))
    races = sure = 0
    for _ in range(200):
        warps.order()
        make, starts = cells_of(rng)
        by, write = warps.agent(), rng.random() < 0.6
        mark, cluster = warps.mark(by, starts), rng.randrange(8) // 7
        where = np.asarray(make()._starts if starts else [GRAIN * rng.randrange(60)], np.int64)
        found: list[list[Any]] = []
        for shadow, native in ((ours, True), (plain, False)):
            seen: list[Any] = []

            def on_race(*what: Any, seen: list[Any] = seen) -> bool:
                seen.append(what)
                return False

            piece = Piece(where + (5 << 20), 8, cluster, mark)
            with monkeypatch.context() as patched:
                if not native:
                    patched.setattr(frame, "routines", lambda: None)
                (shadow.write if write else shadow.read)(piece, by, on_race)
            found.append(seen)
        assert found[0] == found[1]
        races += bool(found[0])
        sure += not found[0]
        assert (ours.low, ours.high) == (plain.low, plain.high)
        for number, chunk in plain.chunks.items():
            other = ours.chunks[number]
            assert (chunk.last == other.last).all()
            assert (chunk.owner == other.owner).all()
    assert races > 20
    assert sure > 20


# Loads (tcgen05.ld) that may be in flight at an arrival, derived from the program
# (`check.tensor_loads`). docs/ptxemu/checker.md says what ptxas does in each case.

LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3, %r4}, [%r1];\n"
OTHER = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r6}, [%r1];\n"
WAIT = "tcgen05.wait::ld.sync.aligned;\n"
ADD = "add.u32 %r5, %r3, %r4;\n"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r2];\n"
STORE, KEEP = "st.shared.b32 [%r9], %r5;\n", "st.shared.b32 [%r9+4], %r5;\n"
BRANCH = "setp.eq.u32 %p0, %r8, 0;\n@%p0 bra L;\n"

CASES = {  # body, most loads in flight at the last arrival; all use %r5 at the end
    "nothing": ("", 0),
    "a load": (LOAD, 1),
    "a wait": (LOAD + WAIT, 0),
    "a wait for stores": (LOAD + WAIT.replace("::ld", "::st"), 1),
    "arithmetic": (LOAD + ADD, 1),
    "a shuffle": (LOAD + ADD + "shfl.sync.bfly.b32 %r5, %r5, 1, 31, -1;\n", 1),
    "a reduction over lanes": (LOAD + ADD + "redux.sync.max.s32 %r5, %r5, -1;\n", 1),
    "a vote": (LOAD + ADD + "setp.eq.u32 %p1, %r5, 0;\nvote.sync.any.pred %p2, %p1, -1;\n", 1),
    "a store": (LOAD + ADD + STORE, 0),
    "a store of one register": (LOAD + "st.shared.b32 [%r9], %r3;\n" + ADD, 0),
    "a store of something else": (LOAD + ADD + STORE.replace("%r5", "%r8"), 1),
    "a store to where the data says": (LOAD + ADD + "st.shared.b32 [%r5], %r8;\n", 0),
    "a store that the data permits": (
        f"{LOAD}{ADD}setp.eq.u32 %p1, %r5, 0;\n@%p1 st.shared.b32 [%r9], %r8;\n",
        0,
    ),
    "a branch that the data takes": (
        f"{LOAD}{ADD}setp.eq.u32 %p1, %r5, 0;\n@%p1 bra L;\nadd.u32 %r5, %r5, 1;\nL:\n",
        1,  # ptxas turns it into a selection
    ),
    "a reduction to memory": (LOAD + ADD + "red.shared.add.u32 [%r9], %r5;\n", 0),
    "a store to tensor memory": (
        f"{LOAD}{ADD}tcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {{%r5}};\n",
        0,
    ),
    "a store to local memory": (LOAD + ADD + "st.local.b32 [scratch], %r5;\n", 1),
    "two loads, one stored": (LOAD + OTHER + ADD + STORE + "add.u32 %r5, %r5, %r6;\n", 1),
    "two loads, their sum stored": (LOAD + OTHER + ADD + "add.u32 %r5, %r5, %r6;\n" + STORE, 0),
    "moves": (LOAD + "mov.b64 %rd3, {%r3, %r4};\nmov.b64 {%r5, %r7}, %rd3;\n" + STORE, 0),
    "a store on one path": (LOAD + ADD + BRANCH + STORE + "L:\n", 1),
    "a wait on one path": (LOAD + ADD + BRANCH + WAIT + "L:\n", 1),
    "a load on one path": (BRANCH + LOAD + ADD + "L:\n", 1),
    "a register that is overwritten": (LOAD + ADD + "mov.u32 %r5, 0;\n" + BRANCH + "L:\n", 0),
    "a loop": (f"L:\n{ARRIVE}{LOAD}{ADD}{STORE}{BRANCH}", 0),
    "a loop that carries the load": (f"L:\n{STORE}{ARRIVE}{LOAD}{ADD}{BRANCH}", 1),
}


@pytest.mark.parametrize("name", CASES)
def test_loads_under_way_at_an_arrival(name: str):
    body, expected = CASES[name]
    text = kernel(f".local .b32 scratch;\n{body}{ARRIVE}{KEEP}")
    program = ptxemu.load(text).program(None)
    arrivals = [k for k, instr in enumerate(program.sites) if instr.root == "mbarrier"]
    found = flying(program.blocks, program.site_of)
    assert len(found[arrivals[-1]]) == expected


def test_a_loop_is_followed_until_nothing_changes():
    """The arrival precedes the load in the text, and follows it in the next iteration."""
    program = ptxemu.load(kernel(f"L:\n{ARRIVE}{STORE}{LOAD}{ADD}{BRANCH}{KEEP}")).program(None)
    (arrival,) = (k for k, instr in enumerate(program.sites) if instr.root == "mbarrier")
    (load,) = (k for k, instr in enumerate(program.sites) if instr.opcode.startswith("tcgen05.ld"))
    assert flying(program.blocks, program.site_of)[arrival] == {load}


# Data that a launch fetched or computed without using it is listed when a script fails; reading a
# tile with a swizzle other than it was written with is a note.

USE = "ld.shared.b32 %r1, [%mine];\nst.global.b32 [%out], %r1;"
TWO_LOADS = f"""warp 0:
    {parts.bulk_load()}
    wait full, 0;
    {{use}}
    add.u64 %input, %input, 128;
    {parts.expect()}
    {parts.BULK_LOAD}
    wait full, 1;
    {USE}"""
TWO_MMAS = f"""warp 0:
    {parts.MMA}
    {parts.MMA.replace(", 0;", ", {};")}
    {parts.commit()}
    wait done, 0;
    {parts.READ_WHOLE}"""


def report_of(body: str) -> LaunchReport:
    scenario = Scenario(body)
    return launch(scenario, ptxemu.load(write(scenario).text))


def test_a_tile_that_nobody_reads() -> None:
    told = clues([report_of(TWO_LOADS.format(use=""))])
    assert "what it wrote and nothing read was overwritten, 100 % by cp.async.bulk" in told
    assert "nothing read was" not in clues([report_of(TWO_LOADS.format(use=USE))])


def test_a_result_that_the_next_mma_overwrites() -> None:
    told = clues([report_of(TWO_MMAS.replace("{}", "0"))])
    assert "nothing read was overwritten, 100 % by tcgen05.mma at" in told
    assert "overwritten" not in clues([report_of(TWO_MMAS.replace("{}", "1"))])


def test_a_tile_that_is_fetched_again() -> None:
    """The second of two copies in one loop has another address, or the same."""
    for step, told in ((0, True), (128, False)):
        loads = f"""warp 0:
            {parts.expect(256)}
            mov.u32 %r5, 0;
            AGAIN:
            {parts.BULK_LOAD}
            add.u64 %input, %input, {step};
            add.u32 %r5, %r5, 1;
            setp.lt.u32 %p3, %r5, 2;
            @%p3 bra AGAIN;
            wait full, 0;
            {USE}"""
        again = "1 of its 2 copies fetch again what the CTA had fetched there"
        assert (again in clues([report_of(loads)])) is told


def test_parts_of_inputs_and_outputs() -> None:
    """The loads cover no more than 256 bytes of a buffer."""
    lines = clues([report_of(TWO_LOADS.format(use=USE))]).splitlines()
    assert "kernel scenario" in lines[0]
    (unread,) = (line for line in lines if "nothing reads 16,384 of its 16,640 bytes, " in line)
    assert unread.count("cp.async.bulk") == 2  # both copies
    assert any(line.startswith("  written in part: parameter 1: 128 of") for line in lines)


@pytest.mark.parametrize(("step", "words"), [(8, "4 to 7 of every 8"), (4, "")])
def test_every_other_word(step: int, words: str) -> None:
    text = f""".version 8.8
.target sm_100a
.address_size 64
.visible .entry test(.param .u64 d, .param .u64 o)
{{
.reg .b32 %r<3>;
.reg .b64 %rd<5>;
ld.param.u64 %rd1, [d];
ld.param.u64 %rd3, [o];
mov.u32 %r0, %tid.x;
mad.wide.u32 %rd2, %r0, {step}, %rd1;
mad.wide.u32 %rd4, %r0, 4, %rd3;
ld.global.u32 %r1, [%rd2];
st.global.u32 [%rd4], %r1;
ret;
}}
"""
    arrays = np.zeros(8 * step, np.uint32), np.zeros(32, np.uint32)
    told = clues([launch_kernel(text, *arrays, check=True)])
    assert words in told if words else not told


def test_a_box_outside_of_its_tensor() -> None:
    load = parts.tma_load().replace("{%zero, %zero}", "{%zero, %r9}")
    told = clues([report_of(f"warp 0:\nmov.u32 %r9, 128;\n{load}\nwait full, 0;\n{USE}")])
    assert "1 of 1 boxes lie wholly outside of the tensor" in told


@pytest.mark.parametrize("mode", [0, 6])
def test_another_swizzle(mode: int) -> None:
    """The tensor maps have no swizzle."""
    body = f"""warp 0:
    {parts.tma_load(into="a")}
    wait full, 0;
    or.b64 %a, %a, {mode << 61:#x};
    {parts.MULTIPLY}"""
    found = [each for each in report_of(body).findings if each.check == "swizzle"]
    assert len(found) == bool(mode)
    for each in found:
        assert each.severity == "note"
        assert "reads with swizzle 32B what a copy has written with swizzle none" in each.message
        assert [access.role for access in each.accesses] == ["cp.async.bulk.tensor", "tcgen05.mma"]


# What is quick: accesses that never reach the detailed check, and memory that is used again.

ADDRESS = """mov.u32 %r0, %tid.x;
shl.b32 %r1, %r0, 4;
mov.u32 %r2, dynamic;
add.u32 %r3, %r2, %r1;
"""
STORE_ALL = "st.shared.v4.b32 [%r3], {%r0, %r0, %r0, %r0};"
LOAD_ALL = "ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r3];"


@needs_machine_code
def test_the_first_store_by_lanes_needs_no_closer_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def closer(*_: Any) -> None:
        raise AssertionError("a store to memory that nobody has used is ordered")

    monkeypatch.setattr(Checker, "shared_access", closer)
    text = kernel(ADDRESS + STORE_ALL, before=DYNAMIC)
    assert launch_kernel(text, check=True, smem_bytes=512).findings == []


@pytest.mark.parametrize(("used", "stopped"), [("%r4", False), ("%r7", True)])
def test_padding_that_nobody_uses_stops_no_block(
    used: str, stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth word of a structure is never written."""
    seen: list[bool] = []
    stop = tainted._stopped
    monkeypatch.setattr(tainted, "_stopped", lambda *what: seen.append(True) or stop(*what))
    body = f"""st.shared.v2.b32 [%r3], {{%r0, %r0}};
st.shared.b32 [%r3+8], %r0;
{LOAD_ALL}
add.u32 %r8, {used}, 1;"""
    text = kernel(ADDRESS + body, before=DYNAMIC)
    report = launch_kernel(text, check=True, smem_bytes=512)
    assert report.findings == []
    assert bool(seen) is stopped


@needs_machine_code
@pytest.mark.parametrize("ordered", [True, False])
def test_reads_of_many_warps_are_quick(ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 13 warps needs a plane of its own for its read of one word."""
    slow: list[int] = []
    for name in ("shared", "shared_surely"):
        monkeypatch.setattr(Races, name, _counted(getattr(Races, name), slow))
    body = f"""mov.u32 %r0, %tid.x;
mov.u32 %r2, dynamic;
setp.ge.u32 %p1, %r0, 32;
@%p1 bra met;
st.shared.b32 [%r2], 5;
met: bar.sync 0;
ld.shared.b32 %r4, [%r2];
{"bar.sync 0;" * ordered}
setp.lt.u32 %p1, %r0, 384;
@%p1 bra end;
st.shared.b32 [%r2], %r4;
end:"""
    text = kernel(body, before=DYNAMIC)
    report = launch_kernel(text, block=(416,), check=True, smem_bytes=512)
    assert [each.check for each in report.findings] == ["race"] * (not ordered)
    assert len(slow) == 2 * (not ordered)


def _counted(function: Any, calls: list[int]) -> Any:
    return lambda *what: calls.append(1) or function(*what)


def test_bytes_of_parameters_do_not_refine_shared_memory() -> None:
    body = "ld.param.u8 %h1, [a];\nst.shared.b32 [s], %r1;"
    text = kernel(f".shared .align 4 .b8 s[64];\n{body}", ".param .u8 a")
    program = ptxemu.load(text).program(None)
    assert (program.shared_grain, program.global_grain) == (4, 4)


def test_shadows_use_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeros, "_kept", {})
    monkeypatch.setattr(zeros, "_kept_bytes", 0)
    monkeypatch.setattr(zeros, "_MOST", 3 * 8 * 64)
    first, second, third = zeros.zeros(64), zeros.zeros(64), zeros.zeros(128)
    first[:] = second[:] = third[:] = 1
    zeros.keep((first, third))
    again = zeros.zeros(128)
    assert again is third
    assert not again.any()
    zeros.keep((second, third))  # more than is kept: one of the oldest size leaves
    assert zeros.zeros(128) is third
    assert zeros.zeros(64) is first
    assert zeros.zeros(64) is not second
