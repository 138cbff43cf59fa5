"""Watching launches: each is seen and affected by changes, however it was started."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.watch import heard, watched
from tests.ptxemu.kernels import kernel, launch

NOTHING = kernel("")
STORE = kernel(
    "ld.param.u64 %rd0, [x]; mov.u32 %r0, 7; st.global.u32 [%rd0], %r0;", ".param .u64 x"
)
HANG = kernel("mov.u32 %r0, %tid.x; setp.gt.u32 %p0, %r0, 31; @%p0 bra END; bar.sync 1, 64; END:")

RACE = kernel(  # warp 1 reads what warp 0 writes
    """mov.u32 %r0, %tid.x;
    setp.lt.u32 %p0, %r0, 32;
    @%p0 st.shared.u32 [cell], %r0;
    @!%p0 ld.shared.u32 %r1, [cell];""",
    before=".shared .align 4 .b8 cell[4];\n",
)


def test_launches_are_seen_in_order_with_changed_options():
    with watched(policy="random", check=True) as report:
        first = launch(NOTHING, policy="adversarial", seed=3, limit=7.0)
        launch(NOTHING)
    assert [item.options.policy for item in report.launches] == ["random", "random"]
    assert report.launches[0] is first
    assert (first.options.seed, first.options.limit, first.options.check) == (3, 7.0, True)
    launch(NOTHING)
    assert len(report.launches) == 2


def test_the_innermost_watch_decides_and_all_see():
    with watched(seed=1, strict=True) as outer:
        with watched(seed=2) as inner:
            launch(NOTHING)
        launch(NOTHING)
    assert [item.options.seed for item in outer.launches] == [2, 1]
    assert [item.options.strict for item in outer.launches] == [True, True]
    assert len(inner.launches) == 1


def test_a_launch_that_raises_is_seen_with_its_reason():
    with watched() as report, pytest.raises(ptxemu.Deadlock):
        launch(HANG, block=(64,))
    (stopped,) = report.launches
    assert stopped.stopped.startswith("Deadlock: ")
    assert (stopped.entry, stopped.block) == ("test", (64, 1, 1))


def test_results_stay_what_they_are():
    x = np.zeros(1, np.uint32)
    with watched(check=True):
        launch(STORE, x)
    assert x[0] == 7


def test_changes_are_refused_before_any_launch():
    with pytest.raises(ValueError, match="policy='lifo'"), watched(policy="lifo"):
        pass
    with pytest.raises(TypeError, match="colour"), watched(colour=1):
        pass


def test_findings_are_heard_as_they_arise():
    told = []

    def hear(entry, what):
        assert not report.launches, "the launch has not ended"
        told.append((entry, getattr(what, "check", what)))

    with watched(check=True) as report, heard(hear):
        launch(RACE, block=(64,))
    launch(RACE, block=(64,), check=True)
    assert told == [("test", "race")]


def test_what_stops_a_launch_is_heard():
    told = []
    with heard(lambda *what: told.append(what)), pytest.raises(ptxemu.Deadlock):
        launch(HANG, block=(64,))
    assert [(entry, what.partition(":")[0]) for entry, what in told] == [("test", "Deadlock")]


def test_an_error_that_is_not_the_kernels_leaves_the_findings(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ptxemu.machine.machine.Machine._opcode_counts", interrupted)
    with watched(check=True) as report, pytest.raises(KeyboardInterrupt):
        launch(RACE, block=(64,))
    assert [finding.check for finding in report.errors] == ["race"]
