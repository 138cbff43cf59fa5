"""The engine on code written here: behaviour measured on silicon, and results that may not depend
on chance.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cycle_model.binding.bound import BoundWarp
from cycle_model.binding.target import Landmark
from cycle_model.edits import Edit, edited, rewritten
from cycle_model.engine import layout as L
from cycle_model.engine.simulate import StuckError, simulate
from cycle_model.engine.tables import Placed, Sharing, Tables
from cycle_model.explain import TIME_UNIT, Spent, chain, summary, timeline
from cycle_model.gpus import GPUS
from cycle_model.grid import MEMORIES, LaunchModel
from cycle_model.launch import bind
from cycle_model.parameters.parameter import Parameter
from cycle_model.sass.flow import Control, Function, Instruction
from ptxemu.native.library import without
from ptxemu.record.recording import LOAD, Event, Recording, WarpRecord
from ptxemu.syntax.parser import parse

H100 = GPUS["H100"]


def function_of(*lines: tuple[str, Control]) -> Function:
    """A function of these instructions (opcode, control word) and an EXIT."""
    items = [Instruction(16 * k, "", opcode, "", c) for k, (opcode, c) in enumerate(lines)]
    items.append(Instruction(16 * len(items), "", "EXIT", "", Control(stall=1)))
    return Function("kernel", items, {})


def simulated(function: Function, warps: int = 1, **changed: float):
    """Simulate warps that all take the straight path, on one scheduler."""
    recording = Recording("kernel", (1,) * 3, (32,) * 3, (1,) * 3, 0, [], [], "sm_90a")
    path = np.arange(len(function.instructions), dtype=np.int32)
    placed = []
    for k in range(warps):
        record = WarpRecord(0, 0, 4 * k, np.zeros(0, np.uint32), [], np.zeros(0, np.int64))
        warp = BoundWarp(record, path, np.zeros(0, np.int64), (), 0.0, 0)
        placed.append(Placed(warp, 0, 0, 0, lambda address: False))
    tables = Tables(recording, function, placed, H100.changed(**changed))
    return simulate(tables, Sharing(1), log=True)


def order_of(result) -> list[int]:
    """The warp of each issued instruction, in order."""
    return result.log[: result.issued, L.L_WARP].tolist()


def test_a_stall_is_obeyed():
    result = simulated(function_of(*[("FFMA", Control(stall=5))] * 10))
    times = result.log[: result.issued, L.L_TIME]
    assert (np.diff(times) == 5).all()


def test_a_scoreboard_is_waited_for():
    load, use = ("MUFU.EX2", Control(1, writes=2)), ("FFMA", Control(1, waits=0b100))
    first = simulated(function_of(load, use), latency_special=18).log[1, L.L_TIME]
    later = simulated(function_of(load, use), latency_special=24).log[1, L.L_TIME]
    assert (first, later) == (18, 24)


def test_what_was_spilled_comes_back_from_l1():
    load, use = ("LDL", Control(1, writes=2)), ("FFMA", Control(1, waits=0b100))
    for cycles in (32, 45):
        result = simulated(function_of(load, use), global_latency_l1=cycles)
        assert result.log[1, L.L_TIME] == cycles


def test_parameters_are_fetched_once_and_one_after_the_other():
    """Two of the three reads are of the same 32 bytes."""
    function = function_of(*[("ULDC", Control())] * 3)
    for item, place in zip(function.instructions, ("0x210", "0x240", "0x218"), strict=False):
        object.__setattr__(item, "operands", f"UR4, c[0x0][{place}]")
    function = Function("kernel", function.instructions, {})
    before, after = (simulated(function, parameter_sector=n).cycles for n in (0, 100))
    assert after - before == 200


def test_parameters_that_another_register_addresses_are_others():
    """Two reads of a table at the same place, one of its first and one of its second entry."""
    function = function_of(*[("ULDC", Control())] * 2)
    for item, register in zip(function.instructions, ("UR7", "UR9"), strict=False):
        object.__setattr__(item, "operands", f"UR4, c[0x0][{register}+0x240]")
    before, after = (simulated(function, parameter_sector=n).cycles for n in (0, 100))
    assert after - before == 200


def test_a_warp_is_there_until_what_it_asked_for_has_come():
    """Measured on an H100: a kernel that ends with a load takes the latency of that load longer."""
    function = function_of(("MUFU.EX2", Control(1, writes=2)))
    assert simulated(function, latency_special=90).cycles >= 90


def test_greedy_then_the_youngest():
    """Measured on an H200: a warp keeps its scheduler as long as it can issue; then the youngest of
    the others gets it (notes/cycle_model.md, 2026-11-24).
    """
    result = simulated(function_of(*[("FFMA", Control(stall=1))] * 20), warps=3)
    order = order_of(result)
    turns = [order[0], *(b for a, b in pairwise(order) if a != b)]
    assert turns == [0, 2, 1]


def test_a_yield_lets_another_one_go():
    result = simulated(function_of(*[("FFMA", Control(stall=1, yields=True))] * 20), warps=2)
    assert order_of(result)[:6] == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("warps", [2, 4])
def test_exponentials_take_turns(warps):
    """Measured on an H200: 8.2 cycles each, whichever warp issues them."""
    result = simulated(function_of(*[("MUFU.EX2", Control(stall=2))] * 50), warps=warps)
    assert result.cycles == pytest.approx(8 * 50 * warps, rel=0.06)


def test_two_runs_are_the_same(decoded):
    model = LaunchModel(bind(decoded), H100)
    one, other = (model.simulated(0, log=True) for _ in range(2))
    assert one.cycles == other.cycles
    assert (one.log == other.log).all()


def test_python_and_machine_code_agree():
    """The routines run as Python, on a short kernel."""
    function = function_of(*[("MUFU.EX2", Control(2, writes=0)), ("FFMA", Control(4, waits=1))] * 5)
    fast = simulated(function, warps=2)
    with without():
        from cycle_model.engine import simulate as module

        module._library.cache_clear()
        slow = simulated(function, warps=2)
    module._library.cache_clear()
    assert (fast.log == slow.log).all()


def test_the_chain_adds_up(decoded):
    result = LaunchModel(bind(decoded), H100).simulated(0, log=True)
    links = chain(Spent(result))
    assert links[0].begin == 0
    assert all(one.end == other.begin for one, other in pairwise(links))
    assert sum(cycles for *_, cycles in summary(links)) == links[-1].end <= result.cycles


def test_a_barrier_that_nobody_completes_is_an_error(decoded):
    """The path of one warp ends before its barriers."""
    bound = bind(decoded)
    warps = bound.cluster(0)
    cut = replace(warps[0], path=warps[0].path[:20], at=warps[0].at[:0], landmarks=())
    placed = [
        Placed(warp, warp.record.rank, warp.record.rank, 0, lambda address: False)
        for warp in (cut, *warps[1:])
    ]
    with pytest.raises(StuckError, match="waits for"):
        simulate(Tables(decoded, bound.function, placed, H100), Sharing(8))


# -- wgmma ----------------------------------------------------------------------------------------


def placed_wgmma(count: int, n: int, allowed: int = 0, beside: int = 0, gpu=H100) -> Tables:
    """A warpgroup that issues `count` products as one group, then `beside` FFMA, then waits for the
    group.
    """
    lines = [(f"HGMMA.64x{n}x16.F32.BF16", Control(stall=1))] * count
    lines += [("FFMA", Control(stall=1))] * beside
    function = function_of(*lines, ("WARPGROUP.DEPBAR.LE", Control(stall=1)))
    for k, item in enumerate(function.instructions[:count]):
        ends = ", gsb0" if k == count - 1 else ""
        object.__setattr__(item, "operands", f"R24, gdesc[UR4], R24{ends}")
    text = f".target sm_90a\n.entry k() {{ wgmma.wait_group.sync.aligned {allowed}; ret; }}"
    site = parse(".version 8.3\n" + text + "\n").entries["k"].body[0]
    landmarks = [Landmark("wgmma", (), 0, ())] * count + [Landmark("wgmma wait", (), 0, ())]
    recording = Recording("k", (1,) * 3, (128, 1, 1), (1,) * 3, 0, [site], [], "sm_90a")
    path = np.arange(len(function.instructions), dtype=np.int32)
    at, placed = np.array([*range(count), count + beside]), []
    for k in range(4):
        record = WarpRecord(0, 0, k, np.zeros(0, np.uint32), [], np.zeros(0, np.int64))
        warp = BoundWarp(record, path, at, tuple(landmarks), 0.0, 0)
        placed.append(Placed(warp, 0, 0, 0, lambda address: False))
    return Tables(recording, function, placed, gpu)


@pytest.mark.parametrize(("count", "n", "measured"), [(1, 64, 105), (4, 128, 319), (4, 256, 575)])
def test_products_of_a_warpgroup_take_what_was_measured(count, n, measured):
    """The numbers are wgmma_until_wait of results/units_h200.json."""
    assert simulate(placed_wgmma(count, n), Sharing(1)).cycles == pytest.approx(measured, rel=0.06)


def test_a_group_that_may_be_left_is_not_waited_for():
    assert simulate(placed_wgmma(4, 256, allowed=1), Sharing(1)).cycles < 100


@pytest.mark.parametrize(("lost", "cycles"), [(0, 100), (1, 200), (2, 300)])
def test_what_wgmma_takes_from_other_pipes(lost, cycles):
    """`lost` is what each of a hundred FFMA loses while products run for 512 cycles; after them
    nothing is lost.
    """
    gpu = H100.changed(beside_wgmma=lost)
    found = simulate(placed_wgmma(4, 256, allowed=1, beside=100, gpu=gpu), Sharing(1)).cycles
    assert found == pytest.approx(cycles, abs=12)
    alone = simulate(placed_wgmma(1, 16, allowed=1, beside=100, gpu=gpu), Sharing(1)).cycles
    assert alone == pytest.approx(100, abs=20)


def test_rows_that_are_named_have_a_cost_of_their_own():
    """Ten loads of four rows, one after the other; `tma_gather` replaces `tma_issue`."""
    gpu = GPUS["B200"].changed(tma_issue=90, tma_gather=18)

    def cycles(opcode: str) -> int:
        function = function_of(*[(opcode, Control(stall=1))] * 10)
        event = Event(0, 0, LOAD, (), (4, 128, 1152), 0)
        record = WarpRecord(0, 0, 0, np.zeros(0, np.uint32), [event], np.zeros(0, np.int64))
        path = np.arange(len(function.instructions), dtype=np.int32)
        landmarks = (Landmark("load", (event,), 0, 0),) * 10
        warp = BoundWarp(record, path, np.arange(10), landmarks, 0.0, 0)
        text = ".version 8.7\n.target sm_100a\n.entry k() { ret; }\n"
        site = parse(text).entries["k"].body[0]
        recording = Recording("k", (1,) * 3, (32, 1, 1), (1,) * 3, 0, [site], [], "sm_100a")
        placed = [Placed(warp, 0, 0, 0, lambda address: False)]
        result = simulate(Tables(recording, function, placed, gpu), Sharing(1), log=True)
        spans = [span for span in timeline(Spent(result)).spans if span.agent == "TMA loads"]
        assert len(spans) == 10
        return max(span.start for span in spans) - min(span.start for span in spans)

    assert cycles("UTMALDG.2D.2CTA") == 9 * 90
    assert cycles("UTMALDG.2D.GATHER4.2CTA") == 9 * 18


def test_units_stand_beside_the_warps_in_real_cycles(tmp_path):
    """The tensor core's spans of a product that four warps issue last as long as the product."""
    result = simulate(placed_wgmma(4, 128), Sharing(1), log=True)
    trace = timeline(Spent(result))
    busy = [span for span in trace.spans if span.agent == "tensor core"]
    assert len(busy) == 4 * 4
    assert {span.end - span.start for span in busy} == {64}
    trace.to_perfetto(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["time"] == TIME_UNIT


# -- the grid and edits ---------------------------------------------------------------------------


def test_waves(decoded):
    """Twice as many clusters as there are places take twice as long."""
    model = LaunchModel(bind(decoded), H100)
    one = model.predict()
    many = LaunchModel(bind(replace(decoded, grid=(decoded.grid[0], 2, 2 * one.places))), H100)
    found = many.predict()
    assert found.waves == -(-many.clusters // one.places)
    assert found.cycles >= found.waves * min(one.durations.values())


def test_clusters_that_others_took_over_cost_nothing(decoded):
    """The recording has as many clusters as there are places, which did all of the grid's work."""
    places = LaunchModel(bind(decoded), H100).places
    recorded = replace(decoded, grid=(decoded.grid[0], 2, 2 * places), places=places)
    model = LaunchModel(bind(recorded), H100)
    assert (model.clusters, model.predict().waves) == (places, 1)
    fewer = replace(recorded, places=places - 1)
    with pytest.raises(ValueError, match=rf"{places} would on H100.*resident={places}\)"):
        LaunchModel(bind(fewer), H100).predict()


def test_ctas_are_sent_quickly_at_first(decoded):
    """launch_exit in a process of the slower kind: 132 CTAs 1.08 us, 1,056 1.29, 2,112 1.94."""
    model = LaunchModel(bind(decoded), H100)
    model.per_sm = 16
    sent = [model._sent(count) / 1980 for count in (1, 132, 1056, 2112)]
    assert np.diff(sent) == pytest.approx([0.2, 0.21, 0.64], abs=0.03)


def test_a_launch_takes_its_time_whatever_it_does(decoded):
    model = LaunchModel(bind(decoded), H100)
    assert model.predict().microseconds > H100.value("launch_least")
    slow = edited(H100, [Edit.parsed("launch_least=50")])
    assert LaunchModel(bind(decoded), slow).predict().microseconds == pytest.approx(50)


def test_the_last_of_several_waves_is_not_a_whole_one(decoded):
    """CTAs of a full wave compete for memory; fewer do in the last wave."""
    model = LaunchModel(bind(decoded), H100)
    first = model.simulated(0)
    assert model._later(0, first) == (first.cycles, first.cycles), "one wave"
    model = LaunchModel(bind(decoded), H100)
    model.clusters, model.together = model.places + 1, 2
    steady, last = model._later(0, model.simulated(0))
    alone = model.simulated(0, alone=True).cycles
    assert alone == last <= steady <= model.simulated(0).cycles


def test_what_is_written_goes_on_to_memory_where_buffers_rotate(decoded):
    bound = bind(decoded)
    slow = edited(H100, [Edit.parsed("hbm_bytes_written_per_cycle=1")])
    cold, warm = (LaunchModel(bound, slow, memory=each).predict().cycles for each in MEMORIES)
    assert cold > LaunchModel(bound, H100).predict().cycles + 1000
    assert warm == LaunchModel(bound, H100, memory="warm").predict().cycles


def test_warm_is_faster_than_cold(decoded):
    cold, warm = (LaunchModel(bind(decoded), H100, memory=m).predict() for m in ("cold", "warm"))
    assert warm.cycles < cold.cycles


def test_edits(decoded):
    bound = bind(decoded)
    model = LaunchModel(bound, H100)
    slower = edited(H100, [Edit.parsed("global_latency_hbm=3000")])
    assert LaunchModel(bound, slower).predict().cycles > model.predict().cycles
    stalled = rewritten(bound, [Edit.parsed("stall HMMA=15")])
    assert LaunchModel(stalled, H100).predict().cycles > model.predict().cycles


def test_what_is_dropped_does_nothing(decoded):
    """Without waits for copies a decode is faster; without arrivals it never ends."""
    bound = bind(decoded)
    slow = edited(H100, [Edit.parsed("copy_latency=3000")])
    before = LaunchModel(bound, slow).predict().cycles
    hasty = rewritten(bound, [Edit.parsed("drop DEPBAR")])
    assert LaunchModel(hasty, slow).predict().cycles < before - 2000
    with pytest.raises(StuckError, match="mbarrier"):
        LaunchModel(rewritten(bound, [Edit.parsed("drop STAS")]), H100).predict()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense=1", "no parameter 'nonsense'"),
        ("stall NOSUCH=1", "has no NOSUCH"),
        ("tma_row=fast", "'fast' is not a number"),
        ("stall MUFU", "NAME=NUMBER"),
    ],
)
def test_edits_that_are_none(decoded, text, words):

    def apply() -> None:
        edit = Edit.parsed(text)
        edited(H100, [edit])
        rewritten(bind(decoded), [edit])

    with pytest.raises(ValueError, match=words):
        apply()


# -- parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GPUS)
def test_every_parameter_has_a_source_and_a_range(name):
    gpu = GPUS[name]
    fitted = [each for each in gpu.parameters.values() if each.kind == "fitted"]
    assert len(fitted) <= 3
    assert all(each.source and each.unit for each in gpu.parameters.values())
    assert gpu.perturbed(1) == gpu.perturbed(1) != gpu.perturbed(2)


def test_a_value_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="not within"):
        Parameter(5, 1, 4, "cycles", "guessed", "nobody")
