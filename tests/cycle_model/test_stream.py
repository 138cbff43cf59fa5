"""Consecutive launches, and SMs that run in parallel: how much a dependent launch overlaps, and
what neighbours read together, as measured on an H100.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cycle_model.binding.bound import BoundLaunch
from cycle_model.gpus import GPUS
from cycle_model.grid import LaunchModel, in_stream
from cycle_model.launch import bind
from cycle_model.sass.flow import Function
from cycle_model.traffic import Traffic
from ptxemu.record.recording import LOAD, Event, Recording, WarpRecord

H100 = GPUS["H100"]
BEGINS, WAITS = "PREEXIT", "ACQBULK"  # launch_dependents and wait, of griddepcontrol


def dependent(decoded, **changed: str) -> LaunchModel:
    """The decode, with instructions of griddepcontrol in place of some at its straight beginning or
    its end.
    """
    bound: BoundLaunch = bind(replace(decoded, dependent=True))
    items = list(bound.function.instructions)
    for opcode, number in changed.items():
        items[number] = replace(items[number], opcode=opcode)
    function = Function(bound.function.name, items, bound.function.labels)
    return LaunchModel(bound.with_function(function), H100)


def microseconds(model: LaunchModel) -> float:
    return model.predict().microseconds


@pytest.fixture(scope="module")
def whole(decoded) -> float:
    """Microseconds between the first cycle of a launch and its last."""
    return LaunchModel(bind(decoded), H100).predict().cycles / H100.value("clock") / 1e3


def test_one_that_says_nothing_begins_at_the_end_of_the_other(decoded, whole):
    model = dependent(decoded)
    assert microseconds(model) == pytest.approx(whole + H100.value("dependent_start"), abs=0.02)


def test_one_that_waits_begins_when_the_other_has_ended(decoded, whole):
    """launch_dependent, work after the wait: 0.6 us from one launch to the next, plus the work,
    less the start of CTAs, which happened before.
    """
    found = microseconds(dependent(decoded, **{BEGINS: 0, WAITS: 1}))
    most = whole + H100.value("dependent_release")
    assert most - 0.1 < found <= most
    assert found < microseconds(LaunchModel(bind(decoded), H100))


def test_what_is_done_before_the_wait_is_hidden(decoded, whole):
    """launch_dependent, work between: 0.58 us, whatever the amount of work."""
    items = bind(decoded).function.instructions
    ends = max(number for number, item in enumerate(items[:-1]) if item.opcode == "EXIT")
    late = microseconds(dependent(decoded, **{BEGINS: 0, WAITS: ends - 1}))
    early = microseconds(dependent(decoded, **{BEGINS: 0, WAITS: 1}))
    assert H100.value("dependent_least") <= late < early


def test_one_that_finds_no_room_waits_for_it(decoded, whole):
    """launch_dependent, work between, shared memory for one CTA: the work, and a CTA's start."""
    model = dependent(decoded, **{BEGINS: 0})
    model.places = model.clusters
    start = model.start / H100.value("clock") / 1e3
    assert microseconds(model) == pytest.approx(whole + start, abs=0.05)
    roomy = dependent(decoded, **{BEGINS: 0})
    assert microseconds(roomy) < microseconds(model)


def test_others_of_a_stream_take_what_they_take_alone(decoded):
    models = [LaunchModel(bind(decoded), H100) for _ in range(2)]
    alone = models[0].predict().microseconds
    assert [each.microseconds for each in in_stream(models)] == pytest.approx([alone] * 2)
    mixed = in_stream([models[0], dependent(decoded, **{BEGINS: 0, WAITS: 1})])
    assert mixed[0].microseconds == pytest.approx(alone, abs=0.02)
    assert mixed[1].microseconds < alone


def reads_of(*clusters: tuple[int, ...]) -> Traffic:
    """Traffic of clusters that each read 128 bytes at every listed address of a 1 KiB
    allocation.
    """
    warps = [
        WarpRecord(number, 0, 0, np.zeros(0, np.uint32), [loaded(at) for at in places], NO_WORDS)
        for number, places in enumerate(clusters)
    ]
    grid = (len(clusters), 1, 1)
    recording = Recording("kernel", grid, (32, 1, 1), (1, 1, 1), 0, [], [], "sm_90a", warps)
    recording.memory = [(at, at + 1024) for at in (0, 4096)]
    launch = BoundLaunch(Function("kernel", [], {}), recording)
    return Traffic(launch, len(clusters), cold=False, l2=1 << 20)


NO_WORDS = np.zeros(0, np.int64)


def loaded(address: int, nbytes: int = 128) -> Event:
    return Event(0, 0, LOAD, shape=(1, nbytes, 128), address=address)


def test_l2_answers_once_what_neighbours_read():
    """l2_bytes_per_cycle with readers: two SMs that read the same line get nearly twice the
    rate.
    """
    asked = reads_of((0, 4096), (256, 4096), (512, 4096)).alone(4)
    assert asked(0) == 1, "what each of them reads for itself"
    assert asked(4096) == pytest.approx(1 / 4)
    assert reads_of((0,), (0,)).alone(1)(0) == 1, "a neighbour of another part of the GPU"
    outside = reads_of((0,), (0,))
    for warp in outside.launch.recording.warps:
        warp.events[0] = loaded(0, nbytes=0)
    assert outside.alone(4)(0) == 1
