"""The search for a path, on a few instructions written down here."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from cycle_model.binding import ways
from cycle_model.binding.bound import BoundLaunch
from cycle_model.binding.search import Search, Unbound
from cycle_model.binding.symbols import (
    BARRIER,
    INIT,
    KINDS,
    NO_WORK,
    SEND,
    TEST,
    WAIT,
    WEIGHTS,
    Symbol,
    Vector,
    of_function,
    of_ptx,
    of_sass,
)
from cycle_model.binding.target import Landmark, Target, Targets
from cycle_model.launch import bind
from cycle_model.sass.flow import Function, Instruction
from kernelkit.call.launch import emulation
from kvcache.movement.api import checksum
from ptxemu.native.library import without
from ptxemu.options import Options
from ptxemu.record import recording as r
from ptxemu.record.recording import WAIT as WAITED
from ptxemu.record.recording import Event, Recording, WarpRecord
from ptxemu.syntax.parser import parse
from ptxemu.syntax.tree import Instr
from ptxemu.watch import watched
from tests.ptxemu.kernels import HEAD

LOAD = "tmem ld 64"
SASS = {
    SEND: "STAS [R2.64], R4",
    LOAD: "LDTM.x64 R4, tmem[UR4]",
    WAIT: "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], RZ",
    BARRIER: "BAR.SYNC.DEFER_BLOCKING 0x0",
    "arrive": "SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR4], R5",
}


def function_of(*lines: str) -> Function:
    """Parse instructions; lines that end in a colon are labels."""
    items: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in lines:
        if line.endswith(":"):
            labels[line[:-1]] = len(items)
            continue
        guard, text = line[1:].split(" ", 1) if line.startswith("@") else ("", line)
        opcode, _, operands = text.partition(" ")
        items.append(Instruction(len(items) * 16, guard, opcode, operands))
    return Function("kernel", items, labels)


def work(**amounts: int) -> Vector:
    """Work in instructions by kind, such as `global_load=2`."""
    given = {kind.replace("_", " "): amount for kind, amount in amounts.items()}
    return tuple(given.get(kind, 0) * WEIGHTS[kind] for kind in KINDS)


def target_of(*names: str, rest: Vector = NO_WORK) -> Target:
    return Target(tuple(Landmark(name, (), 0, NO_WORK) for name in names), rest)


@pytest.mark.parametrize("recorded", [(SEND, SEND, LOAD), (LOAD, SEND, SEND)])
def test_a_load_of_tensor_memory_may_pass_a_send(recorded):
    search = Search(function_of(SASS[SEND], SASS[LOAD], SASS[SEND], "EXIT"))
    found = search.path(target_of(*recorded))
    order = [recorded[number] for number, _ in found[:-1]]
    assert order == [SEND, LOAD, SEND]
    sends = [number for number, _ in found[:-1] if recorded[number] == SEND]
    assert sends == sorted(sends)


def test_a_load_of_tensor_memory_passes_no_wait():
    search = Search(function_of(SASS[LOAD], SASS[WAIT], SASS[SEND], "EXIT"))
    with pytest.raises(Unbound, match="landmark 0 of 4, 'wait'"):
        search.path(target_of(WAIT, SEND, LOAD))


ARRIVE = "mbarrier.arrive.{}.shared::cluster.b64 _, [%r1];"


@pytest.mark.parametrize(("how", "passes"), [("relaxed.cluster", True), ("release.cta", False)])
def test_only_a_relaxed_arrival_elsewhere_may_pass_an_access_to_tensor_memory(how, passes):
    (site,) = _recording(ARRIVE.format(how)).sites[:1]
    symbol = of_ptx(site)
    names = [(LOAD, False), (symbol.landmark, symbol.relaxed), (LOAD, False)]
    target = Target(tuple(Landmark(name, (), 0, NO_WORK, how) for name, how in names), NO_WORK)
    arrive = "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [UR11], RZ"
    search = Search(function_of(SASS[LOAD], SASS[LOAD], arrive, "EXIT"))
    if passes:
        assert [number for number, _ in search.path(target)] == [0, 2, 1, 3]
    else:
        with pytest.raises(Unbound, match="landmark 1 of 4, 'arrive'"):
            search.path(target)


def test_the_nearest_way_may_lead_nowhere():
    """The barrier at the end is nearer, but only the one after much work is followed by another."""
    much = ["FSEL R4, R5, R6, P0"] * 100
    search = Search(
        function_of(
            "@P0 BRA `(.L_x_1)",
            *much,
            SASS[BARRIER],
            SASS[BARRIER],
            "EXIT",
            ".L_x_1:",
            SASS[BARRIER],
            "EXIT",
        )
    )
    path = search.path(target_of(BARRIER, BARRIER))
    assert path[0][1].steps[-1][1] == len(much) + 2
    assert len(search.path(target_of(BARRIER))[0][1].steps) == 2


@pytest.mark.parametrize("passed", [LOAD, "arrive"])
def test_work_that_passed_a_landmark_counts_where_the_warp_waits(passed):
    """A loop has two copies; the one without selections was executed. There the compiler moved half
    of the exponentials after the landmark; in the other copy they stay before it."""
    half, selections = ["MUFU.EX2 R4, R4"] * 32, ["FSEL R4, R5, R6, P0"] * 40
    plain = (*half, SASS[passed], *half, SASS[BARRIER], "EXIT")
    masked = (*selections, *half, *half, SASS[passed], SASS[BARRIER], "EXIT")
    function = function_of("@P0 BRA `(.L_x_1)", *masked, ".L_x_1:", *plain)
    landmarks = (
        Landmark(passed, (), 0, work(special=64)),
        Landmark(BARRIER, (), 0, NO_WORK),
    )
    path = Search(function).path(Target(landmarks, NO_WORK))
    executed = [at for _, way in path for step in way.steps for at in range(*step)]
    words = [function.instructions[at].word for at in executed]
    assert (words.count("MUFU"), words.count("FSEL")) == (64, 0)


def _many_ways(choices: int) -> tuple[Function, Target]:
    """Choices in sequence, among three kinds of work in turn; no load is wanted."""
    kinds = (("MUFU.EX2 R4, R4", 8), ("FADD R4, R4, R5", 1), ("LDS R4, [R5]", 4))
    lines: list[str] = []
    for number in range(choices):
        lines += [f"@P0 BRA `(.L_x_{number})", kinds[number % 3][0], f".L_x_{number}:"]
    each = choices // 3
    return function_of(*lines, "EXIT"), target_of(rest=work(special=each, float=each))


def test_many_ways_that_meet():
    """There are 2^60 paths."""
    function, target = _many_ways(60)
    ((_, way),) = Search(function).path(target)
    assert way.cost < 1
    words = [function.instructions[at].word for step in way.steps for at in range(*step)]
    assert [words.count(word) for word in ("MUFU", "FADD", "LDS")] == [20, 20, 0]


def test_room_for_ways_grows(monkeypatch):
    function, target = _many_ways(12)
    expected = Search(function).path(target)
    monkeypatch.setattr(ways, "_NODES", 2)
    assert Search(function).path(target) == expected


def test_the_search_is_the_same_in_python():
    function, target = _many_ways(12)
    expected = Search(function).path(target)
    with without():
        ways._library.cache_clear()
        assert Search(function).path(target) == expected
    ways._library.cache_clear()


def test_a_way_that_is_off_is_looked_for_with_more_slack():
    """A loop reads shared memory once for each copy, but the recording has those reads elsewhere:
    sixteen rounds read more than the least slack allows.
    """
    each = ["LDS R4, [R5]", "LDGSTS.E.BYPASS.128 [R4], desc[UR4][R6.64]"] * 4
    search = Search(function_of(".L_x_1:", *each, "@P0 BRA `(.L_x_1)", "EXIT"))
    ((_, way),) = search.path(target_of(rest=work(copy=64)))
    assert len(way.steps) == 16 + 1


def _recording(*lines: str) -> Recording:
    """A recording of one warp that executed these instructions once, without events."""
    text = "\n".join(lines)
    registers = ".reg .b32 %r<9>; .reg .pred %p<2>;"
    source = f"{HEAD}.visible .entry kernel()\n{{\n{registers}\n{text}\nret;\n}}\n"
    (entry,) = parse(source).entries.values()
    sites = [each for each in entry.body if isinstance(each, Instr)]
    warp = WarpRecord(0, 0, 0, np.zeros(1, np.uint32), [], np.zeros(0, np.int64))
    shape = (1, 1, 1)
    return Recording(
        "kernel", shape, (32, 1, 1), shape, 0, sites, [range(len(sites))], "sm_100a", [warp]
    )


def test_a_load_that_nobody_reads_is_not_expected():
    """The compiler removes such a load."""
    recording = _recording(
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r0];",
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r3, %r4}, [%r0];",
        "st.shared.b32 [%r0], %r4;",
    )
    target = Targets(recording).of(recording.warps[0])
    assert [(each.name, each.site) for each in target.landmarks] == [("tmem ld 2", 1)]


def test_a_warp_that_polls_is_expected_to_have_waited_once():
    """The number of polls in the emulator says nothing about a GPU."""
    recording = _recording("mbarrier.test_wait.parity.shared.b64 %p1, [%r0], 0;")
    (warp,) = recording.warps
    warp.path = np.zeros(100, np.uint32)
    seen = Event(99, 0, WAITED, (((0, 1024), 0),))
    warp.events = [seen]
    (landmark,) = Targets(recording).of(warp).landmarks
    assert (landmark.name, landmark.events) == (TEST, (seen,))


def test_lanes_that_initialise_barriers_of_their_own_store_them():
    """Stores of 64 bits elsewhere are work."""
    stores = ["@!P1 STS.64 [R2+URZ+0x10000], R8"] * 2
    forgotten = ["FENCE.VIEW.ASYNC.S", "SYNCS.CCTL.IVALL"]
    function = function_of(*stores, *forgotten, SASS[BARRIER], stores[0], "EXIT")
    store = Symbol("", KINDS.index("shared store"), 2 * WEIGHTS["shared store"])
    expected = [Symbol(INIT)] * 2 + [Symbol()] * 2 + [Symbol(BARRIER), store, Symbol()]
    assert of_function(function.instructions) == expected


@pytest.mark.parametrize("executed", [1, 4])
def test_guarded_loads_may_not_have_been_executed(executed):
    """Three of four loads have a guard: the path leads through them whether one or all were
    executed.
    """
    loads = ["LDG.E.128 R4, desc[UR4][R2.64]", *["@P1 LDG.E.128 R8, desc[UR4][R2.64]"] * 3]
    function = function_of("@P0 BRA `(.L_x_1)", *loads, ".L_x_1:", "EXIT")
    rest = work(global_load=4 * executed)
    ((_, way),) = Search(function).path(target_of(rest=rest))
    assert sum(end - begin for begin, end in way.steps) == len(function.instructions)


def test_all_warps_have_a_path(decoded):
    bound = bind(decoded)
    warps = [warp for cluster in bound.clusters for warp in bound.cluster(cluster)]
    assert len(warps) == len(decoded.warps)
    for warp in warps:
        items = [bound.function.instructions[at] for at in warp.path[warp.at].tolist()]
        assert [of_sass(item).landmark for item in items] == [x.name for x in warp.landmarks]
        assert bound.function.instructions[warp.path[-1]].word == "EXIT"


def test_work_on_the_path_is_what_was_recorded(decoded):
    """The path of a working warp has at least the recorded products, copies and exponentials."""
    bound = bind(decoded)
    warp = bound.cluster(0)[0]
    words = [bound.function.instructions[at].word for at in warp.path.tolist()]
    executed = [decoded.sites[site] for block in warp.record.path for site in decoded.blocks[block]]
    for word, opcode in (("HMMA", "mma"), ("LDSM", "ldmatrix"), ("MUFU", "ex2")):
        assert words.count(word) >= sum(site.root == opcode for site in executed) > 0


@pytest.mark.parametrize("kind", [r.BARRIER, r.WAIT, r.SEND])
def test_a_dropped_event_is_noticed(decoded, kind):
    changed = deepcopy(decoded)
    warp = next(w for w in changed.warps if any(event.what == kind for event in w.events))
    gone = next(event for event in warp.events if event.what == kind)
    warp.events.remove(gone)
    with pytest.raises(ValueError, match=f"warp {warp.index} of CTA {warp.rank}"):
        bind(changed).cluster(warp.cluster)


def test_a_dropped_atomic_is_noticed():
    """An atomic is no landmark: that it was executed follows only from the path."""
    memory = torch.zeros(2, 4096, dtype=torch.uint8)
    with emulation(Options(limit=None), arch="sm_90a"), watched(record=True) as report:
        checksum(memory, torch.tensor([1]), 0, 4096)
    recording = report.launches[0].recording
    bind(recording).cluster(0)
    warp = next(w for w in recording.warps if any(event.what == r.ATOMIC for event in w.events))
    warp.events = [event for event in warp.events if event.what != r.ATOMIC]
    with pytest.raises(ValueError, match=r"'atom.*not its effect"):
        bind(recording).cluster(warp.cluster)


def test_swapped_instructions_are_noticed(decoded):
    """Two landmarks of different kinds change places in the machine code."""
    function = bind(decoded).function
    items = list(function.instructions)
    names = [of_sass(item).landmark for item in items]
    first = names.index("init")
    second = next(k for k in range(first, len(names)) if names[k] in ("cluster arrive", "barrier"))
    items[first], items[second] = items[second], items[first]
    broken = BoundLaunch(type(function)(function.name, items, function.labels), decoded)
    with pytest.raises(Unbound, match="does not follow"):
        broken.cluster(0)


def test_the_error_names_what_can_come_next(decoded):
    function = bind(decoded).function
    rest = type(function)(function.name, function.instructions[-40:], {})
    with pytest.raises(Unbound, match=r"from 0x\w+ come"):
        BoundLaunch(rest, decoded).cluster(0)


def test_no_machine_code_no_binding(decoded):
    with pytest.raises(ValueError, match="no machine code"):
        bind(replace(decoded, cubin=b""))
    with pytest.raises(ValueError, match="is not in the machine code"):
        bind(replace(decoded, entry="another"))
