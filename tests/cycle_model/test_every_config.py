"""Every config of every family binds, on each architecture that it is for, and gives one time."""

from __future__ import annotations

import pytest

from cycle_model.gpus import for_arch
from cycle_model.grid import LaunchModel
from cycle_model.launch import bind
from cycle_model.sass.tools import HOW_TO_GET_TOOLS, tools_found
from kernelkit.call.launch import emulation
from kernelkit.compile.compiler import collecting
from ptxemu.native.accesses import COPIED
from ptxemu.options import Options
from ptxemu.record.recording import Recording
from ptxemu.watch import watched
from tests.cycle_model.every_config import EVERY, reached

pytestmark = [
    pytest.mark.skipif(not tools_found(), reason=HOW_TO_GET_TOOLS),
    pytest.mark.usefixtures("whole_ptxas"),
]


def cycles_of(recording: Recording) -> int:
    """All of its warps are bound, to paths with the copies to shared memory that they executed;
    the compiler merges other accesses, but not these."""
    bound = bind(recording)
    warps = [warp for number in bound.clusters for warp in bound.cluster(number)]
    assert len(warps) == len(recording.warps)
    for warp in warps:
        items = [bound.function.instructions[at] for at in warp.path.tolist()]
        copies = [not item.guard for item in items if item.word == "LDGSTS"]
        executed = sum(access.memory == COPIED for access in warp.record.accesses())
        assert sum(copies) <= executed <= len(copies)
    return LaunchModel(bound, for_arch(recording.arch)).predict().cycles


def test_the_problems_reach_the_tables():
    """Of attention and of the products of experts; decodes and steps are tables of problems."""
    for config, call in reached():
        with collecting() as keys:
            call()
        assert [key.config for key in keys] == [config]


@pytest.mark.parametrize(("call", "arch"), EVERY)
def test_binds(call, arch):
    with emulation(Options(limit=None), arch=arch), watched(record=True) as report:
        call()
    recordings = [launch.recording for launch in report.launches if launch.recording.cubin]
    assert recordings
    for recording in recordings:
        assert cycles_of(recording) == cycles_of(recording) > 0
